"""A run of the wrong kind gets a sentence that names the right command."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.detect.recipes import named_recipe as detect_recipe
from sima_attn.dino.recipes import named_dino_recipe
from sima_attn.models.loading import is_detector
from sima_attn.models.settings import ModelSettings
from sima_attn.train.finetune_recipe import Finetune, FinetuneRecipe
from sima_attn.train.recipes import named_recipe as train_recipe
from sima_attn.train.run import RunFolder

pytest.importorskip("pycocotools")


def run_folder(folder, **about):
    """A folder with weights that say what they are: all that these messages look at."""
    folder.mkdir()
    weights = {"head.weight": torch.zeros(2, 2)}
    save_file(weights, folder / "weights.safetensors", metadata={"about": json.dumps(about)})
    return folder


def message(*arguments):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code != 0, result.output
    return str(result.exception)


@pytest.fixture
def detector(tmp_path):
    return run_folder(tmp_path / "detector", detector={}, classes=["a"])


@pytest.fixture
def photo(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "RUN"),
        ("classify", "PHOTO", "--model", "RUN"),
        ("heatmap", "PHOTO", "--model", "RUN"),
        ("audit", "RUN"),
        ("knn", "RUN"),
        ("linear", "RUN"),
        ("linearize", "RUN", "--data", "DATA", "--out", "OUT"),
        ("finetune", "RUN", "--data", "DATA", "--out", "OUT"),
    ],
    ids=lambda command: command[0],
)
def test_a_detector_is_sent_to_sima_detect(command, detector, photo, tmp_path):
    places = {"RUN": detector, "PHOTO": photo, "DATA": tmp_path, "OUT": tmp_path / "out"}
    assert f"{detector} is a detector: use `sima detect predict`" in message(*(places.get(w, w) for w in command))


def test_a_detector_is_no_backbone(detector, tmp_path):
    from sima_attn.detect.weights import load_backbone

    with pytest.raises(ValueError, match="is a detector, and a backbone starts from the weights of a classifier"):
        load_backbone(torch.nn.Linear(2, 2), detector)


@pytest.mark.parametrize(
    ("about", "hint"),
    [
        ({"recipe": {}}, "is a classifier: use `sima classify` or `sima eval`"),
        ({"task": "dino", "recipe": {}}, "has features and no detector: use `sima knn` or `sima linear`"),
        ({}, "was not written by `sima detect train`"),
    ],
)
def test_other_runs_are_no_detectors(tmp_path, photo, about, hint):
    run = run_folder(tmp_path / "run", **about)
    assert hint in message("detect", "eval", run)
    assert hint in message("detect", "predict", photo, "--model", run)
    assert not is_detector(run)


def test_a_model_name_is_no_detector(photo):
    hint = "there is no sima_deit_tiny; give a run of `sima detect train`, a checkpoint or weights"
    assert hint in message("detect", "eval", "sima_deit_tiny")
    assert hint in message("detect", "predict", photo, "--model", "sima_deit_tiny")


DIGITS = train_recipe("digits")
PARTS = {name: getattr(DIGITS, name) for name in ("name", "data", "augment", "optim", "schedule", "run")}
RECIPES = {
    "train": DIGITS,
    "dino": named_dino_recipe("digits"),
    "detect train": detect_recipe("coco_mini"),
    "finetune": FinetuneRecipe(model=ModelSettings("sima_deit_tiny_patch16_224"), finetune=Finetune("x"), **PARTS),
}


@pytest.mark.parametrize("asked", ["train", "dino", "detect train", "finetune", "linearize"])
@pytest.mark.parametrize("trained", RECIPES)
def test_a_run_is_resumed_by_its_own_command(tmp_path, trained, asked):
    RunFolder(tmp_path).write_recipe(RECIPES[trained])
    if asked == trained:
        assert RunFolder(tmp_path).read_recipe(type(RECIPES[trained])) == RECIPES[trained]
    else:
        hint = f"{tmp_path} holds a run of `sima {trained}`, not of `sima {asked}`: use `sima {trained}`"
        assert hint in message(*asked.split(), "--out", tmp_path, "--resume")


def test_what_is_no_run_is_no_detector(detector, tmp_path):
    assert is_detector(detector)
    assert is_detector(detector / "weights.safetensors")
    torch.save({"step": 1, "model": {}, "about": {"detector": {}}}, tmp_path / "step-1.pt")
    assert is_detector(tmp_path / "step-1.pt")
    assert not any(map(is_detector, (None, "sima_deit_tiny_patch16_224", tmp_path / "none.pt")))
