"""The same annotated images in the layouts of COCO, Roboflow, CVAT and ultralytics."""

import json
import shutil

from shapes import CATEGORIES


def contents(root):
    """Split -> content of the COCO file that `coco_folder` has written."""
    return {
        split: json.loads((root / "annotations" / f"instances_{split}.json").read_text()) for split in ("train", "val")
    }


def copy_images(root, content, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for image in content["images"]:
        shutil.copy(root / "images" / image["file_name"], folder)


def coco_layout(root, out, file, images):
    """COCO files and images at the places that the patterns name, such as {split}/_annotations.coco.json."""
    for split, content in contents(root).items():
        target = out / file.format(split=split)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content))
        copy_images(root, content, out / images.format(split=split))
    return out


def yolo_layout(root, out, yaml, images, polygons=False):
    """A data.yaml with this text, images at the place that the pattern names, and their labels."""
    numbers = {category["id"]: i for i, category in enumerate(CATEGORIES)}
    for split, content in contents(root).items():
        folder = out / images.format(split=split)
        copy_images(root, content, folder)
        labels = out / images.format(split=split).replace("images", "labels")
        labels.mkdir(parents=True, exist_ok=True)
        for image in content["images"]:
            mine = [a for a in content["annotations"] if a["image_id"] == image["id"]]
            rows = [yolo_row(a, image, numbers[a["category_id"]], polygons) for a in mine]
            (labels / image["file_name"]).with_suffix(".txt").write_text("\n".join(rows) + "\n")
    (out / "data.yaml").write_text(yaml + "names: [square, disc]\n")
    return out


def yolo_row(annotation, image, number, polygons):
    width, height = image["width"], image["height"]
    if polygons:
        points = annotation["segmentation"][0]
        values = [value / (height if i % 2 else width) for i, value in enumerate(points)]
    else:
        x, y, w, h = annotation["bbox"]
        values = [(x + w / 2) / width, (y + h / 2) / height, w / width, h / height]
    return " ".join([str(number), *(f"{value:.6f}" for value in values)])


def without_masks(content):
    """Boxes alone, as Roboflow writes them."""
    for annotation in content["annotations"]:
        annotation["segmentation"] = []
