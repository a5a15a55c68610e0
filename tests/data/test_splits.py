"""Folders as programs export them: names of splits, images without labels, and what is said about them."""

import numpy as np
import pytest

from sima_attn._settings import with_overrides
from sima_attn.data.any_images import NONE, OPTIONAL, REQUIRED, open_any
from sima_attn.data.settings import Data
from sima_attn.data.splits import check_classes, has_val_images, open_data, open_split, whole_folder
from sima_attn.dino.recipes import named_dino_recipe
from sima_attn.dino.task import train_dino
from sima_attn.train.classify import train_classifier
from small_runs import class_folders, picture, small_recipe


@pytest.fixture
def data(tmp_path):
    """train/ with 24 and val/ with 12 images of three classes."""
    return class_folders(tmp_path / "data")


@pytest.fixture
def flat(tmp_path):
    folder = tmp_path / "flat"
    folder.mkdir()
    for i in range(9):
        picture(i).save(folder / f"{i}.png")
    return folder


@pytest.mark.parametrize("file", ["data.yaml", "annotations.json", "train/_annotations.coco.json"])
def test_annotations_of_boxes_are_known_for_what_they_are(flat, file):
    (flat / "train").mkdir()
    (flat / file).write_text("{}")
    with pytest.raises(ValueError, match=r"no class folders.* looks like annotations of boxes.*`sima detect train`"):
        open_data(flat)
    assert len(open_data(class_folders(flat / "labeled"))) == 24


def test_one_folder_of_images_is_not_a_class_to_learn(flat):
    """As in a folder of COCO files, whose images are in images/."""
    (flat / "images").mkdir()
    for image in flat.glob("*.png"):
        image.rename(flat / "images" / image.name)
    source = whole_folder(flat)
    with pytest.raises(ValueError, match=r"one class \(images\), and a classifier needs at least two.* of its own$"):
        check_classes(source, flat)
    (flat / "instances_train.json").write_text("{}")
    with pytest.raises(ValueError, match=r"instances_train\.json looks like annotations.*`sima detect train`"):
        check_classes(source, flat)


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test", "testing", "Test", "VALID"])
def test_val_images_have_any_usual_name(data, name):
    (data / "val").rename(data / name)
    val = open_data(data, "val")
    assert (len(val), val.place) == (12, f"{name}/")
    assert has_val_images(data)


def test_valid_is_val_and_test_is_left_for_the_end(data):
    """train, valid and test, as Roboflow exports them."""
    (data / "val").rename(data / "valid")
    (data / "test").mkdir()
    for k, name in enumerate(("cat", "dog", "owl")):
        (data / "test" / name).mkdir()
        picture(k).save(data / "test" / name / "0.png")
    assert [open_data(data, split).place for split in ("train", "val", "test")] == ["train/", "valid/", "test/"]
    assert [len(open_data(data, split)) for split in ("train", "val", "test")] == [24, 12, 3]


def test_no_test_images_are_an_error(data):
    with pytest.raises(
        FileNotFoundError, match=r"has no test images: neither a folder test/.*; put them into .*test/CLASS/$"
    ):
        open_data(data, "test")
    with pytest.raises(FileNotFoundError, match="no test images"):
        open_data("digits", "test")
    (data / "val").rename(data / "more")
    with pytest.raises(FileNotFoundError, match="no test images"):  # what is not held out are the train images
        open_split(Data(path=str(data), val=0.25), "test")


def test_lower_case_is_taken_where_both_exist(data):
    (data / "Train" / "cat").mkdir(parents=True)
    assert open_data(data).place == "train/"


def test_held_out_images_say_where_they_come_from(data):
    whole = Data(str(data / "train"), val=0.25)
    train, val = (open_split(whole, split) for split in ("train", "val"))
    assert (len(train), train.place) == (18, "train/")
    assert (len(val), val.place) == (6, "train/, 25% of each class")


def test_a_run_says_which_images_it_uses(data, tmp_path, capsys):
    (data / "val").rename(data / "valid")
    train_classifier(small_recipe(data, epochs=1), tmp_path / "run", device="cpu")
    assert "24 train images in train/; 12 val images in valid/; 3 classes" in capsys.readouterr().err


def names(source):
    return sorted(source.name(i) for i in range(len(source)))


def test_a_flat_folder_is_opened_without_labels(flat):
    source = open_any(str(flat))
    assert (len(source), source.classes, source.place) == (9, [], "flat/")
    assert not source.labels.any()
    with pytest.raises(ValueError, match="contains no class folders"):
        open_any(str(flat), labels=REQUIRED)


def test_labels_are_used_where_there_are_some(data):
    for labels in (OPTIONAL, NONE):  # class folders say the class of an image anyway
        assert open_any(str(data), labels=labels).classes == ["cat", "dog", "owl"]
    unsplit = open_any(str(data / "train"))
    assert np.array_equal(unsplit.labels, np.repeat([0, 1, 2], 8))


@pytest.mark.parametrize("addition", ["an image beside the folders", "a folder without images"])
def test_folders_that_are_no_classes_still_hold_images(data, addition):
    if addition == "an image beside the folders":
        picture(99).save(data / "train" / "cover.png")
    else:  # images/ and labels/ of a data set for detection
        (data / "train" / "labels").mkdir()
        (data / "train" / "labels" / "0.txt").write_text("0 0.5 0.5 1 1")
    source = open_any(str(data), labels=NONE)
    assert source.classes == []
    assert len(source) == 24 + (addition == "an image beside the folders")
    assert names(source) == [source.name(i) for i in range(len(source))]


@pytest.mark.parametrize("layout", ["flat", "train/ without classes", "classes without val"])
def test_dino_learns_from_any_folder(layout, flat, data, tmp_path, capsys):
    folder = {"flat": flat, "classes without val": data / "train"}.get(layout)
    if folder is None:
        folder = tmp_path / "split"
        folder.mkdir()
        flat.rename(folder / "train")
    settings = ["schedule.epochs=1", "schedule.warmup_epochs=0", "run.batch=8", f"data.path={folder}"]
    finished = train_dino(with_overrides(named_dino_recipe("digits"), settings), tmp_path / "run", device="cpu")
    assert finished.metrics == {}
    lacks = "val images" if layout == "classes without val" else "labels"
    assert f"the data have no {lacks}, so that no k-NN accuracy is measured" in capsys.readouterr().err
