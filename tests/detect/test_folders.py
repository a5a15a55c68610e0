"""Any layout of the same images gives the same objects; where several files fit, none is chosen."""

import json

import numpy as np
import pytest
from layouts import coco_layout, contents, copy_images, without_masks, yolo_layout
from PIL import Image
from shapes import coco_folder, edit

from sima_attn.data.images import read_image, upright_size
from sima_attn.detect.folders import open_split
from sima_attn.detect.yolo import labels_of, parse_row

pytest.importorskip("pycocotools")
COCO = {
    "coco": ("annotations/instances_{split}2017.json", "{split}2017"),
    "coco images": ("annotations/instances_{split}2017.json", "images/{split}2017"),
    "one folder of images": ("annotations/{split}.json", "images"),
    "roboflow": ("{split}/_annotations.coco.json", "{split}"),
    "files in the root": ("{split}.json", "images/{split}"),
    "files beside the images": ("{split}_annotations.json", "."),
    "images below the split": ("{split}/annotations.json", "{split}/images"),
}
YOLO = {
    "ultralytics": ("path: .\ntrain: images/train\nval: images/val\n", "images/{split}"),
    "an old path": ("path: ../datasets/mine\ntrain: images/train\nval: images/val\n", "images/{split}"),
    "roboflow": ("train: ../train/images\nval: ../val/images\nnc: 2\n", "{split}/images"),
    "lists": ("train: [train/images]\nval: [val/images]\n", "{split}/images"),
}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return coco_folder(tmp_path_factory.mktemp("shapes") / "coco")


def opened(folder, split="train", **options):
    """The data, and the last line that was said."""
    said = []
    return open_split(folder, split, said.append, **options), said[-1]


def assert_same_objects(data, expected, slack=0.0):
    assert data.classes == expected.classes
    targets = {data.name(i).rpartition("/")[2]: (data.read(i), data.target(i)) for i in range(len(data))}
    assert len(targets) == len(expected)
    for i in range(len(expected)):
        image, target = targets[expected.name(i).rpartition("/")[2]]
        wanted = expected.target(i)
        assert image.size == expected.read(i).size
        assert target["labels"].tolist() == wanted["labels"].tolist()
        assert np.allclose(target["boxes"], wanted["boxes"], atol=slack)
        assert target.keys() == wanted.keys()
        if "masks" in target:
            assert (target["masks"] != wanted["masks"]).float().mean() <= slack


def test_the_assertion_fails_for_other_objects(shapes):
    data, other = opened(shapes)[0], opened(shapes)[0]
    assert_same_objects(data, other)
    other.objects[0][0]["bbox"][0] += 1
    with pytest.raises(AssertionError):
        assert_same_objects(data, other)


@pytest.mark.parametrize("layout", COCO)
def test_coco_files_are_found_wherever_tools_put_them(shapes, tmp_path, layout):
    file, images = COCO[layout]
    folder = coco_layout(shapes, tmp_path / "data", file, images)
    for split in ("train", "val"):
        data, said = opened(folder, split)
        assert_same_objects(data, opened(shapes, split)[0])
        assert said.startswith(f"{split}: {len(data)} images, {2 * len(data)} objects of 2 classes, with masks, in ")
        assert file.format(split=split) in said
        place = images.format(split=split)
        assert said.endswith("the folder itself" if place == "." else f"images in {place}/")


@pytest.mark.parametrize("polygons", [False, True])
@pytest.mark.parametrize("layout", YOLO)
def test_yolo_labels_are_the_same_objects(shapes, tmp_path, layout, polygons):
    folder = yolo_layout(shapes, tmp_path / "data", *YOLO[layout], polygons=polygons)
    for split in ("train", "val"):
        data, said = opened(folder, split)
        assert data.has_masks == polygons
        assert_same_objects(data, opened(shapes, split, masks=polygons)[0], slack=1e-3)
        assert "data.yaml" in said
        assert ("without masks" in said) != polygons


