"""Recipes: the paper's values, overrides, limits, and the recipe of a run folder."""

import dataclasses
import subprocess

import pytest
import timm
import yaml

import forked
from sima_attn._settings import check, differences, flat, from_dict, to_dict, with_overrides
from sima_attn.reproduce.table_1 import TABLE_1
from sima_attn.train.recipes import RECIPES, Recipe, named_recipe
from sima_attn.train.run import RunFolder, provenance

PAPER = [name for name in RECIPES if name not in ("digits", "tiny_imagenet", "shipped", "photos")]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_run_says_its_name_and_survives_yaml(name):
    recipe = named_recipe(name)
    check(recipe)
    assert recipe.name == name
    assert timm.is_model(recipe.model.name)
    assert from_dict(Recipe, yaml.safe_load(yaml.safe_dump(to_dict(recipe)))) == recipe
    assert RECIPES[name].__doc__


def test_there_is_one_for_every_row_of_table_1():
    assert {named_recipe(name).model.name for name in PAPER} == {row.ours for row in TABLE_1}


@pytest.mark.parametrize("name", PAPER)
def test_the_numbers_are_the_papers(name):
    recipe = named_recipe(name)
    assert recipe.schedule.epochs == (400 if "xcit" in name else 300)
    assert recipe.run.batch == 1024
    assert recipe.optim.lr_at(1024) == pytest.approx(1e-3)
    assert recipe.optim.lr_at(256) == pytest.approx(2.5e-4)
    assert recipe.model.attention == "sima"
    expected = {
        "optim.name": "adamw",
        "optim.weight_decay": 0.05,
        "optim.eps": 1e-8,
        "optim.clip": None,
        "model.drop_path": 0.05,
        "model.constant_drop_path": True,
        "data.size": 224,
        "data.crop_ratio": 1.0,
        "data.interpolation": "bicubic",
        "schedule.warmup_epochs": 5,
        "schedule.warmup_lr": 1e-6,
        "schedule.min_lr": 1e-5,
        "schedule.cooldown_epochs": 10,
        "augment.smoothing": 0.1,
        "augment.color_jitter": 0.4,
        "augment.randaugment": "rand-m9-mstd0.5-inc1",
        "augment.repeats": 3,
        "augment.erasing": 0.25,
        "augment.mixup": 0.8,
        "augment.cutmix": 1.0,
        "augment.mix_prob": 1.0,
        "augment.switch_prob": 0.5,
        "run.ema": 0.99996,
        "run.precision": "fp16",
        "run.seed": 0,
    }
    settings = flat(recipe)
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "where", "value"),
    [
        ("schedule.epochs=7", "schedule.epochs", 7),
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.clip=none", "optim.clip", None),
        ("optim.clip=2", "optim.clip", 2.0),
        ("data.cache=false", "data.cache", False),
        ("augment.scale=0.2,1", "augment.scale", [0.2, 1.0]),
        ("model.attention=softmax", "model.attention", "softmax"),
        ("model.kwargs.depth=6", "model.kwargs.depth", 6),
        ("model.kwargs.init_values=1e-5", "model.kwargs.init_values", 1e-5),
        ("model.kwargs.img_size=[8, 16]", "model.kwargs.img_size", [8, 16]),
        ("model.kwargs.relu=false", "model.kwargs.relu", False),
    ],
)
def test_an_override_is_read_as_the_type_of_its_field_and_changes_nothing_else(text, where, value):
    before = named_recipe("digits")
    after = flat(with_overrides(before, [text]))
    assert after[where] == value
    assert type(after[where]) is type(value)
    assert {k: v for k, v in after.items() if k != where} == {k: v for k, v in flat(before).items() if k != where}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule.epochs=many", r"schedule\.epochs must be an integer, got 'many'"),
        ("schedule.epochs=2.5", r"schedule\.epochs must be an integer, got '2\.5'"),
        ("optim.lr=fast", r"optim\.lr must be a number, got 'fast'"),
        ("augment.scale=0.5", r"augment\.scale must be 2 numbers separated by commas, got '0\.5'"),
        ("data.cache=maybe", r"data\.cache must be true or false, got 'maybe'"),
        ("shedule.epoch=3", r"did you mean 'schedule'\?"),
        ("shedule.epochs=3", r"unknown setting 'shedule\.epochs'; did you mean 'schedule\.epochs'\?"),
        ("run.epochs=3", r"unknown setting 'run\.epochs'; did you mean 'schedule\.epochs'\?"),
        ("run.name=x", r"did you mean 'name' or 'model\.name' or 'optim\.name'\?"),
        ("schedule.epoch=3", r"did you mean 'epochs'\?"),
        ("schedule=3", r"schedule is a group of settings: schedule\.epochs"),
        ("optim.lr.x=3", r"optim\.lr is a single value"),
        ("model.kwargs=3", r"model\.kwargs needs the name of one argument"),
        ("model.kwargs.img_size=[", r"model\.kwargs\.img_size must be a number, a string or a list"),
        ("epochs", r"--set needs name=value"),
    ],
)
def test_a_wrong_override_says_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(named_recipe("digits"), [text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.precision=fp8", r"run\.precision must be one of fp32, bf16, fp16, got 'fp8'"),
        ("augment.crop=random", r"augment\.crop must be one of resized, padded, none, got 'random'"),
        ("run.batch=0", r"run\.batch must be at least 1, got 0"),
        ("augment.erasing=2", r"augment\.erasing must be between 0 and 1, got 2\.0"),
        ("schedule.warmup_epochs=30", r"schedule\.warmup_epochs must be below schedule\.epochs=30, got 30"),
        ("augment.randaugment=rand-m9", r"data\.cache=false"),
        ("augment.crop=padded", r"needs augment\.padding"),
        ("data.cache_size=4", r"data\.cache_size must be at least data\.size=8, got 4"),
        ("data.cache_size=16", r"needs augment\.crop=resized"),
        ("teacher.weight=0.7", r"teacher\.weight and teacher\.temperature need a teacher: give one with --teacher"),
        ("data.crop_ratio=0", r"data\.crop_ratio must be above 0 and at most 1, got 0\.0"),
        ("data.interpolation=foo", r"data\.interpolation must be one of bicubic, bilinear, got 'foo'"),
        ("data.std=0,1,1", r"data\.std\[0\] must be above 0, got 0\.0"),
        ("data.mean=0,nan,1", r"data\.mean\[1\] must be a finite number, got nan"),
        ("data.workers=-1", r"data\.workers must be between 0 and 256, got -1"),
        ("augment.color_jitter=-1", r"augment\.color_jitter must be at least 0"),
        ("augment.mixup=-1", r"augment\.mixup must be at least 0"),
        ("augment.scale=0.9,0.2", r"augment\.scale must be two numbers, the lower one first, got \(0\.9, 0\.2\)"),
        ("augment.scale=0,1", r"augment\.scale\[0\] must be above 0 and at most 1, got 0\.0"),
        ("schedule.min_lr=-1", r"schedule\.min_lr must be at least 0"),
        ("schedule.warmup_lr=-5", r"schedule\.warmup_lr must be at least 0"),
        ("schedule.cooldown_epochs=-100", r"schedule\.cooldown_epochs must be at least 0, got -100"),
        ("optim.lr=nan", r"optim\.lr must be above 0, got nan"),
        ("optim.lr=inf", r"optim\.lr must be above 0, got inf"),
        ("optim.weight_decay=-1", r"optim\.weight_decay must be at least 0"),
        ("optim.betas=0.9,1", r"optim\.betas\[1\] must be at least 0 and below 1, got 1\.0"),
        ("optim.clip=0", r"optim\.clip must be above 0 or none, got 0\.0"),
        ("run.ema=0", r"run\.ema must be above 0 and below 1 or none, got 0\.0"),
        ("run.threads=-1", r"run\.threads must be at least 0"),
        ("model.kwargs.num_classes=7", r"model\.kwargs\.num_classes would be overwritten by model\.num_classes"),
        ("model.kwargs.attention=elu", r"model\.kwargs\.attention would be overwritten by model\.attention"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_it_does(text, message):
    with pytest.raises(ValueError, match=message):
        check(with_overrides(named_recipe("digits"), [text]))


def test_a_randaugment_that_timm_does_not_know_is_refused():
    for wrong in ("foo", "rand-q9", "augmix"):
        recipe = with_overrides(named_recipe("digits"), ["data.cache=false", f"augment.randaugment={wrong}"])
        with pytest.raises(ValueError, match=f"must be a configuration of timm, e.g. .*, or none, got '{wrong}'"):
            check(recipe)


def test_an_unknown_recipe_is_named_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"unknown recipe 'digit'.*did you mean 'digits'\?"):
        named_recipe("digit")


def test_recipes_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        named_recipe("digits").run.batch = 3


def test_differences_are_those_that_change_the_weights():
    recipe = named_recipe("digits")
    assert differences(to_dict(recipe), to_dict(recipe)) == []
    other = with_overrides(recipe, ["data.workers=7", "optim.lr=0.5", "model.kwargs.depth=9"])
    assert differences(to_dict(recipe), to_dict(other)) == [
        "model.kwargs.depth: 2 -> 9",
        f"optim.lr: {recipe.optim.lr} -> 0.5",
    ]


def test_a_folder_takes_one_run_and_resumes_only_that_one(tmp_path):
    folder, recipe = RunFolder(tmp_path / "run"), named_recipe("digits")
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        folder.check(recipe, resume=True)
    folder.check(recipe, resume=False)
    folder.write_recipe(recipe)
    with pytest.raises(ValueError, match="--resume"):
        folder.check(recipe, resume=False)
    folder.check(recipe, resume=True)
    with pytest.raises(ValueError, match=r"optim\.lr: .* -> 0\.5"):
        folder.check(with_overrides(recipe, ["optim.lr=0.5"]), resume=True)
    kept = yaml.safe_load(folder.recipe_file.read_text())
    assert folder.read_recipe() == recipe
    assert {"torch", "timm", "sima-attn", "python"} <= set(kept["versions"])
    assert "commit" in kept
    folder.recipe_file.write_text("recipe: [")
    with pytest.raises(ValueError, match=r"recipe\.yaml is damaged"):
        folder.read_recipe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nrecipe: [*b, *b]\n", "has YAML aliases"),
        ("recipe: " + "[" * 2_000, "is damaged"),
    ],
)
def test_a_recipe_file_that_expands_is_refused(tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"recipe\.yaml.* {message}"):
        RunFolder(tmp_path).read_recipe()


