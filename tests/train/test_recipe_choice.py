"""The recipe that images get without --recipe, and batches larger than the data."""

from shlex import quote

import pytest
from typer.testing import CliRunner

from sima_attn.cli import app
from sima_attn.data.settings import Data
from sima_attn.data.splits import open_data
from sima_attn.dino.recipe_choice import SUITED, choose_dino
from sima_attn.train.classify import train_classifier
from sima_attn.train.recipe_choice import CLASSIFIERS, ImageStats, choose_classifier, measure_images
from sima_attn.train.run import RunFolder
from small_runs import class_folders, picture, small_recipe


@pytest.mark.parametrize("suited", [CLASSIFIERS, SUITED], ids=["train", "dino"])
def test_the_recipe_follows_from_size_and_number(suited):
    assert suited.name_for(ImageStats(500, 5, 64)) == suited.small
    assert suited.name_for(ImageStats(500, 5, 400)) == suited.photos
    assert suited.name_for(ImageStats(200_000, 5, 400)) == suited.many
    assert suited.name_for(ImageStats(2_000_000, 5, 28)) == suited.small


def test_images_are_measured_by_their_shorter_side(tmp_path):
    data = class_folders(tmp_path / "data")
    assert measure_images(open_data(data)) == ImageStats(24, 3, 18)
    for i in range(3):
        (data / "train" / "cat" / f"{i}.png").write_bytes(b"broken")
    assert measure_images(open_data(data)).side == 18


def test_small_images_and_photos_are_never_shrunk_to_digits(tmp_path):
    small = class_folders(tmp_path / "small")
    recipe, notes = choose_classifier(Data(str(small)), "cpu")
    assert (recipe.name, recipe.data.size, recipe.run.batch, recipe.data.val) == ("shipped", 64, 8, None)
    assert (recipe.run.precision, recipe.run.compile) == ("fp32", False)
    assert notes[0].startswith(
        "24 images of about 18 px in 3 classes: the recipe is shipped (64 px, 100 epochs, batch 8)"
    )
    assert "--recipe" in notes[0]
    assert notes[-1] == f"to start from a trained model instead: `sima finetune --data {quote(str(small))}`"
    for i in range(4):
        (tmp_path / "photos" / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        picture(i, size=(140, 200)).save(tmp_path / "photos" / f"class{i % 2}" / f"{i}.png")
    recipe, notes = choose_classifier(Data(str(tmp_path / "photos")), "cuda")
    assert (recipe.name, recipe.data.size, recipe.data.val, recipe.run.precision) == ("photos", 128, 0.2, "bf16")
    assert any("20% of each class are held out" in note for note in notes)
    recipe, _ = choose_dino(Data(str(tmp_path / "photos")), "cpu")
    assert (recipe.name, recipe.crops.local_size, recipe.probe.k) == ("photos", 48, 4)


def test_the_command_chooses_and_named_recipes_stay(tmp_path, monkeypatch):
    data = class_folders(tmp_path / "data")
    asked = []
    monkeypatch.setattr(
        "sima_attn.train.classify.train_classifier", lambda recipe, *a, **k: asked.append(recipe) or 1 / 0
    )
    for arguments in (
        ["--data", str(data)],
        ["--set", f"data.path={data}"],
        ["--data", str(data), "--recipe", "digits"],
        [],
    ):
        CliRunner().invoke(app, ["train", *arguments, "--device", "cpu", "--out", str(tmp_path / "run")])
    assert [(recipe.name, recipe.data.path) for recipe in asked] == [
        ("shipped", str(data)),
        ("shipped", str(data)),
        ("digits", str(data)),
        ("digits", "digits"),
    ]


@pytest.mark.parametrize("command", ["train", "dino"])
def test_a_run_on_own_images_is_resumed_by_its_folder(tmp_path, monkeypatch, command):
    """Without it, the default folder would be that of the digits."""
    monkeypatch.chdir(tmp_path)
    data = class_folders(tmp_path / "data")
    result = CliRunner().invoke(app, [command, "--data", str(data), "--resume"])
    assert str(result.exception) == f"--resume needs the folder of the run on {data}: add --out FOLDER"


def test_a_batch_larger_than_the_data_is_reduced_and_said(tmp_path, capsys):
    data = class_folders(tmp_path / "data", per_class=(9, 2))
    for name, augment, batch in (("plain", {}, 27), ("mixed", {"mixup": 0.8}, 26)):
        recipe = small_recipe(data, augment=augment, run={"batch": 64}, epochs=1)
        train_classifier(recipe, tmp_path / name, device="cpu")
        assert f"there are 27 train images, so the batch is {batch} instead of 64" in capsys.readouterr().err
        assert RunFolder(tmp_path / name).read_recipe().run.batch == batch
        train_classifier(recipe, tmp_path / name, resume=True, device="cpu", quiet=True)
