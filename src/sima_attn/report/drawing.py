"""Maps -> pictures: a map over its photo, and sheets of pictures with captions."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from sima_attn.report.captions import draw_text, shorten, text_width

# Colors at equal steps. Heat: 0 to 1; effect: -1 (negative, blue) over 0 (white) to 1 (positive, red).
HEAT = np.array([[20, 24, 110], [20, 110, 220], [60, 200, 170], [250, 220, 60], [230, 40, 30]], dtype=np.float32)
EFFECT = np.array([[20, 60, 200], [245, 245, 245], [210, 30, 30]], dtype=np.float32)
GAP, MARGIN, TEXT, TITLE = 10, 16, 15, 20
INK, PAPER, FRAME = (40, 40, 40), (255, 255, 255), (20, 20, 20)


class Tile(NamedTuple):
    """A picture and its caption, of one or more lines."""

    picture: Image.Image
    caption: str


def color(values: np.ndarray, ramp: np.ndarray) -> np.ndarray:
    """Values in [0, 1], any shape -> colors of the ramp [..., 3], floats up to 255."""
    places = np.clip(values, 0, 1) * (len(ramp) - 1)
    steps = np.arange(len(ramp))
    return np.stack([np.interp(places, steps, ramp[:, c]) for c in range(3)], axis=-1)


def overlay(photo: Image.Image, heat: np.ndarray, opacity: float = 0.55) -> Image.Image:
    """A photo with its heat map [height, width] in [0, 1] on top."""
    return _blend(photo, color(heat, HEAT), np.full(heat.shape, opacity))


def effect_overlay(
    photo: Image.Image, signed: np.ndarray, patch: tuple[int, int], grid: tuple[float, float]
) -> Image.Image:
    """A gray photo with an effect map in [-1, 1] on top; the selected patch is framed."""
    gray = photo.convert("L").convert("RGB")
    picture = _blend(gray, color((signed + 1) / 2, EFFECT), 0.75 * np.sqrt(np.abs(signed)))
    width, height = photo.size
    (row, column), (rows, columns) = patch, grid
    box = [column * width / columns, row * height / rows, (column + 1) * width / columns, (row + 1) * height / rows]
    line = max(1, min(width, height) // 150)
    draw = ImageDraw.Draw(picture)
    draw.rectangle(box, outline=(255, 255, 255), width=2 * line)
    draw.rectangle(box, outline=FRAME, width=line)
    return picture


def _blend(photo: Image.Image, colors: np.ndarray, opacity: np.ndarray) -> Image.Image:
    pixels = np.asarray(photo.convert("RGB"), dtype=np.float32)
    mixed = pixels * (1 - opacity[..., None]) + colors * opacity[..., None]
    return Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))


def shrink(photo: Image.Image, longest: int) -> Image.Image:
    """The photo with its longer side at most `longest` pixels."""
    return photo if max(photo.size) <= longest else _fit(photo, longest)


def sheet(rows: Sequence[Sequence[Tile]], title: str = "", cell: int = 240) -> Image.Image:
    """Rows of tiles with captions; pictures are scaled to square cells, rows have the height of their pictures."""
    line = TEXT + 8
    fitted = [[Tile(_fit(tile.picture, cell), tile.caption) for tile in row] for row in rows]
    texts = [line * max(tile.caption.count("\n") + 1 for tile in row) for row in fitted]
    heights = [max(tile.picture.height for tile in row) for row in fitted]
    columns = max(map(len, fitted))
    top = MARGIN + (TITLE + 2 * GAP if title else 0)
    width = max(2 * MARGIN + columns * cell + (columns - 1) * GAP, 2 * MARGIN + round(text_width(title, TITLE)))
    height = top + sum(heights) + sum(texts) + (len(rows) - 1) * GAP + MARGIN
    page = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(page)
    if title:
        draw_text(draw, (MARGIN, MARGIN), title, TITLE, INK)
    y = top
    for row, height, below in zip(fitted, heights, texts, strict=True):
        for column, (picture, caption) in enumerate(row):
            x = MARGIN + column * (cell + GAP)
            page.paste(picture, (x + (cell - picture.width) // 2, y + height - picture.height))
            for number, words in enumerate(caption.split("\n")):
                text = shorten(words, TEXT, cell)
                place = (x + (cell - text_width(text, TEXT)) / 2, y + height + number * line + 3)
                draw_text(draw, place, text, TEXT, INK)
        y += height + below + GAP
    return page


def _fit(picture: Image.Image, cell: int) -> Image.Image:
    scale = cell / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.BICUBIC)
