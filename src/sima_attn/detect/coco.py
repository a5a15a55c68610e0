"""Objects of images: annotations in COCO's format, checked. pycocotools decodes the masks.

Unusable annotations are skipped and reported by reason. Crowds are not trained on; the AP treats them as regions to
ignore. Shapes: n objects; boxes are (x0, y0, x1, y1) here and (x, y, width, height) in the files.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from sima_attn._errors import check_installed
from sima_attn.data.images import check_size, read_image
from sima_attn.data.sources import ImageSource

MIN_SIDE = 1.0  # pixels, of a box to train on
RLE = re.compile("(?:[P-o]{0,5}[0-O])+")  # a compressed run-length code: continued digits, then the last digit


def check_pycocotools() -> None:
    """Raise before a long run if pycocotools is not installed."""
    check_installed("detection", "pycocotools", extra="detection")


# Reason -> the ids of the records of a file that are skipped for it.
SkippedRecords = defaultdict[str, list[Any]]


def _in_words(skipped: SkippedRecords) -> list[str]:
    return [f"skipped {len(ids)} {reason}, the first: id {ids[0]!s:.40}" for reason, ids in skipped.items()]


class CocoData(ImageSource):
    """The images of one split and their objects.

    Attributes:
        images: Records of the file: id, file_name, height, width.
        objects: The annotations of each image, including crowds.
        classes: Class names; label k is classes[k - 1]. The category ids may have gaps.
        category_ids, category_names: The category id of each class; id and name in one string.
        has_masks: Whether the objects have masks, or boxes only.
    """

    def __init__(
        self,
        file: Path,
        folder: Path,
        images: list[dict[str, Any]],
        objects: list[list[dict[str, Any]]],
        categories: list[dict[str, Any]],
        has_masks: bool,
    ) -> None:
        self.file, self.folder, self.images, self.objects, self.categories = file, folder, images, objects, categories
        self.has_masks = has_masks
        self.classes = [str(category["name"]) for category in categories]
        self.category_ids = [int(category["id"]) for category in categories]
        self.category_names = [f"{category['id']} {category['name']}" for category in categories]
        self.labels = {id_: label for label, id_ in enumerate(self.category_ids, start=1)}

    @classmethod
    def from_content(
        cls,
        content: Mapping[str, Any],
        file: Path,
        folder: Path,
        say: Callable[[str], None],
        *,
        masks: bool | None = True,
        skipped: SkippedRecords | None = None,
    ) -> CocoData:
        """The objects in the content of an annotation file; unusable records are skipped and reported by `say`.

        Args:
            content: The lists of images, annotations and categories.
            file, folder: Where the annotations and the images are.
            masks: Read masks where the annotations have any, with None where at least half of them do; otherwise their
                boxes only.
            skipped: Records that were skipped before, to report with the others.
        """
        skipped = SkippedRecords(list) if skipped is None else skipped
        categories = _categories(content, file)
        images = _images(content, file, skipped)
        places = {image["id"]: i for i, image in enumerate(images)}
        objects: list[list[dict[str, Any]]] = [[] for _ in images]
        known = {category["id"] for category in categories}
        have_mask = [bool(a.get("segmentation")) for a in content["annotations"] if not a.get("iscrowd")]
        masks = 2 * sum(have_mask) >= len(have_mask) > 0 if masks is None else masks and any(have_mask)
        for annotation in content["annotations"]:
            place = places.get(annotation.get("image_id"))
            if place is None:
                skipped["annotations of an image that is not in the file"].append(annotation.get("id"))
                continue
            reason, usable = _checked(annotation, images[place], known, masks)
            if reason:
                skipped[f"annotations {reason}"].append(annotation.get("id"))
            else:
                objects[place].append(usable)
        for line in _in_words(skipped):
            say(f"{file.name}: {line}")
        return cls(file, folder, images, objects, categories, masks)

    def __len__(self) -> int:
        return len(self.images)

    def summary(self) -> str:
        """The numbers of images, objects and classes, and whether there are masks."""
        what = "with masks" if self.has_masks else "with boxes, without masks"
        return f"{len(self)} images, {sum(map(len, self.objects))} objects of {len(self.classes)} classes, {what},"

    def name(self, index: int) -> str:
        """The path of an image."""
        return str(self.folder / self.images[index]["file_name"])

    def read(self, index: int) -> Image:
        """An image as RGB, upright. Raises if it cannot be read; the message gives the reason without the name."""
        record = self.images[index]
        image, annotated = read_image(self.name(index)), (record["width"], record["height"])
        if image.size != annotated:
            raise ValueError(
                f"its size is {image.size}, but {annotated} in the annotations; where the sides are swapped, the "
                "annotations ignore its EXIF orientation: annotate the upright image"
            )
        return image

    def target(self, index: int) -> dict[str, Tensor]:
        """Boxes [n, 4], labels [n] and, if there are any, masks [n, height, width] of the objects to train on."""
        record = self.images[index]
        height, width = record["height"], record["width"]
        used = [a for a in self.objects[index] if is_trainable(a, width, height)]
        boxes = torch.tensor([corners(a["bbox"], width, height) for a in used], dtype=torch.float).reshape(-1, 4)
        labels = torch.tensor([self.labels[a["category_id"]] for a in used], dtype=torch.long)
        target = {"boxes": boxes, "labels": labels}
        if self.has_masks:
            empty = np.zeros((0, height, width), np.uint8)
            masks = np.stack([mask_of(a, height, width) for a in used]) if used else empty
            target["masks"] = torch.from_numpy(masks)
        return target

    def only_trainable(self) -> CocoData:
        """Only the images with an object to train on."""
        kept = [
            i
            for i, image in enumerate(self.images)
            if any(is_trainable(a, image["width"], image["height"]) for a in self.objects[i])
        ]
        if not kept:
            raise ValueError(f"{self.file} has no object to train on: all images are empty or have only crowds")
        images, objects = [self.images[i] for i in kept], [self.objects[i] for i in kept]
        return CocoData(self.file, self.folder, images, objects, self.categories, self.has_masks)

    def check_has_objects(self) -> None:
        """Raise where there is no AP, because all images are empty or have only crowds."""
        if all(a["iscrowd"] for objects in self.objects for a in objects):
            raise ValueError(
                f"{self.file} has no objects on its {len(self)} images, so there is no AP; annotate them, or choose "
                "other images with --set data.eval_split"
            )

    def ground_truth(self) -> Any:
        """These annotations as pycocotools' COCO; missing areas are computed from the masks, or the boxes."""
        from pycocotools.coco import COCO

        coco = COCO()
        annotations: list[dict[str, Any]] = []
        for image, objects in zip(self.images, self.objects, strict=True):
            for a in objects:
                area: Any = a.get("area")
                if not (_is_finite(area) and area >= 0):
                    size = image["height"], image["width"]
                    area = int(mask_of(a, *size).sum()) if self.has_masks else a["bbox"][2] * a["bbox"][3]
                annotations.append({**a, "id": len(annotations) + 1, "image_id": image["id"], "area": area})
        coco.dataset = {"images": self.images, "annotations": annotations, "categories": self.categories}
        with contextlib.redirect_stdout(io.StringIO()):
            coco.createIndex()
        return coco


