"""Training, going on, evaluating and drawing, on images with shapes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shapes import CATEGORIES, SMALL, coco_folder, edit, small_recipe
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn._settings import check, from_dict, to_dict, with_overrides
from sima_attn.detect import pyramid
from sima_attn.detect.drawing import draw_objects, overlap, place_caption
from sima_attn.detect.predict import Detections, detect, draw
from sima_attn.detect.recipes import RECIPES, DetectRecipe, named_recipe
from sima_attn.detect.task import Detection, train_detector
from sima_attn.detect.weights import build_detector, load_backbone, load_detector
from sima_attn.report.progress import RunProgress
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.fabric import start_fabric
from sima_attn.train.logs import read_log
from sima_attn.train.recipes import StepSchedule

pytest.importorskip("pycocotools")
LOSSES = ["loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask"]


@pytest.fixture(scope="module", autouse=True)
def narrow_pyramid():
    """A pyramid of 32 channels instead of 256: steps take a third of the time, checkpoints a third of the space."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyramid, "CHANNELS", 32)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return coco_folder(tmp_path_factory.mktemp("coco") / "data")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Ten steps, each on all four images as they are."""
    folder = tmp_path_factory.mktemp("runs") / "ten"
    recipe = small_recipe(data, epochs=10, run={"batch": 4}, model={"drop_path": 0.0})
    recipe = replace(
        recipe,
        augment=replace(recipe.augment, flip=0.0, crop=0.0),
        optim=replace(recipe.optim, lr=3e-4),
    )
    return folder, train_detector(recipe, folder, device="cpu", quiet=True)


def test_ten_steps_lower_the_loss_and_an_evaluation_runs(run):
    folder, finished = run
    rows = read_log(folder / "train.csv")
    assert finished.steps == len(rows) == 10
    assert set(LOSSES) < set(rows[0])
    losses = [float(row["loss"]) for row in rows]
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
    assert losses[0] == pytest.approx(sum(float(rows[0][name]) for name in LOSSES), rel=1e-4)
    (evaluated,) = read_log(folder / "eval.csv")
    assert {f"{kind}_{n}" for kind in ("box", "mask") for n in ("ap", "ap50", "ap75")} < set(evaluated)
    assert set(finished.metrics) < set(evaluated)
    loaded = load_detector(folder)
    assert loaded.classes == ["square", "disc"]
    assert not loaded.model.training


