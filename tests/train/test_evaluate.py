"""`sima eval`: its numbers are those of a plain computation; sizes and token_ref; the commands as a user types them."""

import csv
import json
import shutil
from dataclasses import replace

import pytest
import timm
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.data.loader import evaluation_transform
from sima_attn.data.settings import Data
from sima_attn.data.splits import open_data
from sima_attn.models.loading import LoadedModel, load_model
from sima_attn.nn.token_ref import tokens_at
from sima_attn.probe.features import load_backbone
from sima_attn.report.rows import read_rows
from sima_attn.train.classify import train_classifier
from sima_attn.train.evaluate import EvaluationRow, evaluate
from sima_attn.train.recipes import RECIPES
from sima_attn.train.run import RunFolder
from small_runs import class_folders, small_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    classes = tuple("abcdefg")
    recipe = small_recipe(class_folders(root / "data", (8, 5), classes), run={"ema": 0.9})
    finished = train_classifier(recipe, root / "run", device="cpu", quiet=True)
    return root, recipe, finished


def test_the_numbers_are_those_of_a_plain_computation(run):
    root, recipe, finished = run
    loaded = load_model(root / "run")
    source = open_data(root / "data", "val")
    transform = evaluation_transform(recipe.data.preprocessing)
    images = torch.stack([transform(source.read(i)) for i in range(len(source))])
    labels = torch.from_numpy(source.labels)
    with torch.no_grad():
        logits = loaded.model.eval()(images)
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)  # how many classes are ahead
    result = evaluate(loaded, batch=4)
    assert result.images == 35
    assert result.top1 == pytest.approx(100 * (ranks < 1).float().mean().item())
    assert result.top5 == pytest.approx(100 * (ranks < 5).float().mean().item())
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)
    for i in range(7):
        for j in range(7):
            assert result.confusion[i, j] == ((labels == i) & (logits.argmax(1) == j)).sum()
    for name in ("top1", "top5", "loss"):  # and what training printed
        assert getattr(result, name) == pytest.approx(finished.metrics[name], rel=1e-4)
    most = result.most_confused(1)[0]
    wrong = result.confusion.clone().fill_diagonal_(0)
    assert most[2] == wrong.max()
    assert wrong["abcdefg".index(most[0]), "abcdefg".index(most[1])] == most[2]


@pytest.mark.parametrize("load", [load_model, load_backbone])
def test_an_unreadable_newest_checkpoint_is_skipped(run, tmp_path, capsys, load):
    folder = tmp_path / "run"
    shutil.copytree(run[0] / "run", folder)
    (folder / "weights.safetensors").unlink()
    expected = load(folder).model.state_dict()
    (folder / "checkpoints" / "step-00009999.pt").symlink_to("missing")
    (folder / "checkpoints" / "step-00009998.pt").write_bytes(b"")
    loaded = load(folder).model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    printed = capsys.readouterr().out
    assert "step-00009999.pt is a link to a missing file, not a file; using the previous one" in printed
    assert "step-00009998.pt is damaged" in printed


def test_folder_weights_and_checkpoint_are_one_model_and_the_average_another(run):
    root, _, finished = run
    path = next((root / "run" / "checkpoints").glob("*.pt"))
    results = [evaluate(load_model(p)) for p in (root / "run", root / "run" / "weights.safetensors", path)]
    assert len({r.loss for r in results}) == 1
    average = evaluate(load_model(root / "run", branch="ema"))
    assert average.loss == pytest.approx(finished.metrics["ema_loss"], rel=1e-4)
    assert average.loss != results[0].loss


def test_token_ref_changes_nothing_at_the_training_size_and_something_elsewhere(run):
    root, _, _ = run
    loaded = load_model(root / "run")
    here = [evaluate(loaded, token_ref=use).loss for use in (False, True)]
    assert here[0] == pytest.approx(here[1], rel=1e-5)
    without, with_it = (evaluate(loaded, size=32, token_ref=use).loss for use in (False, True))
    assert without != with_it
    trained_for_16_tokens = load_model(root / "run")
    for block in trained_for_16_tokens.model.blocks:
        block.attn.token_ref = 16.0
    assert evaluate(trained_for_16_tokens, size=32).loss == with_it
    assert loaded.model.blocks[0].attn.token_ref is None  # as it was


