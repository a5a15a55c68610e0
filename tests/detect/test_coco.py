"""COCO's files: unusable records are skipped and reported, and the AP is pycocotools'."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from shapes import coco_folder, edit

from sima_attn.detect.coco import mask_of, run_lengths
from sima_attn.detect.folders import open_split
from sima_attn.detect.scores import CategoryRow, coco_scores, to_results, write_results
from sima_attn.report.rows import read_rows, write_rows
from sima_attn.reproduce.detection import table_4

pytest.importorskip("pycocotools")
MINI = Path(__file__).parents[3] / "shared" / "data" / "coco-mini"
needs_mini = pytest.mark.skipif(not MINI.is_dir(), reason="coco-mini is not here")


@pytest.fixture
def folder(tmp_path):
    return coco_folder(tmp_path / "coco")


def opened(folder, split="train"):
    """The data, and the lines on skipped records; the last line says what was found."""
    said = []
    return open_split(folder, split, said.append), said[:-1]


def perfect(data, score=0.9):
    """Detections that are the objects themselves, in COCO's result format."""
    results = []
    for i, image in enumerate(data.images):
        target = data.target(i)
        found = {**target, "scores": torch.full((len(target["labels"]),), score)}
        found["masks"] = found["masks"][:, None].float()
        results += to_results(image["id"], found, data.category_ids)
    return results


def test_labels_close_the_gaps_of_the_ids_and_gray_images_are_rgb(folder):
    data, said = opened(folder)
    assert said == []
    assert data.classes == ["square", "disc"]  # in the order of the ids 3 and 7, whatever that of the file
    assert len(data) == 4
    modes = {Image.open(data.name(i)).mode for i in range(4)}
    assert modes == {"L", "RGB"}
    for i in range(4):
        image, target = data.read(i), data.target(i)
        assert image.mode == "RGB"
        assert target["labels"].tolist() == [1, 2]
        assert target["masks"].shape == (2, image.height, image.width)
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = np.nonzero(mask.numpy())
            assert [columns.min(), rows.min()] == pytest.approx(box[:2].tolist(), abs=1.5)
            assert [columns.max(), rows.max()] == pytest.approx(box[2:].tolist(), abs=1.5)


BAD = [
    ("an image that is not in the file", {"image_id": 999}),
    ("a category that is not in the file", {"category_id": 4}),
    ("whose box is not four numbers", {"bbox": [1, 2, 3]}),
    ("with an empty box", {"bbox": [1, 2, 0, 5]}),
    ("without a mask", {"segmentation": []}),
    ("not have the image's size", {"segmentation": {"size": [5, 5], "counts": [25]}}),
    ("a polygon far outside", {"segmentation": [[0, 0, 1e9, 0, 1e9, 1e9]]}),  # pycocotools would end the process
    ("a polygon far outside", {"segmentation": [[5, 5, 30, 5, 30, 30], [1e9, 1e9, 1e9 + 9, 1e9, 1e9 + 9, 1e9 + 9]]}),
]
BAD += [
    ("does not cover the image exactly", {"segmentation": {"size": [96, 72], "counts": counts}})
    for counts in ([5], [0, 10**9], [-5, 96 * 72 + 5], [1.5, 2], 7, None, "", "o" * 50)
]


@pytest.mark.parametrize(("reason", "change"), BAD)
def test_a_bad_annotation_is_skipped_counted_and_named(folder, reason, change):
    def spoil(content):
        for annotation in content["annotations"][:2]:  # of the first image, 72 x 96 pixels
            annotation.update(change)

    edit(folder, spoil)
    data, said = opened(folder)
    assert len(said) == 1
    assert "skipped 2" in said[0]
    assert reason in said[0]
    assert "id 1" in said[0]
    assert sum(map(len, data.objects)) == 6
    assert len(data.only_trainable()) == 3
    assert coco_scores(data, perfect(data)).box.ap == pytest.approx(100)


@pytest.mark.parametrize("polygon", [[1, 1, 5, 5], [1, 1, 5, 1, 5, 5, 1], [float("inf"), 1, 5, 1, 5, 5]])
def test_a_broken_polygon_goes_and_the_others_of_the_object_stay(folder, polygon):
    edit(folder, lambda content: content["annotations"][0]["segmentation"].append(polygon))
    data, said = opened(folder)
    assert said == []
    assert len(data.objects[0][0]["segmentation"]) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": None}, "without an id or a file_name"),
        ({"height": 10**6, "width": 10**6}, "too many pixels"),
        ({"height": 1, "width": 101}, "too large an aspect ratio"),
    ],
)
def test_an_image_that_cannot_be_meant_is_left_out_and_named(folder, change, reason):
    edit(folder, lambda content: content["images"][0].update(change))
    data, said = opened(folder)
    assert reason in said[0]
    assert len(data) == 3


