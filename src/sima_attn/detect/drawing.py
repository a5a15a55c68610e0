"""Objects drawn on an image: masks, boxes and captions, one color per class.

torchvision's drawing functions are not used: their captions have a fixed size of 10 pixels and overlap, and pixels of
overlapping masks turn black.

Shapes: n objects; boxes (x0, y0, x1, y1) in pixels of the image.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from sima_attn.data.images import to_rgb
from sima_attn.report.captions import draw_text, text_height, text_width

Rectangle = tuple[float, float, float, float]
MASK_OPACITY = 115  # of 255
GOLDEN_RATIO = 0.618033988749895  # of a full turn: consecutive labels get clearly different hues


def draw_objects(
    image: Image.Image, boxes: Tensor, labels: Tensor, captions: Sequence[str], masks: Tensor | None = None
) -> Image.Image:
    """A copy of the image with boxes [n, 4], captions, and masks [n, height, width] if there are any.

    Masks may be smaller than the image. Small objects are drawn on top of large ones.
    """
    picture = to_rgb(image)
    by_size = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).argsort(descending=True).tolist()
    colors = [color(label) for label in labels.tolist()]
    if masks is not None:
        for i in by_size:
            mask = resized_mask(masks[i], picture.size).astype(np.uint8) * MASK_OPACITY
            picture.paste(colors[i], mask=Image.fromarray(mask))
    pen = ImageDraw.Draw(picture)
    unit = max(1, round(min(picture.size) / 300))
    for i in by_size:
        pen.rectangle(tuple(boxes[i].tolist()), outline=colors[i], width=unit)
    size = max(11, round(min(picture.size) / 32))  # of the font
    placed: list[Rectangle] = []
    for box, ink, text in zip(boxes.tolist(), colors, captions, strict=True):
        plate = (text_width(text, size) + 4 * unit, text_height(size) + 2 * unit)
        place = place_caption(box, plate, picture.size, placed)
        placed.append(place)
        pen.rectangle(place, fill=ink)
        draw_text(pen, (place[0] + 2 * unit, place[1] + unit), text, size, text_color(ink))
    return picture


def resized_mask(mask: Tensor, size: tuple[int, int]) -> np.ndarray:
    """A bool mask at another size (width, height), bool [height, width]."""
    pixels = Image.fromarray(mask.numpy().astype(np.uint8) * 255)
    return np.asarray(pixels.resize(size, Image.Resampling.BILINEAR)) > 127


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


def text_color(background: tuple[int, int, int]) -> tuple[int, int, int]:
    """Black on bright colors, white on dark ones."""
    red, green, blue = background
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)


def color(label: int) -> tuple[int, int, int]:
    """A bright color, clearly different from those of the neighboring labels."""
    red, green, blue = colorsys.hsv_to_rgb(label * GOLDEN_RATIO % 1, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
