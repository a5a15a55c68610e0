"""Photos -> detections, as pictures and json.

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
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sima_attn._files import atomic_write
from sima_attn.data.images import check_not_over, open_photos, to_rgb, unique_name
from sima_attn.detect.mask_rcnn import SimaMaskRCNN
from sima_attn.detect.weights import LoadedDetector

Rectangle = tuple[float, float, float, float]
GOLDEN = 0.618033988749895  # of a turn: hues of neighbouring labels lie far apart


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB image as bytes [3, height, width]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


class Detected(NamedTuple):
    """What was found on a photo, best first: boxes [n, 4], labels [n] from 1, scores [n], masks [n, height, width]."""

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor


@torch.no_grad()
def detect(model: SimaMaskRCNN, image: Image.Image, threshold: float = 0.5) -> Detected:
    """Objects on a photo whose score is not below the threshold; masks are True and False."""
    device = next(model.parameters()).device
    found = model([to_tensor(to_rgb(image)).to(device).float() / 255])[0]
    kept = found["scores"] >= threshold
    masks = found["masks"][kept, 0] > 0.5
    return Detected(*(x.cpu() for x in (found["boxes"][kept], found["labels"][kept], found["scores"][kept], masks)))


def draw(image: Image.Image, found: Detected, classes: Sequence[str]) -> Image.Image:
    """The photo with masks, boxes, class names and scores; one colour a class."""
    pixels = np.array(to_rgb(image)).astype(np.float32)
    sides = found.boxes[:, 2:] - found.boxes[:, :2]
    by_size = sides.prod(dim=1).argsort(descending=True).tolist()  # the small ones last, on top of the large
    for i in by_size:
        mask = found.masks[i].numpy()
        pixels[mask] = 0.55 * pixels[mask] + 0.45 * np.array(colour(int(found.labels[i])))
    picture = Image.fromarray(pixels.round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    unit = max(1, round(min(picture.size) / 300))
    for i in by_size:
        pen.rectangle(tuple(found.boxes[i].tolist()), outline=colour(int(found.labels[i])), width=unit)
    font = ImageFont.load_default(size=max(11, round(min(picture.size) / 32)))
    placed: list[Rectangle] = []
    for i, (label, score) in enumerate(zip(found.labels.tolist(), found.scores.tolist(), strict=True)):
        text = f"{classes[label - 1]} {score:.0%}"
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        size = (right - left + 4 * unit, bottom - top + 4 * unit)
        spot = label_place(found.boxes[i].tolist(), size, picture.size, placed)
        placed.append(spot)
        shade = colour(label)
        pen.rectangle(spot, fill=shade)
        pen.text((spot[0] + 2 * unit - left, spot[1] + 2 * unit - top), text, fill=ink_on(shade), font=font)
    return picture


def label_place(
    box: Sequence[float], size: tuple[float, float], picture: tuple[int, int], placed: Sequence[Rectangle]
) -> Rectangle:
    """Where a label goes: above its box, inside it or below it, on the picture, and clear of those placed before."""
    wide, high = size
    x = min(max(box[0], 0), max(picture[0] - wide, 0))
    places = [(x, y, x + wide, y + high) for y in (box[1] - high, box[1], box[3], box[3] - high)]
    places = [place for place in places if place[1] >= 0 and place[3] <= picture[1]]
    clear = [place for place in places if not any(overlap(place, other) for other in placed)]
    return next(iter(clear or places), (x, 0, x + wide, high))


def overlap(a: Rectangle, b: Rectangle) -> bool:
    """Whether two rectangles share a point inside."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def ink_on(shade: tuple[int, int, int]) -> tuple[int, int, int]:
    """Black on bright colours, white on dark ones."""
    red, green, blue = shade
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)


def colour(label: int) -> tuple[int, int, int]:
    """A bright colour, unique_name those of the labels before it."""
    red, green, blue = colorsys.hsv_to_rgb(label * GOLDEN % 1, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def as_json(path: Path, image: Image.Image, found: Detected, classes: Sequence[str]) -> dict[str, Any]:
    """Detections of a photo as plain values; masks as COCO's run-length codes."""
    from pycocotools import mask

    rows = zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), found.masks.numpy(), strict=True)
    objects = []
    for box, label, score, pixels in rows:
        code = mask.encode(np.asfortranarray(pixels.astype(np.uint8)))
        objects.append(
            {
                "class": classes[label - 1],
                "score": round(score, 4),
                "box": [round(x, 1) for x in box],  # x0, y0, x1, y1
                "mask": {"size": list(code["size"]), "counts": code["counts"].decode("ascii")},
            }
        )
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
    """Draw each photo into `out`/NAME.png, and all detections into `out`/detections.json; both come back as json.

    Of several photos those that cannot be read are named by `say` and left out.
    """
    check_not_over(photos, out)
    names: list[str] = []
    told = []
    for photo, image in open_photos(photos, say=say, on_photo=on_photo):
        found = detect(loaded.model, image, threshold)
        name = unique_name(photo.stem, names)
        with atomic_write(out / f"{name}.png") as temporary:
            draw(image, found, loaded.classes).save(temporary, format="PNG")
        told.append({**as_json(photo, image, found, loaded.classes), "picture": f"{name}.png"})
    with atomic_write(out / "detections.json") as temporary:
        temporary.write_text(json.dumps(told, indent=1))
    return told
