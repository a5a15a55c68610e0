"""Photos and models -> files: one picture a photo, a contact sheet of all, raw arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sima_attn._files import atomic_write
from sima_attn.data.images import check_not_over, open_photo, open_photos, unique_name
from sima_attn.explain.drawing import Tile, effect_overlay, overlay, sheet, shrink
from sima_attn.explain.effects import effect_scores, signed_unit
from sima_attn.explain.maps import raw_scores, spread, to_map
from sima_attn.explain.photo_model import PhotoModel
from sima_attn.explain.reading import PARTS, Reading

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST = 1024  # pixels of a photo that is drawn on
SHEET = "contact_sheet"
COLUMNS = 6
SMALLEST_CELL = 80
EFFECT_CELL = 420
CELL = 240  # pixels of a picture in a sheet; on the contact sheet of all photos three quarters of it


@dataclass(frozen=True)
class Gallery:
    """What to draw: the models side by side, the layers (None: all) and the parts of each.

    Attributes:
        models: One model, or several to compare.
        layers: Their numbers, from 0, or from the end if negative.
        of: "q", "k" or both.
        size: Of the image as a model gets it, in pixels of a square's side; None: as it was trained.
        opacity: Of the map over the photo, in [0, 1].
        cell: Side in pixels of a picture in the sheets.
    """

    models: Sequence[PhotoModel]
    layers: Sequence[int] | None = (-1,)
    of: Sequence[str] = PARTS
    size: int | None = None
    opacity: float = 0.55
    cell: int = CELL

    def __post_init__(self) -> None:
        if not self.of or set(self.of) - set(PARTS):
            raise ValueError(f"a map is of 'q' (queries) or 'k' (keys), got {list(self.of)}")
        if not 0 <= self.opacity <= 1:
            raise ValueError(f"opacity must be from 0 to 1, got {self.opacity}")
        if self.cell < SMALLEST_CELL:
            raise ValueError(f"cell must be {SMALLEST_CELL} px or more, to hold a caption; got {self.cell}")

    def read(self, photo: Image) -> list[Reading]:
        """One forward of each model."""
        return [model.read(photo, self.size) for model in self.models]

    def tiles(self, photo: Image, readings: Sequence[Reading], layers: Sequence[int] | None) -> list[Tile]:
        """A picture for each model, part and layer."""
        found = []
        for letter, reading in zip(_letters(self.models), readings, strict=True):
            for part in self.of:
                for number in range(len(reading.layers)) if layers is None else layers:
                    heat = to_map(reading.layer(number).scores(part), reading.share, (photo.height, photo.width))
                    caption = f"{letter}{part}, layer {number % len(reading.layers) + 1}"
                    found.append(Tile(overlay(photo, heat, self.opacity), caption))
        return found

    def title(self) -> str:
        """The models, and whether they are trained."""
        return _names(self.models)

    def write_one(self, photo: Image, caption: str, path: Path) -> Path:
        """One photo at hand beside its maps, as a picture."""
        photo = shrink(photo, LONGEST)
        tiles = self.tiles(photo, self.read(photo), self.layers)
        return _save(sheet(_lines([Tile(photo, caption), *tiles], COLUMNS), self.title(), self.cell), path)

    def write(
        self,
        photos: Sequence[Path],
        out: Path,
        *,
        raw: bool = False,
        say: Callable[[str], object] = print,
        on_photo: Callable[[Path], object] = lambda path: None,
    ) -> list[Path]:
        """NAME.png for each photo, contact_sheet.png for several, and NAME.npz with the raw scores if asked for.

        The contact sheet shows the chosen layers, or the last one where all were asked for. Of several photos those
        that cannot be read are named by `say` and left out.
        """
        check_not_over(photos, out)
        written, groups = [], []
        stems = [SHEET]  # a photo of that name gets a number
        for path, whole in open_photos(photos, say=say, on_photo=on_photo):
            stem, photo = unique_name(path.stem, stems), shrink(whole, LONGEST)
            readings = self.read(photo)
            original = Tile(photo, path.stem)
            tiles = self.tiles(photo, readings, self.layers)
            if self.layers is None:
                depths = [len(reading.layers) for reading in readings for _ in self.of]
                rows = [[original], *_rows_by_depth(tiles, depths)]
                shown = [original, *self.tiles(photo, readings, (-1,))]
            else:
                rows = _lines([original, *tiles], COLUMNS)
                shown = [original, *tiles]
            groups.append([Tile(shrink(tile.picture, self.cell), tile.caption) for tile in shown])  # all are kept
            written.append(_save(sheet(rows, self.title(), self.cell), out / f"{stem}.png"))
            if raw:
                written.append(self._write_raw(readings, out / f"{stem}.npz"))
        if len(groups) > 1:
            together = max(1, COLUMNS // len(groups[0]))  # photos in one line of the sheet
            lines = [[*chain(*groups[i : i + together])] for i in range(0, len(groups), together)]
            written.append(_save(sheet(lines, self.title(), 3 * self.cell // 4), out / f"{SHEET}.png"))
        return written

    def _write_raw(self, readings: Sequence[Reading], path: Path) -> Path:
        arrays: dict[str, np.ndarray] = {}
        names: list[str] = []
        for model, reading in zip(self.models, readings, strict=True):
            layers = range(len(reading.layers)) if self.layers is None else self.layers
            prefix = f"{unique_name(model.name, names)}." if len(self.models) > 1 else ""
            arrays |= {prefix + key: value for key, value in raw_scores(reading, layers, self.of).items()}
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        return path


def write_effect(
    models: Sequence[PhotoModel],
    path: Path,
    out: Path,
    *,
    patch: tuple[int, int],
    layer: int,
    size: int | None = None,
    cell: int = EFFECT_CELL,
) -> Path:
    """A picture of what one patch takes from all others in each model: red adds, blue takes away."""
    if out.resolve() == path.resolve():
        raise ValueError(f"the picture would be written over the photo {path}; give another --out")
    photo = shrink(open_photo(path), LONGEST)
    tiles = [Tile(photo, path.stem)]
    first = None
    for letter, model in zip(_letters(models), models, strict=True):
        reading = model.read(photo, size)
        seen = reading.layer(layer)
        first = first or seen.q_grid  # the patch is one of this grid; of another grid, the one that lies there
        place = (_moved(patch[0], first[0], seen.q_grid[0]), _moved(patch[1], first[1], seen.q_grid[1]))
        scores = effect_scores(seen, place)
        signed = signed_unit(spread(scores[None], reading.share, (photo.height, photo.width)))
        grid = (seen.q_grid[0] * reading.share[0], seen.q_grid[1] * reading.share[1])
        negative = float((scores < 0).float().mean())
        caption = f"{letter}layer {layer % len(reading.layers) + 1}, {negative:.0%} negative"
        tiles.append(Tile(effect_overlay(photo, signed, place, grid), caption))
    return _save(sheet([tiles], f"what patch {patch[0]}, {patch[1]} takes: {_names(models)}", cell), out)


def read_photos(
    model: PhotoModel,
    photos: Sequence[Path],
    size: int | None = None,
    *,
    say: Callable[[str], object] = print,
    on_photo: Callable[[Path], object] = lambda path: None,
) -> list[Reading]:
    """A reading of each photo; those of several that cannot be read are named by `say` and left out."""
    return [model.read(photo, size) for _, photo in open_photos(photos, say=say, on_photo=on_photo)]


def _moved(index: int, count: int, other: int) -> int:
    """The place among `other` that lies where `index` lies among `count`."""
    return index if other == count else math.floor((index + 0.5) * other / count)


def _letters(models: Sequence[PhotoModel]) -> list[str]:
    """What stands for each model in captions; nothing where there is only one."""
    return [f"{chr(ord('A') + i)}: " for i in range(len(models))] if len(models) > 1 else [""]


def _names(models: Sequence[PhotoModel]) -> str:
    """The models with their letters, and which of them are not trained."""
    return ",  ".join(
        letter + model.name + ("" if model.trained else " (untrained)")
        for letter, model in zip(_letters(models), models, strict=True)
    )


def _rows_by_depth(tiles: Sequence[Tile], depths: Sequence[int]) -> list[list[Tile]]:
    """The tiles of each part and model on lines of their own, about equally long."""
    rows, start = [], 0
    for depth in depths:
        lines = math.ceil(depth / COLUMNS)
        rows += _lines(tiles[start : start + depth], math.ceil(depth / lines))
        start += depth
    return rows


def _lines(tiles: Sequence[Tile], count: int) -> list[list[Tile]]:
    return [list(tiles[i : i + count]) for i in range(0, len(tiles), count)]


def _save(picture: Image, path: Path) -> Path:
    with atomic_write(path) as temporary:
        picture.save(temporary, format="PNG")
    return path
