"""Detect objects on photos; write pictures with boxes and masks, and JSON.

Shapes: n detections; boxes (x0, y0, x1, y1) in pixels of the photo.
"""

from __future__ import annotations

import colorsys
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from sima_attn._files import atomic_write
from sima_attn.data.images import check_not_over, open_photos, to_rgb, unique_name
from sima_attn.detect.coco import encode_mask
from sima_attn.detect.rcnn import SimaRCNN
from sima_attn.detect.weights import LoadedDetector

Rectangle = tuple[float, float, float, float]
MASK_OPACITY = 115  # of 255
GOLDEN_RATIO = 0.618033988749895  # of a full turn: consecutive labels get clearly different hues


class Detections(NamedTuple):
    """The objects on a photo, best first.

    Attributes:
        boxes: [n, 4].
        labels: [n], from 1.
        scores: [n].
        masks: Bool [n, height, width], at the size of the photo, or smaller for a large photo, see `mask_at`; None of
            a detector without masks.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor | None

    def mask_at(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """The mask of one object at the size (width, height) of the photo, bool [height, width]."""
        assert self.masks is not None
        mask = Image.fromarray(self.masks[i].numpy().astype(np.uint8) * 255)
        return np.asarray(mask.resize(size, Image.Resampling.BILINEAR)) > 127


@torch.no_grad()
def detect(model: SimaRCNN, image: Image.Image, threshold: float = 0.5) -> Detections:
    """The objects on a photo with a score of at least `threshold`.

    A photo at least twice as large as the detector's input is reduced first. Without that, the masks of a photo of
    12 megapixels would take 48 MB per object.
    """
    factor = max(1, max(image.size) // model.transform.max_size)
    reduced = ImageOps.scale(to_rgb(image), 1 / factor, Image.Resampling.BOX)
    device = next(model.parameters()).device
    found = model([pil_to_tensor(reduced).to(device).float() / 255])[0]
    kept = found["scores"] >= threshold
    boxes, labels, scores = (found[name][kept].cpu() for name in ("boxes", "labels", "scores"))
    masks = (found["masks"][kept, 0] > 0.5).cpu() if model.has_masks else None
    scale = torch.tensor([image.width / reduced.width, image.height / reduced.height]).repeat(2)
    return Detections(boxes * scale, labels, scores, masks)


def draw(image: Image.Image, found: Detections, classes: Sequence[str]) -> Image.Image:
    """A copy of the photo with masks, boxes, class names and scores; one colour per class.

    torchvision's drawing functions are not used: their captions have a fixed size of 10 pixels and overlap, and
    pixels of overlapping masks turn black.
    """
    picture = to_rgb(image)
    sides = found.boxes[:, 2:] - found.boxes[:, :2]
    by_size = sides.prod(dim=1).argsort(descending=True).tolist()  # small objects last, on top of large ones
    for i in by_size if found.masks is not None else ():
        mask = found.mask_at(i, picture.size).astype(np.uint8) * MASK_OPACITY
        picture.paste(colour(int(found.labels[i])), mask=Image.fromarray(mask))
    pen = ImageDraw.Draw(picture)
    unit = max(1, round(min(picture.size) / 300))
    for i in by_size:
        pen.rectangle(tuple(found.boxes[i].tolist()), outline=colour(int(found.labels[i])), width=unit)
    font = ImageFont.load_default(size=max(11, round(min(picture.size) / 32)))
    captions: list[Rectangle] = []
    for box, label, score in zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), strict=True):
        text = f"{classes[label - 1]} {score:.0%}"
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        size = (right - left + 4 * unit, bottom - top + 4 * unit)
        caption = place_caption(box, size, picture.size, captions)
        captions.append(caption)
        pen.rectangle(caption, fill=colour(label))
        place = (caption[0] + 2 * unit - left, caption[1] + 2 * unit - top)
        pen.text(place, text, fill=text_colour(colour(label)), font=font)
    return picture


def place_caption(
    box: Sequence[float], size: tuple[float, float], picture: tuple[int, int], others: Sequence[Rectangle]
) -> Rectangle:
    """The place of a caption: above, inside or below its box, inside the picture, not over other captions."""
    width, height = size
    x = min(max(box[0], 0), max(picture[0] - width, 0))
    places = [(x, y, x + width, y + height) for y in (box[1] - height, box[1], box[3], box[3] - height)]
    places = [place for place in places if place[1] >= 0 and place[3] <= picture[1]]
    free = [place for place in places if not any(overlap(place, other) for other in others)]
    return next(iter(free or places), (x, 0, x + width, height))


def overlap(a: Rectangle, b: Rectangle) -> bool:
    """Whether the interiors of two rectangles intersect."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def text_colour(background: tuple[int, int, int]) -> tuple[int, int, int]:
    """Black on bright colours, white on dark ones."""
    red, green, blue = background
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)


def colour(label: int) -> tuple[int, int, int]:
    """A bright colour, clearly different from those of the neighbouring labels."""
    red, green, blue = colorsys.hsv_to_rgb(label * GOLDEN_RATIO % 1, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def as_json(path: Path, image: Image.Image, found: Detections, classes: Sequence[str]) -> dict[str, Any]:
    """The detections on a photo as plain values, with masks, if there are any, as COCO's run-length codes."""
    rows = zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), strict=True)
    objects: list[dict[str, Any]] = [
        {
            "class": classes[label - 1],
            "score": round(score, 4),
            "box": [round(x, 1) for x in box],  # x0, y0, x1, y1
        }
        for box, label, score in rows
    ]
    for i, one in enumerate(objects if found.masks is not None else ()):
        one["mask"] = encode_mask(found.mask_at(i, image.size).astype(np.uint8))
    return {"photo": str(path), "width": image.width, "height": image.height, "objects": objects}


def predict_photos(
    loaded: LoadedDetector,
    photos: Sequence[Path],
    out: Path,
    *,
    threshold: float = 0.5,
    say: Callable[[str], object] = print,
    on_photo: Callable[[Path], object] = lambda path: None,
) -> list[dict[str, Any]]:
    """Write each photo with its detections to `out`/NAME.png, and all detections to `out`/detections.json.

    Unreadable photos among several are reported by `say` and skipped. Returns the content of detections.json.
    """
    check_not_over(photos, out)
    names: list[str] = []
    entries = []
    for photo, image in open_photos(photos, say=say, on_photo=on_photo):
        found = detect(loaded.model, image, threshold)
        name = unique_name(photo.stem, names)
        with atomic_write(out / f"{name}.png") as temporary:
            draw(image, found, loaded.classes).save(temporary, format="PNG")
        entries.append({**as_json(photo, image, found, loaded.classes), "picture": f"{name}.png"})
    with atomic_write(out / "detections.json") as temporary:
        temporary.write_text(json.dumps(entries, indent=1))
    return entries
