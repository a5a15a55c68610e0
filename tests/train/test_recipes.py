"""Recipes: the paper's numbers, overrides by type, and what a run folder makes of them."""

import dataclasses

import pytest
import timm
import yaml

from sima_attn.models.paper_table import TABLE_1
from sima_attn.train.recipes import (
    RECIPES,
    Recipe,
    check,
    differences,
    flat,
    from_dict,
    named_recipe,
    to_dict,
    with_overrides,
)
from sima_attn.train.run import RunFolder

PAPER = [name for name in RECIPES if name not in ("digits", "tiny_imagenet", "shipped")]


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
        ("schedule.epochs=many", r"schedule\.epochs is a whole number, got 'many'"),
        ("schedule.epochs=2.5", r"schedule\.epochs is a whole number, got '2\.5'"),
        ("optim.lr=fast", r"optim\.lr is a number, got 'fast'"),
        ("augment.scale=0.5", r"augment\.scale is 2 numbers with commas between them, got '0\.5'"),
        ("data.cache=maybe", r"data\.cache is true or false, got 'maybe'"),
        ("shedule.epochs=3", r"did you mean 'schedule'\?"),
        ("schedule.epoch=3", r"did you mean 'epochs'\?"),
        ("schedule=3", r"schedule is a group of settings: schedule\.epochs"),
        ("optim.lr.x=3", r"optim\.lr is a single value"),
        ("model.kwargs=3", r"model\.kwargs needs the name of one argument"),
        ("epochs", r"--set needs name=value"),
    ],
)
def test_a_wrong_override_says_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(named_recipe("digits"), [text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.precision=fp8", r"unknown run\.precision 'fp8'; known: bf16, fp16, fp32"),
        ("augment.crop=random", r"unknown augment\.crop 'random'"),
        ("run.batch=0", r"run\.batch must be at least 1, got 0"),
        ("augment.erasing=2", r"augment\.erasing must lie between 0 and 1"),
        ("schedule.warmup_epochs=50", r"leaves nothing of"),
        ("augment.randaugment=rand-m9", r"data\.cache=false"),
        ("augment.crop=padded", r"needs augment\.padding"),
        ("data.crop_ratio=0", r"crop_ratio"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_it_does(text, message):
    with pytest.raises(ValueError, match=message):
        check(with_overrides(named_recipe("digits"), [text]))


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


def test_a_folder_takes_one_run_and_goes_on_with_that_one_only(tmp_path):
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