def test_mixed_precision_trains_and_leaves_the_boxes_as_they_are(data, tmp_path):
    """bfloat16 has 8 bits: rounded to it, the corners of boxes would move by pixels."""
    recipe = small_recipe(data, epochs=1, run={"precision": "bf16", "batch": 4}, model={"drop_path": 0.0})
    finished = train_detector(recipe, tmp_path / "half", device="cpu", quiet=True)
    whole = replace(recipe, run=replace(recipe.run, precision="fp32"))
    train_detector(whole, tmp_path / "whole", device="cpu", quiet=True)
    half, full = (read_log(tmp_path / name / "train.csv")[0] for name in ("half", "whole"))
    assert finished.steps == 1
    assert float(half["loss_rpn_box_reg"]) == pytest.approx(float(full["loss_rpn_box_reg"]), rel=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_trains_and_evaluates(data, tmp_path, precision):
    """Images of two shapes in a batch: masks, anchors and targets on the device, frozen statistics and norms too."""
    recipe = small_recipe(
        data,
        epochs=10,
        run={"batch": 4, "precision": precision},
        model={"norm_maps": True, "freeze_statistics": True, "drop_path": 0.0},
    )
    recipe = replace(
        recipe,
        augment=replace(recipe.augment, flip=0.0, crop=0.0),
        optim=replace(recipe.optim, lr=3e-4),
    )
    finished = train_detector(recipe, tmp_path / "run", device="cuda", quiet=True)
    losses = [float(row["loss"]) for row in read_log(tmp_path / "run" / "train.csv")]
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
    assert "box_ap50" in finished.metrics


class KilledError(Exception):
    """Stands for the kill, between two steps."""


def test_killed_and_gone_on_with_equals_never_stopped(data, tmp_path, monkeypatch):
    """Bit for bit: weights, optimizer and logs; with a worker process after it and none before."""
    recipe = small_recipe(data, run={"checkpoint_steps": 2})
    once = replace(recipe, run=replace(recipe.run, checkpoint_steps=0))
    train_detector(once, tmp_path / "whole", device="cpu", quiet=True)

    def die(self, made):
        if made == 3:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Detection, "after_step", die)
        with pytest.raises(KilledError):
            train_detector(recipe, tmp_path / "again", device="cpu", quiet=True)
    assert load_newest(tmp_path / "again" / "checkpoints")["step"] == 2
    later = replace(recipe, data=replace(recipe.data, workers=1))
    train_detector(later, tmp_path / "again", resume=True, device="cpu", quiet=True)
    whole, again = (load_newest(tmp_path / name / "checkpoints") for name in ("whole", "again"))
    assert whole["step"] == again["step"] == 4
    assert all(torch.equal(whole["model"][name], again["model"][name]) for name in whole["model"])
    states = whole["optimizer"]["state"], again["optimizer"]["state"]
    assert all(torch.equal(states[0][i][n], states[1][i][n]) for i in states[0] for n in states[0][i])
    rows = [
        [{k: v for k, v in row.items() if k != "images_per_second"} for row in read_log(tmp_path / name / "train.csv")]
        for name in ("whole", "again")
    ]
    assert rows[0] == rows[1]
    other = replace(recipe, optim=replace(recipe.optim, lr=0.01))
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.001 -> 0\.01"):
        train_detector(other, tmp_path / "again", resume=True, device="cpu", quiet=True)
    shutil.rmtree(tmp_path)  # half a gigabyte


def task(path, **parts) -> tuple[Detection, list[str]]:
    said: list[str] = []
    progress = RunProgress(shown=False)
    progress.say = said.append
    return Detection(small_recipe(path, **parts), start_fabric("cpu", "fp32"), progress), said


def test_a_missing_image_is_named_and_too_many_are_an_error(tmp_path):
    folder = coco_folder(tmp_path / "data")
    photos = sorted((folder / "images").glob("*.png"))
    photos[0].unlink()
    detection, said = task(folder)
    list(detection.batches(0, 4))
    assert any(photos[0].name in line for line in said)
    for photo in photos[1:3]:
        photo.unlink()
    with pytest.raises(ValueError, match=r"3 of 4 images cannot be read, more than the 2 that are skipped"):
        list(detection.batches(0, 4))


def test_batches_depend_on_the_step_alone(data):
    detection, _ = task(data)
    every = list(detection.batches(0, 4))
    later = list(detection.batches(2, 4))
    assert len(every) == 4
    for batch, again in zip(every[2:], later, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch.images, again.images, strict=True))
        assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(batch.targets, again.targets, strict=True))
    assert any(len({image.shape for image in batch.images}) > 1 for batch in every)


def test_the_first_batch_is_drawn_with_boxes_masks_and_class_names(data, run, tmp_path):
    assert (run[0] / "batch.png").is_file()
    detection, _ = task(data)
    batch = next(detection.batches(0, 1))
    picture = np.array(detection.drawn(batch.images[0], batch.targets[0]))
    plain = (255 * batch.images[0]).round().byte().permute(1, 2, 0).numpy()
    assert picture.shape == plain.shape
    inside = batch.targets[0]["masks"].bool().any(dim=0).numpy()
    assert (picture[inside] != plain[inside]).any(axis=1).mean() > 0.9
    detection.draw_batch(batch, tmp_path / "batch.png")
    assert np.array(Image.open(tmp_path / "batch.png")).std() > 0


