"""Photos and models -> files: one picture per photo, a contact sheet, raw arrays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from PIL.Image import Image

from sima_attn._files import atomic_write
from sima_attn.data.images import check_not_over, open_photo, open_photos, unique_name
from sima_attn.explain.effects import effect_scores, signed_unit
from sima_attn.explain.maps import spread, to_map
from sima_attn.explain.photo_model import PhotoModel
from sima_attn.explain.reading import PARTS, Reading
from sima_attn.report.drawing import Tile, effect_overlay, overlay, sheet, shrink

LONGEST = 1024  # pixels of a drawn photo
SHEET = "contact_sheet"
COLUMNS = 6
EFFECT_CELL = 420
CELL = 240  # pixels of a picture in a sheet; three quarters of it in the contact sheet


@dataclass(frozen=True)
class Gallery:
    """Maps to draw: models, layers and parts.

    Attributes:
        models: One model, or several to compare.
        layers: Indices from 0, or from the end if negative; None for all.
        of: "q", "k" or both.
        size: Size in pixels of the model's square input; None for the training size.
        opacity: Opacity of the map over the photo, in [0, 1].
        cell: Size in pixels of a picture in the sheets.
    """

    models: Sequence[PhotoModel]
    layers: Sequence[int] | None = (-1,)
    of: Sequence[str] = PARTS
    size: int | None = None
    opacity: float = 0.55
    cell: int = CELL

    def __post_init__(self) -> None:
        if not self.of or set(self.of) - set(PARTS):
            raise ValueError(f"of must be 'q' (queries), 'k' (keys) or both, got {list(self.of)}")

    def read(self, photo: Image) -> list[Reading]:
        """One forward pass of each model."""
        return [model.read(photo, self.size) for model in self.models]

    def tiles(self, photo: Image, readings: Sequence[Reading], layers: Sequence[int] | None) -> list[Tile]:
        """One picture per model, part and layer."""
        found = []
        for letter, reading in zip(_letters(self.models), readings, strict=True):
            for part in self.of:
                for number in range(len(reading.layers)) if layers is None else layers:
                    heat = to_map(reading.layer(number).scores(part), reading.share, (photo.height, photo.width))
                    caption = f"{letter}{part}, layer {number % len(reading.layers) + 1}"
                    found.append(Tile(overlay(photo, heat, self.opacity), caption))
        return found

    def write_one(self, photo: Image, caption: str, path: Path) -> Path:
        """Write one photo and its maps as a picture."""
        photo = shrink(photo, LONGEST)
        readings = self.read(photo)
        rows = self._rows(Tile(photo, caption), self.tiles(photo, readings, self.layers), readings)
        return _save(sheet(rows, _names(self.models), self.cell), path)

    def write(
        self,
        photos: Sequence[Path],
        out: Path,
        *,
        raw: bool = False,
        say: Callable[[str], object] = print,
        on_photo: Callable[[Path], object] = lambda path: None,
    ) -> list[Path]:
        """Write NAME.png for each photo, contact_sheet.png for several, and with `raw` NAME.npz with the raw scores.

        The contact sheet shows the selected layers, or the last one if all are selected. With several photos,
        unreadable ones are reported through `say` and skipped.
        """
        check_not_over(photos, out)
        written, groups = [], []
        stems = [SHEET]  # a photo with that name gets a number
        for path, whole in open_photos(photos, say=say, on_photo=on_photo):
            stem, photo = unique_name(path.stem, stems), shrink(whole, LONGEST)
            readings = self.read(photo)
            original = Tile(photo, path.stem)
            tiles = self.tiles(photo, readings, self.layers)
            rows = self._rows(original, tiles, readings)
            shown = [original, *(self.tiles(photo, readings, (-1,)) if self.layers is None else tiles)]
            # Shrunk, since those of all photos stay in memory.
            groups.append([Tile(shrink(tile.picture, self.cell), tile.caption) for tile in shown])
            written.append(_save(sheet(rows, _names(self.models), self.cell), out / f"{stem}.png"))
            if raw:
                written.append(self._write_raw(readings, out / f"{stem}.npz"))
        if len(groups) > 1:
            together = max(1, COLUMNS // len(groups[0]))  # photos per line of the sheet
            lines = [[*chain(*groups[i : i + together])] for i in range(0, len(groups), together)]
            written.append(_save(sheet(lines, _names(self.models), 3 * self.cell // 4), out / f"{SHEET}.png"))
        return written

    def _rows(self, original: Tile, tiles: Sequence[Tile], readings: Sequence[Reading]) -> list[list[Tile]]:
        """The picture of one photo: its maps in lines, those of all layers by part and model."""
        if self.layers is not None:
            return _lines([original, *tiles], COLUMNS)
        depths = [len(reading.layers) for reading in readings for _ in self.of]
        return [[original], *_rows_by_depth(tiles, depths)]

    def _write_raw(self, readings: Sequence[Reading], path: Path) -> Path:
        """Token scores [rows, columns] by "PATH.q" and "PATH.k", neither scaled nor resized."""
        arrays: dict[str, np.ndarray] = {}
        names: list[str] = []
        for model, reading in zip(self.models, readings, strict=True):
            layers = range(len(reading.layers)) if self.layers is None else self.layers
            prefix = f"{unique_name(model.name, names)}." if len(self.models) > 1 else ""
            for layer in (reading.layer(index) for index in layers):
                arrays |= {f"{prefix}{layer.path}.{part}": layer.scores(part)[0].cpu().numpy() for part in self.of}
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
    """Write a picture of the contributions of all patches to one patch: red is positive, blue negative."""
    check_not_over([path], out)
    photo = shrink(open_photo(path), LONGEST)
    tiles = [Tile(photo, path.stem)]
    first = None
    for letter, model in zip(_letters(models), models, strict=True):
        reading = model.read(photo, size)
        seen = reading.layer(layer)
        first = first or seen.q_grid  # `patch` is on this grid; on other grids, the one at the same place
        place = (_moved(patch[0], first[0], seen.q_grid[0]), _moved(patch[1], first[1], seen.q_grid[1]))
        scores = effect_scores(seen, place)
        signed = signed_unit(spread(scores[None], reading.share, (photo.height, photo.width)))
        grid = (seen.q_grid[0] * reading.share[0], seen.q_grid[1] * reading.share[1])
        negative = float((scores < 0).float().mean())
        caption = f"{letter}layer {layer % len(reading.layers) + 1}, {negative:.0%} negative"
        tiles.append(Tile(effect_overlay(photo, signed, place, grid), caption))
    return _save(sheet([tiles], f"contributions to patch {patch[0]}, {patch[1]}: {_names(models)}", cell), out)


def _moved(index: int, count: int, other: int) -> int:
    """The index in a grid of `other` cells at the position of `index` in a grid of `count` cells."""
    return index if other == count else math.floor((index + 0.5) * other / count)


def _letters(models: Sequence[PhotoModel]) -> list[str]:
    """Prefix of each model in captions; empty if there is only one."""
    return [f"{chr(ord('A') + i)}: " for i in range(len(models))] if len(models) > 1 else [""]


def _names(models: Sequence[PhotoModel]) -> str:
    """The models with their prefixes, and which of them are not trained."""
    return ",  ".join(
        letter + model.name + ("" if model.trained else " (untrained)")
        for letter, model in zip(_letters(models), models, strict=True)
    )


def _rows_by_depth(tiles: Sequence[Tile], depths: Sequence[int]) -> list[list[Tile]]:
    """The tiles of each part and model on separate lines of about equal length."""
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