def test_sizes_may_be_whole_floats_and_others_are_named(folder):
    """As pandas and some labeling tools write them."""
    edit(folder, lambda content: [image.update(width=float(image["width"])) for image in content["images"]])
    data, said = opened(folder)
    assert said == []
    assert len(data) == 4
    assert data.read(0).size == (data.images[0]["width"], data.images[0]["height"])
    assert data.target(0)["masks"].shape == (2, data.images[0]["height"], data.images[0]["width"])
    edit(folder, lambda content: [image.update(width=80.5) for image in content["images"]])
    with pytest.raises(ValueError, match=r"has no usable images; skipped 4 images without a height and a width.*id 11"):
        opened(folder)


@pytest.mark.parametrize("iscrowd", [None, False, 0.0])
def test_no_crowd_may_be_written_in_several_ways(folder, iscrowd):
    edit(folder, lambda content: content["annotations"][0].update(iscrowd=iscrowd))
    data, said = opened(folder)
    assert said == []
    assert coco_scores(data, perfect(data)).categories[0].objects == 4


@pytest.mark.parametrize("area", ["x", -1, float("nan"), None])
def test_an_area_that_is_none_is_counted(folder, area):
    edit(folder, lambda content: content["annotations"][0].update(area=area))
    data, _ = opened(folder)
    assert coco_scores(data, perfect(data)).box.ap == pytest.approx(100)
    assert data.ground_truth().anns[1]["area"] == data.target(0)["masks"][0].sum()


def test_a_polygon_that_hangs_over_the_border_is_drawn_as_pycocotools_does(folder):
    from pycocotools import mask

    polygon = [-3, 20.5, 30, -2.25, 80, 40, 20, 98.5]  # of an image of 72 x 96 pixels
    edit(folder, lambda content: content["annotations"][0].update(segmentation=[polygon]))
    data, said = opened(folder)
    assert said == []
    expected = mask.decode(mask.frPyObjects([polygon], 96, 72))[:, :, 0]
    assert 0 < expected.sum() < expected.size
    assert np.array_equal(data.target(0)["masks"][0], expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), st.floats(0, 1))
def test_run_lengths_are_those_of_the_mask(seed, height, width, share):
    from pycocotools import mask

    pixels = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    code = mask.encode(np.asfortranarray(pixels))["counts"].decode()
    changes = np.flatnonzero(np.diff(pixels.T.ravel(), prepend=0))  # column by column, beginning with zeros
    assert run_lengths(code) == np.diff([0, *changes, height * width]).tolist()


def test_a_mask_in_any_code_is_read(folder):
    from pycocotools import mask

    pixels = np.random.default_rng(0).integers(0, 2, (96, 72), dtype=np.uint8)
    code = mask.encode(np.asfortranarray(pixels))["counts"].decode()
    for counts in (code, run_lengths(code)):
        segmentation = {"size": [96.0, 72.0], "counts": counts}
        edit(folder, lambda content, s=segmentation: content["annotations"][0].update(segmentation=s))
        data, said = opened(folder)
        assert said == []
        assert np.array_equal(mask_of(data.objects[0][0], 96, 72), pixels)


def test_a_size_that_ignores_the_exif_orientation_is_named_with_the_reason(folder):
    data, _ = opened(folder)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(data.name(0)).save(data.name(0), exif=exif)
    with pytest.raises(ValueError, match=r"size is \(96, 72\), but \(72, 96\) in the annotations; .* EXIF orientation"):
        data.read(0)
    edit(folder, lambda content: content["images"][0].update(width=96, height=72))
    data, _ = opened(folder)
    assert data.read(0).size == (96, 72)


def test_crowds_are_not_trained_on_and_ignored_by_the_ap(folder):
    def crowd(content):
        image = content["images"][0]
        size = [image["height"], image["width"]]
        counts = [0, image["height"] * image["width"]]
        box = [0, 0, image["width"], image["height"]]
        region = {"image_id": image["id"], "category_id": 3, "iscrowd": 1, "bbox": box}
        content["annotations"].append({**region, "id": 99, "segmentation": {"size": size, "counts": counts}})

    edit(folder, crowd)
    data, said = opened(folder)
    assert said == []
    assert len(data.objects[0]) == 3
    assert data.target(0)["labels"].tolist() == [1, 2]
    scores = coco_scores(data, perfect(data))
    assert scores.box.ap == pytest.approx(100)
    assert scores.categories[0].objects == 4


def test_images_without_objects_are_evaluated_on_and_not_trained_on(folder):
    edit(folder, lambda content: content.update(annotations=content["annotations"][2:]))
    data, _ = opened(folder)
    assert len(data) == 4
    assert len(data.only_trainable()) == 3
    edit(folder, lambda content: content.update(annotations=[]))
    data, _ = opened(folder)
    with pytest.raises(ValueError, match="no object to train on"):
        data.only_trainable()
    with pytest.raises(ValueError, match="no objects on these 4 images"):
        coco_scores(data, [])