@pytest.mark.parametrize("name", ["sima_deit_tiny_patch16_224", "sima_xcit_nano_12_p16_224", "sima_cvt_13"])
def test_the_tokens_that_are_seen_are_those_the_models_call_theirs(name):
    model, ours = timm.create_model(name).eval(), timm.create_model(name, token_ref="train")
    modules = [m for m in model.modules() if hasattr(m, "token_ref")]
    theirs = [m.token_ref for m in ours.modules() if hasattr(m, "token_ref")]
    assert tokens_at(model, modules, 224) == theirs


def test_other_classes_are_refused(run, tmp_path):
    root, _, _ = run
    differ = "only in the model: a, b, c, d, e and 2 more; only in the data: 0, 1, 2, 3, 4 and 5 more"
    with pytest.raises(ValueError, match=rf"classes of the model \(7\) and the data \(10\) differ: {differ}"):
        evaluate(load_model(root / "run"), "digits")
    reordered = load_model(root / "run")
    with pytest.raises(ValueError, match="differ: the same names in another order"):
        evaluate(replace(reordered, classes=list("bacdefg")))
    with pytest.raises(ValueError, match="model has 1000 classes, the data have 10"):
        evaluate(load_model("sima_deit_tiny_patch16_224"), "digits")


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("sima_nothing", ValueError, "unknown model, run folder or file 'sima_nothing'"),
        ("none.pt", FileNotFoundError, "there is no file none.pt"),
    ],
)
def test_what_cannot_be_loaded_is_named(what, error, message):
    with pytest.raises(error, match=message):
        load_model(what)