def test_a_finished_run_is_the_one_of_its_recipe_however_it_ran(tmp_path):
    folder, recipe = RunFolder(tmp_path), named_recipe("digits")
    folder.write_recipe(recipe)
    folder.check_finished(with_overrides(recipe, ["run.compile=true"]))
    folder.check_finished(with_overrides(recipe, ["data.path=./digits"]))  # the same place
    for changed, message in (
        ("data.path=elsewhere", "was trained on the images in digits, not on"),
        ("run.seed=3", "run.seed: 0 ->"),
    ):
        with pytest.raises(ValueError, match=message):
            folder.check_finished(with_overrides(recipe, [changed]))


def lock(folder):
    with folder.locked():
        pass


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    folder, log = RunFolder(tmp_path / "run"), tmp_path / "log"
    with folder.locked():
        assert forked.run(log, lock, folder) == 1
        assert "another process is training in" in log.read_text()
    assert forked.run(log, lock, folder) == 0
    assert list(folder.path.iterdir()) == []


def test_the_commit_is_this_projects_and_not_that_of_a_repository_around_it(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    file = tmp_path / "site-packages" / "run.py"
    file.write_text("")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setattr("sima_attn.train.run.__file__", str(file))
    assert provenance()["commit"] is None
    subprocess.run([*git, "add", "-A"], check=True)
    assert provenance()["commit"].endswith(" with changes")