def test_boxes_end_at_the_image_and_slivers_are_not_trained_on(folder):
    def move(content):
        content["annotations"][0]["bbox"] = [-10, -10, 30, 30]
        content["annotations"][1]["bbox"] = [0, 0, 0.5, 20]

    edit(folder, move)
    data, said = opened(folder)
    assert said == []
    assert data.target(0)["boxes"].tolist() == [[0, 0, 20, 20]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "no list of categories"),
        (lambda c: c.update(images=[]), "has no usable images"),
        (lambda c: c["images"].append(c["images"][0]), "two images have the id 11"),
        (lambda c: c["categories"].append({"id": 3, "name": "x"}), "two categories have the same id"),
        (lambda c: c["categories"].append({"id": "x"}), "a category needs a whole number as id"),
        (lambda c: c["categories"].append("cat"), "a category needs a whole number as id"),
        (lambda c: c["categories"].append({"id": [3], "name": "x"}), "a category needs a whole number as id"),
    ],
)
def test_a_file_that_cannot_be_meant_is_an_error(folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        opened(folder)


def test_files_that_are_not_there_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        opened(tmp_path / "none")
    with pytest.raises(
        FileNotFoundError, match=r"no annotations for the split 'test'.*annotations/instances_val\.json"
    ):
        opened(folder, "test")
    (folder / "annotations" / "instances_train.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        opened(folder)
    for file in (folder / "images").iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"the first images of instances_val\.json, e\.g\. 000055\.png"):
        opened(folder, "val")


def test_a_missing_file_and_a_wrong_size_are_errors_of_that_image(folder):
    data, _ = opened(folder)
    Path(data.name(0)).unlink()
    Image.new("RGB", (5, 5)).save(data.name(1))
    with pytest.raises(FileNotFoundError):
        data.read(0)
    with pytest.raises(ValueError, match=r"its size is \(5, 5\)"):
        data.read(1)


def fixed_results(data):
    """Good, shifted, wrong and missing detections."""
    results = perfect(data)
    generator = np.random.default_rng(1)
    for result in results:
        result["score"] = round(float(generator.uniform(0.1, 1)), 3)
        result["bbox"] = [x + float(d) for x, d in zip(result["bbox"], generator.integers(-4, 5, 4), strict=True)]
    results[1]["category_id"] = 3
    return results[:-1]


def direct(file, results, code):
    """pycocotools by itself."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = COCO(str(file))
    evaluation = COCOeval(truth, truth.loadRes(str(results)), code)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return (100 * evaluation.stats[:6]).tolist()


def assert_same_numbers(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a == b or (math.isnan(a) and b == -100)


def test_the_ap_is_pycocotools(folder, tmp_path):
    data, _ = opened(folder)
    results = fixed_results(data)
    write_results(tmp_path / "results.json", results)
    scores = coco_scores(data, json.loads((tmp_path / "results.json").read_text()))
    assert 0 < scores.box.ap < 100
    assert scores.box != scores.mask
    assert_same_numbers(scores.box, direct(data.file, tmp_path / "results.json", "bbox"))
    assert_same_numbers(scores.mask, direct(data.file, tmp_path / "results.json", "segm"))
    assert np.mean([row.box_ap for row in scores.categories]) == pytest.approx(scores.box.ap)
    assert np.mean([row.mask_ap50 for row in scores.categories]) == pytest.approx(scores.mask.ap50)
    with pytest.raises(AssertionError):
        assert_same_numbers(scores.box, [x + 1e-6 for x in scores.box])
    write_rows(tmp_path / "categories.csv", scores.categories)
    assert len(read_rows(tmp_path / "categories.csv", CategoryRow)) == 2
    table = table_4("sima", 44_390_821, scores)
    assert table.lines[-2][:3] == ["XCiT-S12/16 -> SimA (paper)", "44.3M", "44.8"]
    assert table.lines[-1][:3] == ["sima (here, 4 images)", "44.4M", f"{scores.box.ap:.1f}"]


def test_no_detections_are_an_ap_of_zero_and_images_left_out_do_not_count(folder):
    data, _ = opened(folder)
    nothing = coco_scores(data, [])
    assert nothing.box.ap == nothing.mask.ap == 0
    first = data.images[0]["id"]
    results = [r for r in perfect(data) if r["image_id"] == first]
    assert coco_scores(data, results).box.ap < 60
    assert coco_scores(data, results, [first]).box.ap == pytest.approx(100)


@needs_mini
def test_coco_mini_is_read_and_its_own_objects_score_full_marks():
    said = []
    data = open_split(MINI, "val", said.append)
    assert len(said) == 1
    assert (len(data), len(data.classes)) == (32, 80)
    assert max(data.category_ids) == 90
    results = perfect(data)
    scores = coco_scores(data, results)
    assert scores.box.ap > 99
    assert scores.mask.ap > 99
    train = open_split(MINI, "train", said.append)
    assert len(train.only_trainable()) <= 96
    gray = [i for i in range(len(train)) if Image.open(train.name(i)).mode == "L"]
    assert len(gray) == 1
    assert train.read(gray[0]).mode == "RGB"