def test_norms_and_biases_are_not_decayed(data):
    detection, _ = task(data, name="sima_deit_tiny_patch16_224")
    plain, decayed = detection.parameter_groups(0.05)
    assert (plain["weight_decay"], decayed["weight_decay"]) == (0.0, 0.05)
    names = {id(p): name for name, p in detection.model.named_parameters()}
    assert {"backbone.maps.body.pos_embed", "backbone.maps.body.cls_token"} <= {names[id(p)] for p in plain["params"]}
    assert all(p.dim() > 1 for p in decayed["params"])
    assert len(plain["params"]) + len(decayed["params"]) == len(names)


def test_other_categories_in_val_are_an_error(tmp_path):
    folder = coco_folder(tmp_path / "data")
    edit(folder, lambda content: content.update(categories=[*CATEGORIES, {"id": 9, "name": "star"}]), "val")
    with pytest.raises(ValueError, match=r"only in .*instances_val.json: 9 star"):
        task(folder)


def test_val_images_without_objects_are_an_error_before_training(tmp_path):
    folder = coco_folder(tmp_path / "data")
    edit(folder, lambda content: content.update(annotations=[]), "val")
    with pytest.raises(ValueError, match=r"no objects on its 2 images, so there is no AP"):
        train_detector(small_recipe(folder), tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_recipe_is_the_papers():
    recipe = named_recipe("coco")
    assert (recipe.optim.name, recipe.optim.lr_at(16), recipe.optim.weight_decay) == ("adamw", 1e-4, 0.05)
    assert (recipe.run.batch, recipe.schedule.epochs, recipe.schedule.drops) == (16, 36, (27, 33))
    assert (recipe.augment.sides, recipe.augment.longest, recipe.augment.crop) == ((480, 800), 1333, 0.5)
    assert recipe.model.drop_path == 0.05
    for name in RECIPES:
        recipe = named_recipe(name)
        check(recipe)
        assert from_dict(DetectRecipe, to_dict(recipe)) == recipe
    assert with_overrides(recipe, ["model.blocks=1,2,3,4", "augment.sides=64,96"]).model.blocks == (1, 2, 3, 4)


def test_the_mini_recipe_starts_from_the_weights_of_the_package():
    import timm

    recipe = named_recipe("coco_mini")
    body = build_detector(recipe, 80, masks=True, start=True).backbone.maps.body.state_dict()
    shipped = timm.create_model(recipe.model.name, pretrained=True).state_dict()
    assert body.keys() < shipped.keys()
    assert all(torch.equal(value, shipped[key]) for key, value in body.items())
    later = build_detector(recipe, 80, masks=True).backbone.maps.body.state_dict()  # to load a run's weights into
    assert not torch.equal(later["blocks.0.mlp.fc1.weight"], shipped["blocks.0.mlp.fc1.weight"])


def test_several_splits_are_evaluated_each_under_its_name(data, tmp_path):
    recipe = small_recipe(data, epochs=1)
    recipe = replace(recipe, data=replace(recipe.data, eval_split="train, val"))
    finished = train_detector(recipe, tmp_path / "two", device="cpu", quiet=True)
    kinds = [f"{kind}_{n}" for kind in ("box", "mask") for n in ("ap", "ap50", "ap75")]
    assert list(finished.metrics) == [f"{split}_{kind}" for split in ("train", "val") for kind in kinds]


def test_the_learning_rate_warms_up_and_falls_in_steps():
    schedule = StepSchedule(epochs=36, drops=(27, 33), warmup_steps=500)
    factors = [schedule.factor(step, 1000) for step in (0, 250, 500, 26_999, 27_000, 32_999, 33_000)]
    assert factors == pytest.approx([1e-3, 0.5005, 1, 1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run.precision=fp8", "run.precision must be one of"),
        ("augment.crop=2", "augment.crop must be between 0 and 1, got 2.0"),
        ("augment.sides=800,480", "augment.sides must be two numbers, the lower one first"),
        ("data.longest=10", "data.longest must be at least data.side=800, got 10"),
        ("augment.longest=10", "augment.longest must be at least the largest of"),
        ("schedule.drops=0,3", r"schedule.drops\[0\] must be at least 1, got 0"),
        ("model.proposals=0", "model.proposals must be at least 1"),
        ("data.eval_split=train,", "data.eval_split must be one split, or different ones"),
    ],
)
def test_a_value_no_run_can_have_is_an_error(setting, message):
    with pytest.raises(ValueError, match=message):
        check(with_overrides(named_recipe("coco"), [setting]))
    with pytest.raises(
        ValueError, match="unknown detection recipe 'coc'; known: coco, coco_mini, own_images; did you mean 'coco'"
    ):
        named_recipe("coc")


def test_a_backbone_starts_from_a_classifiers_weights(tmp_path, data):
    import timm
    from safetensors.torch import save_file

    name = "sima_deit_tiny_patch16_224"
    classifier = timm.create_model(name, num_classes=7, **SMALL[name])
    file = tmp_path / "weights.safetensors"
    save_file(classifier.state_dict(), file)
    torch.save({"step": 3, "model": classifier.state_dict()}, tmp_path / "step.pt")
    for what in (file, tmp_path, tmp_path / "step.pt"):
        detection, _ = task(data, name=name, model={"weights": str(what)})
        body = detection.model.backbone.maps.body
        assert torch.equal(body.blocks[1].attn.qkv.weight, classifier.blocks[1].attn.qkv.weight)
        assert torch.equal(body.pos_embed, classifier.pos_embed)
    with pytest.raises(ValueError, match=r"does not fit the backbone. .*missing.*model\.kwargs"):
        load_backbone(timm.create_model(name, **{**SMALL[name], "depth": 3}), file)
    with pytest.raises(FileNotFoundError, match="there is no weight file"):
        load_backbone(classifier, tmp_path / "none.pt")
    torch.save([classifier.state_dict()], tmp_path / "list.pt")
    for foreign in (file, tmp_path / "step.pt", tmp_path / "list.pt"):
        with pytest.raises(ValueError, match="was not written by `sima detect train`"):
            load_detector(foreign)


def sima(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_eval_prints_table_4_and_writes_results_and_categories(run, tmp_path):
    output = sima("detect", "eval", run[0], "--workers", "0", "--device", "cpu", "--out", tmp_path)
    assert "XCiT-S12/16 -> SimA (paper)" in output
    assert "medium" in output
    assert isinstance(json.loads((tmp_path / "results.json").read_text()), list)
    assert len((tmp_path / "categories.csv").read_text().splitlines()) == 3


def test_predict_takes_several_photos(run, data, tmp_path):
    first, second = sorted((data / "images").iterdir())[:2]
    sima("detect", "predict", first, second, "--model", run[0], "--out", tmp_path, "--device", "cpu")
    told = json.loads((tmp_path / "detections.json").read_text())
    assert [Path(entry["photo"]).name for entry in told] == [first.name, second.name]


def test_predict_draws_photos_of_a_folder_a_glob_and_a_file(run, data, tmp_path):
    photos = tmp_path / "photos"
    shutil.copytree(data / "images", photos)
    (photos / "broken.jpg").write_bytes(b"no image")
    (photos / "notes.txt").write_text("no photo")
    out = tmp_path / "out"
    output = sima("detect", "predict", photos, "--model", run[0], "--out", out, "--threshold", 0.0, "--device", "cpu")
    told = json.loads((out / "detections.json").read_text())
    assert len(told) == 6
    assert "broken.jpg" in output.replace("\n", "")
    for entry in told:
        assert Image.open(out / entry["picture"]).size == (entry["width"], entry["height"])
        for found in entry["objects"]:
            assert found["class"] in ("square", "disc")
            assert found["mask"]["size"] == [entry["height"], entry["width"]]
    assert any(entry["objects"] for entry in told)
    into = ["detect", "predict", str(photos), "--model", str(run[0]), "--out", str(photos), "--device", "cpu"]
    assert "could overwrite them" in str(CliRunner().invoke(cli.app, into).exception)


def test_a_large_photo_is_reduced_and_the_results_are_in_its_own_pixels(run, data, monkeypatch):
    """Enlarged six times, a photo gives the same objects, six times as large; the detector's input stays small."""
    model = load_detector(run[0], score_threshold=0.01).model
    small = Image.open(next((data / "images").iterdir())).convert("RGB")
    large = small.resize((6 * small.width, 6 * small.height), Image.Resampling.NEAREST)
    seen, forward = [], model.transform.forward
    monkeypatch.setattr(model.transform, "forward", lambda x, y=None: seen.append(max(x[0].shape)) or forward(x, y))
    found, expected = detect(model, large, 0.01), detect(model, small, 0.01)
    assert max(large.size) > 500 > 2 * 96 > max(seen)
    assert len(found.boxes) == len(expected.boxes) > 0
    assert torch.allclose(found.boxes, 6 * expected.boxes, atol=1e-2)
    assert found.mask_at(0, large.size).shape == (large.height, large.width)
    assert np.array_equal(found.mask_at(0, small.size), expected.mask_at(0, small.size))


def test_a_picture_shows_mask_box_and_label_and_leaves_the_rest(tmp_path):
    image = Image.new("RGB", (200, 150))
    mask = torch.zeros(1, 150, 200, dtype=torch.bool)
    mask[0, 60:100, 50:120] = True
    boxes = torch.tensor([[50.0, 60, 120, 100]])
    picture = np.array(
        draw(image, Detections(boxes, torch.tensor([2]), torch.tensor([0.874]), mask), ["square", "disc"])
    )
    assert picture[80, 80].any()
    assert (picture[60, 51:119] == picture[60, 60]).all()  # the upper side of the box
    assert not picture[120:, :].any()
    assert picture[30:60, 50:100].any()  # the label, above the box
    edge = torch.tensor([[0.0, 0, 199, 149]])
    whole = draw(
        image, Detections(edge, torch.tensor([1]), torch.tensor([1.0]), mask), ["a very long name of a class", "b"]
    )
    assert whole.size == (200, 150)


def test_captions_are_in_any_script():
    """Pillow's own font has one sign for all characters but ASCII."""
    image, box, label = Image.new("RGB", (200, 150)), torch.tensor([[20.0, 60, 120, 100]]), torch.tensor([1])
    beetle, bee = (np.array(draw_objects(image, box, label, [name])) for name in ("жук", "пче"))
    assert (beetle != bee).any()


def test_labels_stay_on_the_picture_and_clear_of_each_other():
    box = (10.0, 40.0, 60.0, 90.0)
    placed = []
    for _ in range(4):
        placed.append(place_caption(box, (80, 12), (100, 110), placed))
        assert min(placed[-1]) >= 0
        assert placed[-1][2] <= 100
        assert placed[-1][3] <= 110
    assert not any(overlap(a, b) for i, a in enumerate(placed) for b in placed[:i])
    assert placed[0][3] == 40  # above the box first
    assert place_caption((0, 0, 5, 5), (300, 200), (100, 100), []) == (0, 0, 300, 200)


def test_train_and_errors_on_the_command_line(data, tmp_path):
    assert "coco_mini" in sima("detect", "recipes")
    wrong = ["detect", "train", "--recipe", "coco", "--precision", "fp32", "--data", str(tmp_path / "none")]
    result = CliRunner().invoke(cli.app, [*wrong, "--device", "cpu"])
    assert isinstance(result.exception, FileNotFoundError)
    result = CliRunner().invoke(cli.app, ["detect", "train", "--set", "model.nme=x"])
    assert "unknown setting" in str(result.exception)
    assert not Path("runs/coco").exists()