def test_files_that_no_run_wrote_are_named(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "other.pt")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "junk.safetensors").write_text("no weights")
    save_file({"w": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    save_file({"w": torch.zeros(1)}, tmp_path / "theirs.safetensors", metadata={"about": "a model"})
    save_file({"w": torch.zeros(1)}, tmp_path / "half.safetensors", metadata={"about": '{"classes": []}'})
    for name in ("other.pt", "list.pt", "foreign.safetensors", "theirs.safetensors", "half.safetensors"):
        with pytest.raises(
            ValueError, match=rf"{name} was not written by `sima train` or `sima dino`: .* as NAME=FILE"
        ):
            load_model(tmp_path / name)
    with pytest.raises(ValueError, match=r"junk\.safetensors cannot be read as weights"):
        load_model(tmp_path / "junk.safetensors")


def test_a_run_without_checkpoints_has_no_average_and_its_weights_need_no_recipe_file(run, tmp_path):
    for name in ("recipe.yaml", "weights.safetensors"):
        shutil.copy(run[0] / "run" / name, tmp_path)
    with pytest.raises(FileNotFoundError, match="has no checkpoints, and only they hold the ema weights"):
        load_model(tmp_path, branch="ema")
    for damaged in ("recipe: [", "", "a: 1", "recipe: 3"):
        (tmp_path / "recipe.yaml").write_text(damaged)
        with pytest.raises(ValueError, match=r"recipe\.yaml is damaged"):
            RunFolder(tmp_path).read_recipe()
        assert load_model(tmp_path).classes == list("abcdefg")


def test_a_size_is_at_least_one_pixel(run):
    with pytest.raises(ValueError, match="cannot take images of 0 px"):
        evaluate(load_model(run[0] / "run"), size=0)


def test_a_size_that_the_model_cannot_take_is_named(tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
    data = Data(str(class_folders(tmp_path / "data")), size=224)
    loaded = LoadedModel("vit", vit, data.preprocessing)
    with pytest.raises(ValueError, match=r"VisionTransformer cannot take images of 64 px: .*; give another --size"):
        evaluate(loaded, data.path, size=64)


def sima(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_eval_prints_each_size_with_and_without_token_ref_and_writes_the_classes(run, tmp_path):
    root, _, _ = run
    files = ["--out", tmp_path / "classes.csv", "--rows", tmp_path / "sizes.csv"]
    output = sima("eval", root / "run", "--size", 16, "--size", 32, "--device", "cpu", *files)
    assert output.count("│ 16") == 1
    assert output.count("│ 32") == 2
    assert "classified as" in output
    with open(tmp_path / "classes.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == list("abcdefg")
    assert sum(int(row["images"]) for row in rows) == 35
    sizes = read_rows(tmp_path / "sizes.csv", EvaluationRow)
    assert [(row.model, row.px, row.token_ref) for row in sizes] == [
        ("run", 16, False),
        ("run", 32, False),
        ("run", 32, True),
    ]
    assert all(f"{row.top1:.2f}" in output and row.images == 35 for row in sizes)


def test_eval_takes_a_size_once_and_no_size_below_one(run):
    output = sima("eval", run[0] / "run", "--size", 16, "--size", 16)
    assert output.count("│ 16") == 1
    assert "greater than or equal to 1" in sima("eval", run[0] / "run", "--size", 0, code=2)


def test_eval_writes_the_confusions_and_prints_those_of_few_classes(run, tmp_path, monkeypatch):
    root, _, _ = run
    output = sima("eval", root / "run", "--confusion", tmp_path / "confusion.csv")
    result = evaluate(load_model(root / "run"))
    with open(tmp_path / "confusion.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["true", *"abcdefg"]
    assert rows == [[name, *map(str, line)] for name, line in zip("abcdefg", result.confusion.tolist(), strict=True)]
    printed = [line.strip("│ ").split("│") for line in output.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line] for line in printed[1:]] == rows  # the first line is that of the size
    monkeypatch.setattr(cli.train, "MOST_SHOWN", 6)
    assert "confusion matrix" not in sima("eval", root / "run")


@pytest.mark.parametrize("option", ["--out", "--confusion", "--rows"])
def test_a_folder_in_the_place_of_a_file_is_refused(run, tmp_path, option):
    assert "is a directory" in sima("eval", run[0] / "run", option, tmp_path, code=2)


def test_train_runs_the_default_and_resumes(tmp_path):
    few = ["--set", "schedule.epochs=2", "--set", "schedule.warmup_epochs=1", "--set", "model.kwargs.depth=1"]
    output = sima("train", "--out", tmp_path / "d", "--device", "cpu", *few)
    assert "top1" in output
    assert {"recipe.yaml", "weights.safetensors", "learning_curve.png", "train.csv", "eval.csv"} <= {
        p.name for p in (tmp_path / "d").iterdir()
    }
    assert "top1" in sima("train", "--out", tmp_path / "d", "--resume", "--device", "cpu")
    with pytest.raises(ValueError, match=r"a different recipe: model\.attention: sima -> softmax"):
        sima("train", "--out", tmp_path / "d", "--resume", "--set", "model.attention=softmax")
    with pytest.raises(ValueError, match="--resume"):
        sima("train", "--out", tmp_path / "d", *few)


def test_recipes_are_listed():
    output = sima("recipes")
    assert all(name in output for name in RECIPES)


def test_what_is_not_installed_is_named_first(monkeypatch):
    monkeypatch.setattr("sima_attn._errors.find_spec", lambda name: None if name == "lightning" else name)
    with pytest.raises(ValueError, match=r"training needs lightning, .*pip .*install .*\[train\]'"):
        sima("train")


@pytest.mark.parametrize(("about", "instead"), [({"task": "dino"}, "sima knn"), ({"detector": {}}, "sima detect eval")])
def test_a_run_of_another_kind_is_refused_with_the_command_for_it(about, instead, tmp_path):
    save_file({"w": torch.zeros(1)}, tmp_path / "weights.safetensors", metadata={"about": json.dumps(about)})
    with pytest.raises(ValueError, match=instead):
        load_model(tmp_path / "weights.safetensors")


def test_a_folder_without_a_split_is_trained_and_evaluated_with_one(tmp_path):
    """`sima train --val 0.25`: the recipe remembers the part, and `sima eval` needs nothing else."""
    photos = class_folders(tmp_path / "photos", (8, 4)) / "train"
    settings = [
        "schedule.epochs=1",
        "schedule.warmup_epochs=0",
        "run.batch=6",
        "augment.cutmix=0",
        "model.kwargs.depth=1",
    ]
    command = ["train", "--data", str(photos), "--val", "0.25", "--out", str(tmp_path / "run"), "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [*command, *(word for each in settings for word in ("--set", each))])
    assert result.exit_code == 0, result.output
    assert evaluate(load_model(tmp_path / "run")).images == 6
    assert evaluate(load_model(tmp_path / "run"), split="train").images == 18
    assert evaluate(load_model(tmp_path / "run"), photos.parent).images == 12  # val images of their own