def test_valid_and_test_stand_for_val_in_this_order(shapes, tmp_path):
    folder = coco_layout(shapes, tmp_path / "data", "{split}/_annotations.coco.json", "{split}")
    (folder / "val").rename(folder / "test")
    assert "test/_annotations.coco.json" in opened(folder, "val")[1]
    content = contents(shapes)["val"]
    copy_images(shapes, content, folder / "valid")
    (folder / "valid" / "_annotations.coco.json").write_text(json.dumps(content))
    assert "valid/_annotations.coco.json" in opened(folder, "val")[1]
    assert "test/_annotations.coco.json" in opened(folder, "test")[1]


def test_captions_and_keypoints_beside_instances_are_no_candidates(shapes, tmp_path):
    folder = coco_layout(shapes, tmp_path / "data", "annotations/instances_{split}2017.json", "{split}2017")
    for name in ("captions_train2017.json", "person_keypoints_train2017.json"):
        (folder / "annotations" / name).write_text("{}")
    assert "instances_train2017.json" in opened(folder)[1]


def test_several_files_are_an_error_that_lists_them_and_one_can_be_named(shapes, tmp_path):
    folder = coco_layout(shapes, tmp_path / "data", "annotations/train_a.json", "images")
    copy_images(shapes, contents(shapes)["train"], folder / "images")
    (folder / "annotations" / "train_b.json").write_text(json.dumps(contents(shapes)["train"]))
    with pytest.raises(ValueError, match=r"several annotations.*annotations/train_a\.json, annotations/train_b\.json"):
        opened(folder)
    data, said = opened(folder, "annotations/train_b.json")
    assert_same_objects(data, opened(shapes)[0])
    assert "in annotations/train_b.json" in said
    with pytest.raises(FileNotFoundError, match="there is no annotation file"):
        opened(folder, "annotations/train_c.json")


def test_a_file_without_a_split_in_its_name_can_be_named(shapes, tmp_path):
    """As CVAT writes it: annotations/instances_default.json and images/default/."""
    content = contents(shapes)["train"]
    copy_images(shapes, content, tmp_path / "images" / "default")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_default.json").write_text(json.dumps(content))
    with pytest.raises(FileNotFoundError, match=r"--set data\.train_split=FILE.*annotations/instances_default\.json"):
        opened(tmp_path)
    data, said = opened(tmp_path, "annotations/instances_default.json")
    assert_same_objects(data, opened(shapes)[0])
    assert said.endswith("images in images/default/")


def test_without_val_images_the_error_says_how_to_train(shapes, tmp_path):
    coco = coco_layout(shapes, tmp_path / "coco", *COCO["coco"])
    (coco / "annotations" / "instances_val2017.json").unlink()
    yolo = yolo_layout(shapes, tmp_path / "yolo", "train: images/train\n", "images/{split}")
    for folder in (coco, yolo):
        with pytest.raises(
            (FileNotFoundError, ValueError), match=r"--set data\.eval_split=train` evaluates on the train"
        ):
            opened(folder, "val")


def test_two_formats_and_two_image_folders_are_errors(shapes, tmp_path):
    both = yolo_layout(shapes, tmp_path / "both", *YOLO["ultralytics"])
    (both / "train.json").write_text(json.dumps(contents(shapes)["train"]))
    with pytest.raises(ValueError, match=r"several annotations.*train\.json, data\.yaml"):
        opened(both)
    twice = coco_layout(shapes, tmp_path / "twice", "{split}.json", "{split}")
    copy_images(shapes, contents(shapes)["train"], twice / "images" / "train2017")
    with pytest.raises(ValueError, match=r"in several folders: train/, images/train2017/"):
        opened(twice)
    (twice / "val2017").symlink_to(twice / "val")
    assert "images in val/" in opened(twice, "val")[1]  # a link to the same folder is no second one


def test_without_masks_there_are_boxes_and_the_crowds_stay(shapes, tmp_path):
    folder = coco_folder(tmp_path / "data")
    edit(folder, without_masks)
    crowd = {"iscrowd": 1, "segmentation": {"size": [96, 72], "counts": [96 * 72]}}  # they have masks nevertheless
    edit(folder, lambda content: content["annotations"][0].update(crowd))
    data, said = opened(folder)
    assert not data.has_masks
    assert "with boxes, without masks" in said
    assert [len(data.target(i)["labels"]) for i in range(4)] == [1, 2, 2, 2]
    assert data.target(0).keys() == {"boxes", "labels"}
    forced = opened(shapes, masks=False)[0]
    assert not forced.has_masks
    assert_same_objects(forced, opened(coco_layout(shapes, tmp_path / "x", "{split}.json", "."), masks=False)[0])