def read_json(file: Path) -> dict[str, Any]:
    """The content of an annotation file."""
    if not file.is_file():
        raise FileNotFoundError(f"there is no annotation file {file}")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{file} is not JSON: {error}") from error
    lists = ("images", "annotations", "categories")
    missing = [key for key in lists if not isinstance(content, dict) or not isinstance(content.get(key), list)]
    if missing:
        raise ValueError(f"{file} is not in COCO's instances format: it has no list of {', '.join(missing)}")
    return content


def _categories(content: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    categories = content["categories"]
    good = [isinstance(c, dict) and isinstance(c.get("id"), int) and "name" in c for c in categories]
    if not good or not all(good):
        raise ValueError(f"{file}: a category needs a whole number as id, and a name; got {categories[:3]}")
    if len({c["id"] for c in categories}) != len(categories):
        raise ValueError(f"{file}: two categories have the same id")
    return sorted(categories, key=lambda category: category["id"])


def _images(content: Mapping[str, Any], file: Path, skipped: SkippedRecords) -> list[dict[str, Any]]:
    images: dict[int | str, dict[str, Any]] = {}
    for record in content["images"]:
        height, width = (_whole(record.get(side)) for side in ("height", "width"))
        if record.get("id") is None or not record.get("file_name"):
            skipped["images without an id or a file_name"].append(record.get("id"))
        elif not (height > 0 and width > 0):
            skipped["images without a height and a width"].append(record["id"])
        elif not _is_allowed(height, width):
            skipped["images with too many pixels or too large an aspect ratio"].append(record["id"])
        elif record["id"] in images:
            raise ValueError(f"{file}: two images have the id {record['id']}")
        else:
            images[record["id"]] = {**record, "height": height, "width": width}
    if not images:
        raise ValueError("; ".join([f"{file} has no usable images", *_in_words(skipped)]))
    return list(images.values())


def _checked(
    annotation: dict[str, Any], image: Mapping[str, Any], known: set[int], masks: bool
) -> tuple[str, dict[str, Any]]:
    """(the reason why an annotation is unusable, or ""; the annotation without its broken polygons, or any mask).

    pycocotools does not check its input, and invalid values make it access memory out of bounds.
    """
    if annotation.get("category_id") not in known:
        return "of a category that is not in the file", {}
    annotation = {**annotation, "iscrowd": int(annotation.get("iscrowd") == 1)}
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(_is_finite(x) for x in box):
        return "whose box is not four numbers", {}
    if box[2] <= 0 or box[3] <= 0:
        return "with an empty box", {}
    segmentation = annotation.pop("segmentation", None)
    if not masks:
        return "", annotation
    if isinstance(segmentation, dict):
        size = [image["height"], image["width"]]
        if segmentation.get("size") != size:
            return "whose mask does not have the image's size", {}
        if not _covers(segmentation.get("counts"), math.prod(size)):
            return "whose run-length code does not cover the image exactly", {}
        return "", {**annotation, "segmentation": {**segmentation, "size": size}}  # [80.0, 96.0] is accepted
    # pycocotools takes a polygon of four numbers as a box, and reads past the end of one with an odd number.
    polygons = [p for p in segmentation if _is_polygon(p)] if isinstance(segmentation, list) else []
    if not polygons:
        return "without a mask (--no-masks uses their boxes)", {}
    if not all(_fits(p, image["width"], image["height"]) for p in polygons):
        return "with a polygon far outside the image", {}
    return "", {**annotation, "segmentation": polygons}


def _whole(x: object) -> int:
    """640.0 -> 640, since some tools write sizes as floats; 0 for anything but a whole number."""
    return int(x) if isinstance(x, int | float) and x == x // 1 else 0


def _is_finite(x: object) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)


