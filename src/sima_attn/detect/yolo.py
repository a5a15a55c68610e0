"""YOLO labels -> the content of a COCO file.

A data.yaml, as ultralytics and Roboflow write it, names the classes and the images of each split. The labels of
images/NAME.jpg are in labels/NAME.txt: one object per row, its class and its box (x, y of the center, width, height) or
its polygon (x, y of three or more points), as parts of the image's width and height.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sima_attn.data.images import images_in, upright_size
from sima_attn.data.splits import SPLITS
from sima_attn.detect.coco import SkippedRecords

SLACK = 0.01  # by which coordinates may be outside the image; as in ultralytics
# Appended to the error where there are no val images.
WITHOUT_VAL = "; `sima detect train --set data.eval_split=train` evaluates on the training images"
NO_ROW = "rows that are neither a class and a box nor a class and a polygon, in parts of the image"


def find_yaml(root: Path) -> Path | None:
    """The file in a folder that describes YOLO labels: *.yaml with names; None without one."""
    found = [file for file in sorted([*root.glob("*.yaml"), *root.glob("*.yml")]) if "names" in _content(file)]
    if len(found) > 1:
        listed = ", ".join(file.name for file in found)
        raise ValueError(f"{root} has several files that describe YOLO labels: {listed}. Move all but one elsewhere")
    return found[0] if found else None


def read_yolo(
    file: Path, split: str, on_step: Callable[[int, int], None]
) -> tuple[dict[str, Any], Path, SkippedRecords]:
    """(the images, annotations and categories of a split, the folder of the images, skipped records)."""
    settings = _content(file)
    if "kpt_shape" in settings:
        raise ValueError(f"{file} describes keypoints (kpt_shape); boxes and polygons are supported")
    categories = _categories(settings["names"], file)
    paths = image_files(file, split)
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    skipped = SkippedRecords(list)
    for done, path in enumerate(paths, start=1):
        try:
            width, height = upright_size(path)
        except Exception:  # decoders raise anything on broken data
            skipped["images that cannot be read"].append(path.name)
            continue
        image_id = len(images) + 1
        images.append({"id": image_id, "file_name": str(path.relative_to(folder)), "width": width, "height": height})
        labels = labels_of(path)
        rows = labels.read_text().splitlines() if labels.is_file() else []  # no file: no objects
        for number, row in enumerate(rows, start=1):
            if not row.strip():
                continue
            place = f"{labels.name}:{number}"
            annotation = parse_row(row, width, height)
            if annotation is None:
                skipped[NO_ROW].append(place)
            else:
                annotations.append({"id": place, "image_id": image_id, **annotation})
        on_step(done, len(paths))
    if paths and not annotations and not skipped:
        raise ValueError(f"the images of {split!r} in {file} have no labels; expected e.g. {labels_of(paths[0])}")
    return {"images": images, "annotations": annotations, "categories": categories}, folder, skipped


def labels_of(image: Path) -> Path:
    """The file with the labels of an image: the last images/ in its path becomes labels/; else beside the image."""
    parts = list(image.parts)
    if "images" in parts[:-1]:
        last = len(parts) - 2 - parts[-2::-1].index("images")
        parts[last] = "labels"
    return Path(*parts).with_suffix(".txt")


def parse_row(row: str, width: int, height: int) -> dict[str, Any] | None:
    """Category, box and, for a polygon, segmentation in pixels; None if the row is neither a box nor a polygon."""
    try:
        label, *numbers = (float(word) for word in row.split())
    except ValueError:
        return None
    is_inside = all(-SLACK <= x <= 1 + SLACK for x in numbers)  # also False for NaN
    if len(numbers) < 4 or len(numbers) % 2 or not is_inside or not math.isfinite(label) or label % 1:
        return None
    if len(numbers) == 4:
        x, y, w, h = numbers
        return {"category_id": int(label), "bbox": [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]}
    xs, ys = [x * width for x in numbers[::2]], [y * height for y in numbers[1::2]]
    polygon = [value for point in zip(xs, ys, strict=True) for value in point]
    box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
    return {"category_id": int(label), "bbox": box, "segmentation": [polygon]}


def _content(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    return content if isinstance(content, dict) else {}


def _categories(names: Any, file: Path) -> list[dict[str, Any]]:
    """Classes in YAML are a list, or a mapping from numbers."""
    numbered = dict(enumerate(names)) if isinstance(names, list) else names
    if not isinstance(numbered, dict) or not numbered or not all(isinstance(number, int) for number in numbered):
        raise ValueError(f"{file}: names must be a list, or a mapping from numbers to names, got {names!r:.200}")
    return [{"id": number, "name": str(name)} for number, name in numbered.items()]


def image_files(file: Path, split: str) -> list[Path]:
    """The images of a split: one or several folders, or text files with one path per line."""
    settings = _content(file)
    given = next((settings[word] for word in SPLITS.get(split, (split,)) if settings.get(word)), None)
    if given is None:
        hint = WITHOUT_VAL if split == "val" else ""
        raise ValueError(f"{file} has no images for the split {split!r}; its entries: {', '.join(settings)}{hint}")
    paths: list[Path] = []
    for entry in given if isinstance(given, list) else [given]:
        place = _resolved(str(entry), settings.get("path"), file)
        if place.is_dir():
            paths += images_in(place, deep=True)
        else:
            paths += [place.parent / line.strip() for line in place.read_text().splitlines() if line.strip()]
    if not paths:
        raise ValueError(f"{file}: there are no images in {given}")
    return paths


def _resolved(entry: str, base: str | None, file: Path) -> Path:
    """A path in the YAML: from `path`, or from the file's folder, where Roboflow's ../train/images is train/images."""
    tried = [file.parent / (base or "") / entry, file.parent / entry, file.parent / entry.removeprefix("../")]
    found = {path.resolve(): path for path in tried if path.exists()}
    if len(found) != 1:
        listed = ", ".join(map(str, found.values() if found else dict.fromkeys(tried)))
        problem = "could be any of" if found else "does not exist; looked for"
        raise ValueError(f"{file}: {entry} {problem} {listed}. Correct the path")
    return next(iter(found.values()))
