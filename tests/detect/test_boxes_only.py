"""Annotations without masks train a Faster R-CNN: weights, resuming, evaluation, prediction and drawing."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from layouts import without_masks, yolo_layout
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shapes import coco_folder, edit, small_recipe
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn._settings import check
from sima_attn.detect import pyramid
from sima_attn.detect.augment import Augment
from sima_attn.detect.folders import open_split
from sima_attn.detect.predict import Detections, draw
from sima_attn.detect.rcnn import build_rcnn
from sima_attn.detect.recipe_choice import choose_detector
from sima_attn.detect.recipes import Data, DetectRecipe
from sima_attn.detect.task import Detection, evaluate_detector, train_detector
from sima_attn.detect.weights import load_detector
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.logs import read_log
from sima_attn.train.run import RunFolder

pytest.importorskip("pycocotools")
BOX_METRICS = ["box_ap", "box_ap50", "box_ap75"]


@pytest.fixture(scope="module", autouse=True)
def narrow_pyramid():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyramid, "CHANNELS", 32)
        yield


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    return coco_folder(tmp_path_factory.mktemp("masks") / "data")


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    folder = coco_folder(tmp_path_factory.mktemp("boxes") / "data")
    for split in ("train", "val"):
        edit(folder, without_masks, split)
    return folder


@pytest.fixture(scope="module")
def run(boxes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "boxes"
    return folder, train_detector(small_recipe(boxes, run={"checkpoint_steps": 2}), folder, device="cpu", quiet=True)


def sima(*arguments):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_a_run_without_masks_has_box_losses_and_box_ap_alone(run):
    folder, finished = run
    assert list(finished.metrics) == BOX_METRICS
    assert "loss_mask" not in read_log(folder / "train.csv")[0]
    model = load_detector(folder).model
    assert not model.has_masks
    assert not any("mask" in name for name in model.state_dict())


def test_a_killed_run_without_masks_ends_with_the_weights_of_one_that_was_not(run, boxes, tmp_path, monkeypatch):
    recipe = small_recipe(boxes, run={"checkpoint_steps": 2})

    def die(self, step):
        if step == 3:
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Detection, "after_step", die)
        with pytest.raises(InterruptedError):
            train_detector(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert load_newest(tmp_path / "run" / "checkpoints")["step"] == 2
    train_detector(recipe, tmp_path / "run", resume=True, device="cpu", quiet=True)
    whole, again = (load_detector(folder).model.state_dict() for folder in (run[0], tmp_path / "run"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_yolo_data_set_is_trained_on_as_the_same_boxes_in_coco_format(run, boxes, tmp_path):
    yaml = "path: .\ntrain: images/train\nval: images/val\n"
    folder = yolo_layout(boxes, tmp_path / "yolo", yaml, "images/{split}")
    finished = train_detector(small_recipe(folder), tmp_path / "run", device="cpu", quiet=True)
    assert list(finished.metrics) == BOX_METRICS
    ours, theirs = (read_log(path / "train.csv") for path in (tmp_path / "run", run[0]))
    assert len(ours) == 4
    losses = [[float(row["loss"]) for row in rows] for rows in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)  # YOLO's numbers have six digits
    assert load_detector(tmp_path / "run").classes == ["square", "disc"]


def test_masks_are_left_out_on_demand_and_missing_ones_are_an_error(masks, boxes, tmp_path):
    small = ["--set", "schedule.epochs=1", "--set", "data.side=64", "--set", "data.longest=96", "--device", "cpu"]
    small += ["--set", "augment.sides=64,64", "--set", "augment.longest=96", "--set", "model.proposals=8"]
    small += ["--set", "data.workers=0", "--set", "run.batch=4", "--precision", "fp32", "--recipe", "coco_mini"]
    said = sima("detect", "train", "--data", masks, "--no-masks", *small, "--out", tmp_path / "run")
    assert "mask_ap" not in said
    assert not load_detector(tmp_path / "run").model.has_masks
    recipe = small_recipe(boxes, model={"masks": True})
    with pytest.raises(ValueError, match=r"model\.masks=true needs masks.*has boxes only: omit it"):
        train_detector(recipe, tmp_path / "none", device="cpu", quiet=True)


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 1])
def test_masks_of_a_few_objects_do_not_hide_the_boxes_of_the_others(tmp_path, share):
    """A few polygons among boxes, as labeling tools export them: masks would train on these few objects alone."""
    folder = coco_folder(tmp_path / "data")

    def keep_some_masks(content):
        annotations = content["annotations"]
        for annotation in annotations[round(share * len(annotations)) :]:
            annotation["segmentation"] = []

    edit(folder, keep_some_masks, "train")
    count = sum(map(len, open_split(folder, "train", masks=False).objects))
    chosen = open_split(folder, "train", masks=None)
    assert chosen.has_masks == (share >= 0.5)
    assert sum(map(len, chosen.objects)) == (share * count if chosen.has_masks else count)
    demanded = open_split(folder, "train", masks=True)
    assert demanded.has_masks == (share > 0)
    assert sum(map(len, demanded.objects)) == (share * count or count)


def test_the_choice_is_said_and_a_batch_larger_than_the_data_is_reduced(boxes, tmp_path, capsys):
    recipe = small_recipe(boxes, epochs=1)
    train_detector(replace(recipe, run=replace(recipe.run, batch=400)), tmp_path / "run", device="cpu")
    said = " ".join("".join(capsys.readouterr()).split())
    assert "most objects in instances_train.json have no mask: training a Faster R-CNN, which finds boxes" in said
    count = len(open_split(boxes, "train").only_trainable())
    assert f"there are {count} train images, so the batch is {count} instead of 400" in said
    assert RunFolder(tmp_path / "run").read_recipe(DetectRecipe).run.batch == count


def test_data_without_a_named_recipe_get_one_that_suits_their_number(boxes, tmp_path, monkeypatch):
    yolo = yolo_layout(boxes, tmp_path, "path: .\ntrain: images/train\nval: images/val\n", "images/{split}")
    count = len(list((yolo / "images" / "train").iterdir()))
    for data in (boxes, yolo):
        recipe, (note,) = choose_detector(Data(str(data)), "cpu")
        check(recipe)
        assert (recipe.name, recipe.data.path, recipe.data.eval_split) == ("own_images", str(data), "val")
        assert (recipe.schedule.epochs, recipe.run.precision, recipe.augment.flip) == (100, "fp32", 0.5)
        assert note.startswith(f"{count} train images: the recipe is own_images (")
        assert "480 px, 100 epochs, batch 8" in note
    with pytest.raises(FileNotFoundError, match="there is no folder nowhere; give the folder of the images"):
        choose_detector(Data("nowhere"), "cpu")
    with pytest.raises(NotADirectoryError, match=f"is a file; give the folder of the images with --data: {yolo}"):
        choose_detector(Data(str(yolo / "data.yaml")), "cpu")
    monkeypatch.setattr("sima_attn.detect.recipe_choice.count_images", lambda path, split: 118_000)
    recipe, _ = choose_detector(Data(str(boxes)), "cuda")
    assert (recipe.schedule.epochs, recipe.schedule.drops, recipe.run.precision) == (12, (9, 11), "bf16")


def test_evaluation_and_prediction_have_boxes_alone(run, masks, boxes, tmp_path):
    for data in (masks, boxes):  # masks in the data make no difference
        output = sima("detect", "eval", run[0], "--data", data, "--workers", 0, "--device", "cpu", "--out", tmp_path)
        assert "│ mask " not in output
    results = json.loads((tmp_path / "results.json").read_text())
    assert all("segmentation" not in result for result in results)
    out = tmp_path / "pictures"
    sima("detect", "predict", boxes / "images", "--model", run[0], "--out", out, "--threshold", 0, "--device", "cpu")
    told = json.loads((out / "detections.json").read_text())
    assert all(found.keys() == {"class", "score", "box"} for entry in told for found in entry["objects"])
    assert any(entry["objects"] for entry in told)


def test_objects_are_counted_in_words(run, boxes, monkeypatch):
    found = {"class": "disc", "score": 0.9}
    entries = [{"photo": "a.jpg", "objects": [found] * count} for count in range(3)]
    monkeypatch.setattr("sima_attn.detect.predict.predict_photos", lambda *_, **__: entries)
    output = sima("detect", "predict", boxes / "images", "--model", run[0], "--device", "cpu")
    for line in ("a.jpg: 0 objects", "a.jpg: 1 object: disc 90%", "a.jpg: 2 objects: disc 90%, disc 90%"):
        assert line in output.splitlines()


def test_the_split_is_that_of_the_run(run, boxes, tmp_path):
    """A run without val images was evaluated on others."""
    with safe_open(run[0] / "weights.safetensors", "pt") as file:
        about = json.loads(file.metadata()["about"])
    about["detector"]["data"]["eval_split"] = "val,train"
    weights = load_file(run[0] / "weights.safetensors")
    save_file(weights, tmp_path / "weights.safetensors", metadata={"about": json.dumps(about)})
    options = ["--workers", 0, "--device", "cpu"]
    for given, images in (([], 4), (["--data", boxes], 2), (["--split", "val"], 2)):
        assert f"(here, {images} images)" in sima("detect", "eval", tmp_path, *given, *options)


def test_a_mask_rcnn_is_evaluated_on_boxes_where_there_are_no_masks(boxes):
    model = build_rcnn("sima_xcit_nano_12_p16_224", 2, side=64, longest=96, proposals=8, depth=1).eval()
    found = evaluate_detector(model, ["square", "disc"], boxes, workers=0)
    assert list(found.scores.metrics()) == BOX_METRICS
    assert found.scores.mask is None


def test_drawing_without_masks_leaves_the_inside_of_a_box():
    found = Detections(torch.tensor([[50.0, 60, 120, 100]]), torch.tensor([1]), torch.tensor([0.9]), None)
    picture = np.array(draw(Image.new("RGB", (200, 150)), found, ["square"]))
    assert picture[60, 60].any()
    assert not picture[70:90, 60:110].any()


def test_augmentation_moves_boxes_without_masks():
    target = {"boxes": torch.tensor([[20.0, 10, 50, 30]]), "labels": torch.tensor([1])}
    augment = Augment(flip=1.0, crop=0.0, sides=(40, 40), longest=60)
    _, moved = augment(torch.zeros(3, 40, 60, dtype=torch.uint8), target)
    assert moved["boxes"].tolist() == [[10, 10, 40, 30]]
    assert moved.keys() == {"boxes", "labels"}