def _is_allowed(height: int, width: int) -> bool:
    try:
        check_size(width, height)
    except ValueError:
        return False
    return True


def _is_polygon(p: object) -> bool:
    return isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0 and all(_is_finite(x) for x in p)


def _fits(polygon: list[float], width: int, height: int) -> bool:
    """Whether a polygon is within one image size of the image: pycocotools draws all of it, wherever it goes."""
    points, size = np.array(polygon, dtype=float).reshape(-1, 2), (width, height)  # [n, 2]
    return bool(((points >= np.negative(size)) & (points <= np.multiply(2, size))).all())


def _covers(counts: object, pixels: int) -> bool:
    """Whether the lengths of a run-length code, a list or a string, add up to the number of pixels."""
    if isinstance(counts, str):
        counts = run_lengths(counts) if RLE.fullmatch(counts) else []
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
        return False
    return sum(counts) == pixels


def run_lengths(code: str) -> list[int]:
    """Decode the lengths of a compressed run-length code, which must match RLE.

    A number consists of 5-bit digits, the lowest first and the last one signed; from the fourth number on it is the
    difference to the number two places before.
    """
    characters = np.frombuffer(code.encode("ascii"), np.uint8).astype(np.int64) - 48
    is_last = characters < 32
    ends = np.flatnonzero(is_last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    places = np.arange(len(characters)) - np.repeat(starts, ends - starts)
    digits = np.where(is_last & (characters >= 16), characters - 32, characters & 31)
    numbers = np.add.reduceat(digits << 5 * places, starts)
    for first in (1, 2):
        numbers[first::2] = numbers[first::2].cumsum()
    return numbers.tolist()


def corners(box: Sequence[float], width: int, height: int) -> tuple[float, float, float, float]:
    """x, y, width, height -> x0, y0, x1, y1, clamped to the image."""
    x, y, w, h = box
    return max(0.0, x), max(0.0, y), min(float(width), x + w), min(float(height), y + h)


def is_trainable(annotation: Mapping[str, Any], width: int, height: int) -> bool:
    """Whether an annotation is not a crowd, and its box on the image is at least a pixel wide and high."""
    x0, y0, x1, y1 = corners(annotation["bbox"], width, height)
    return not annotation.get("iscrowd") and x1 - x0 >= MIN_SIDE and y1 - y0 >= MIN_SIDE


def mask_of(annotation: Mapping[str, Any], height: int, width: int) -> np.ndarray:
    """Decode polygons or a run-length code to a mask [height, width] of 0 and 1."""
    from pycocotools import mask

    segmentation = annotation["segmentation"]
    if isinstance(segmentation, list):
        code = mask.merge(mask.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        code = mask.frPyObjects(segmentation, height, width)
    else:
        code = segmentation
    return mask.decode(code)


def encode_mask(mask: np.ndarray) -> dict[str, Any]:
    """A mask [height, width] of 0 and 1 as COCO's run-length code."""
    from pycocotools.mask import encode

    code = encode(np.asfortranarray(mask))
    return {"size": list(code["size"]), "counts": code["counts"].decode("ascii")}