def test_an_object_without_a_mask_among_others_is_skipped_with_a_hint(tmp_path):
    folder = coco_folder(tmp_path / "data")
    edit(folder, lambda content: content["annotations"][0].pop("segmentation"))
    said = []
    data = open_split(folder, "train", said.append)
    assert data.has_masks
    assert "skipped 1 annotations without a mask (--no-masks uses their boxes)" in said[0]
    assert sum(map(len, open_split(folder, "train", masks=False).objects)) == 8


@pytest.mark.parametrize(
    "row", ["", "0", "0 0.5 0.5 0.1", "x 0.5 0.5 0.1 0.1", "0 50 50 10 10", "0 nan 0.5 0.1 0.1", "0.5 0.5 0.5 0.1 0.1"]
)
def test_a_row_that_is_no_box_or_polygon_is_refused(row):
    assert parse_row(row, 100, 100) is None


def test_a_broken_row_a_missing_file_and_a_broken_image_are_counted(shapes, tmp_path):
    folder = yolo_layout(shapes, tmp_path / "data", *YOLO["ultralytics"])
    first, second, third, _ = sorted((folder / "labels" / "train").iterdir())
    first.write_text(first.read_text() + "0 12 12 5 5\n7 0.5 0.5 0.1 0.1\n")
    second.unlink()
    (folder / "images" / "train" / third.with_suffix(".png").name).write_bytes(b"no image")
    said = []
    data = open_split(folder, "train", said.append)
    assert len(data) == 3
    assert len(data.only_trainable()) == 2
    assert any(f"skipped 1 images that cannot be read, the first: id {third.stem}.png" in line for line in said)
    assert any("skipped 1 rows that are neither" in line and f"{first.name}:3" in line for line in said)
    assert any("of a category that is not in the file" in line and f"{first.name}:4" in line for line in said)


def test_wrong_yaml_files_are_explained(shapes, tmp_path):
    folder = yolo_layout(shapes, tmp_path / "data", "train: pictures\nval: images/val\n", "images/{split}")
    with pytest.raises(ValueError, match=r"pictures does not exist; looked for .*data/pictures"):
        opened(folder)
    with pytest.raises(ValueError, match=r"no images for the split 'extra'; its entries: train, val, names"):
        opened(folder, "extra")
    (folder / "other.yaml").write_text("names: [a]")
    with pytest.raises(ValueError, match=r"several files that describe YOLO labels: data\.yaml, other\.yaml"):
        opened(folder)
    (folder / "other.yaml").unlink()
    (folder / "data.yaml").write_text("train: images/train\nkpt_shape: [17, 3]\nnames: [person]\n")
    with pytest.raises(ValueError, match="describes keypoints"):
        opened(folder)


def test_images_may_be_listed_in_a_text_file(shapes, tmp_path):
    folder = yolo_layout(shapes, tmp_path / "data", "train: train.txt\nval: images/val\n", "images/{split}")
    names = sorted(path.name for path in (folder / "images" / "train").iterdir())
    (folder / "train.txt").write_text("".join(f"./images/train/{name}\n" for name in names[:3]))
    assert len(opened(folder)[0]) == 3


def test_labels_lie_in_labels_or_beside_the_image(tmp_path):
    assert labels_of(tmp_path / "images" / "a" / "images" / "x.jpg") == tmp_path / "images" / "a" / "labels" / "x.txt"
    assert labels_of(tmp_path / "photos" / "x.jpg").parent == tmp_path / "photos"


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_the_size_in_the_header_is_that_of_the_upright_image(tmp_path, orientation):
    image = Image.new("RGB", (30, 20))
    image.getexif()[0x0112] = orientation
    image.save(tmp_path / "x.jpg", exif=image.getexif())
    assert upright_size(tmp_path / "x.jpg") == read_image(tmp_path / "x.jpg").size
