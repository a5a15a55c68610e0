"""An image of any format -> any rectangle of it as 8-bit RGB, with the pixel values of `data.images.read_image`.

TIFF with tiles or without compression, zarr and .npy are read in place. What can only be decoded as a whole (photos,
strips) is decoded once, into a file in the folder of the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sima_attn._errors import check_installed, first_line
from sima_attn._files import disk_full_reason
from sima_attn.data.images import make_upright, to_bytes, to_rgb
from sima_attn.gigapixel.stores import FileArray, free_memory
from sima_attn.gigapixel.tiles import Tile

IN_MEMORY = 32 * 2**20  # bytes: smaller images are decoded into memory
BAND = 2**24  # pixels that are decoded or looked at together
MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # TIFF and BigTIFF
SINGLE = "TZUVWPQR"  # names of axes of length 1, such as time and depth
ZARR = ("zarr.json", ".zarray", ".zgroup")
OnBand = Callable[[int, int], object]  # (rows done, all rows)


class Source(ABC):
    """An image whose pixels are read by rectangles.

    Attributes:
        size: Height and width in pixels.
    """

    size: tuple[int, int]

    @abstractmethod
    def read(self, tile: Tile) -> np.ndarray:
        """A rectangle in pixels -> [height, width, 3], uint8."""


class ArraySource(Source):
    """An array in any of the usual layouts and number types.

    Args:
        array: Any object with `shape`, `dtype` and basic indexing.
        axes: A letter per axis: Y rows, X columns, S or C channels; others must have length 1.
    """

    def __init__(self, array: Any, axes: str) -> None:
        self._array = array
        lengths = dict(zip(axes, array.shape, strict=True))
        other = {axis: n for axis, n in lengths.items() if axis not in "YXSC" and n > 1}
        channels = [axis for axis in "SC" if lengths.get(axis, 1) > 1]
        if other or len(channels) > 1 or not {"Y", "X"} <= lengths.keys():
            raise ValueError(
                f"it has the shape {tuple(array.shape)} with axes {axes}: needed are rows, columns and 1 to 4 "
                "channels; write one plane of it to a file of its own"
            )
        self._axes, self._channels = axes, channels[0] if channels else ""
        self.size = (lengths["Y"], lengths["X"])
        if 0 in self.size:
            raise ValueError(f"it has no pixels: its shape is {tuple(array.shape)}")
        count = lengths[channels[0]] if channels else 1
        if not 1 <= count <= 4:
            raise ValueError(f"it has {count} channels: needed are 1 to 4, gray or RGB, with or without transparency")
        if array.dtype.kind not in "buif":
            raise ValueError(f"its pixels are {array.dtype}: needed are whole numbers or floats")

    def read(self, tile: Tile) -> np.ndarray:
        """A rectangle in pixels -> [height, width, 3], uint8."""
        from PIL.Image import fromarray

        pixels = self._raw(tile)
        if pixels.dtype == np.uint8 and pixels.shape[2:] == (3,):
            return np.ascontiguousarray(pixels)
        if pixels.dtype.kind == "b":
            pixels = pixels.astype(np.uint8) * 255
        if pixels.dtype != np.uint8:
            pixels = to_bytes(pixels, *self._limits)
        return np.asarray(to_rgb(fromarray(np.ascontiguousarray(pixels))))

    def _raw(self, tile: Tile) -> np.ndarray:
        """A rectangle as it is stored: [height, width] or [height, width, channels]."""
        places = {"Y": tile.slices[0], "X": tile.slices[1], self._channels: slice(None)}
        index = tuple(places.get(axis, 0) for axis in self._axes)
        pixels = np.asarray(self._array[index])
        if self._channels and self._axes.index(self._channels) < self._axes.index("Y"):
            pixels = np.moveaxis(pixels, 0, 2)
        return pixels

    @cached_property
    def _limits(self) -> tuple[float, float]:
        """Smallest and largest value; 16-bit images need no look at all pixels."""
        if self._array.dtype.kind == "u" and self._array.dtype.itemsize == 2:
            return 0, 65535
        ends = [(band.min(), band.max()) for band in map(self._raw, bands(self.size))]
        low, high = np.asarray(ends).T
        return low.min(), high.max()


class DecodedSource(Source):
    """8-bit RGB pixels [height, width, 3] in a file."""

    def __init__(self, array: FileArray) -> None:
        self._array = array
        self.size = (array.shape[0], array.shape[1])

    def read(self, tile: Tile) -> np.ndarray:
        """A rectangle in pixels -> [height, width, 3], uint8."""
        return self._array.read(tile).numpy()


def bands(size: tuple[int, int], strip: int = 1) -> Iterator[Tile]:
    """Rectangles of the whole width, of about `BAND` pixels and a multiple of `strip` rows."""
    height, width = size
    rows = max(1, BAND // width // strip) * strip
    for top in range(0, height, rows):
        yield Tile(top, min(height, top + rows), 0, width)


@contextmanager
def open_source(
    image: str | Path | np.ndarray, folder: Path, on_band: OnBand = lambda done, total: None
) -> Iterator[Source]:
    """An image, open for reading.

    Args:
        image: A file, a folder of zarr, or an array [height, width], [height, width, channels] or [channels, height,
            width].
        folder: Where the pixels go that can only be decoded as a whole; those of an earlier call are used.
        on_band: Called while they are decoded.
    """
    if isinstance(image, np.ndarray):
        yield ArraySource(image, array_axes(image.shape))
        return
    path = Path(image)
    if not path.exists():
        raise FileNotFoundError(f"there is no image {path}")
    with ExitStack() as stack:
        try:
            source = _open(path, folder, stack, on_band)
        except Exception as error:  # decoders raise anything on broken data
            if disk_full_reason(error):
                raise
            raise ValueError(f"{path} cannot be read as an image: {first_line(error)}") from error
        yield _Named(source, path)


class _Named(Source):
    """A source whose errors name the file."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source, self._path, self.size = source, path, source.size

    def read(self, tile: Tile) -> np.ndarray:
        try:
            return self._source.read(tile)
        except Exception as error:  # decoders raise anything on broken data
            place = f"rows {tile.top} to {tile.bottom}, columns {tile.left} to {tile.right}"
            raise ValueError(f"{self._path} cannot be read at {place}: {first_line(error)}") from error


def _open(path: Path, folder: Path, stack: ExitStack, on_band: OnBand) -> Source:
    if path.is_dir():
        if not any((path / name).exists() for name in ZARR):
            raise ValueError("it is a folder, and no zarr array")
        return _zarr(path)
    with open(path, "rb") as file:
        start = file.read(8)
    if start.startswith(b"\x93NUMPY"):
        array = _Mapped(partial(np.load, path, mmap_mode="r", allow_pickle=False))
        return ArraySource(array, array_axes(array.shape))
    if start.startswith(MAGIC):
        check_installed("a TIFF file", "tifffile", "zarr", extra="gigapixel")
        source = _tiff(path, folder, stack, on_band)
        if source is not None:
            return source
    return _photo(path, folder, stack, on_band)


def array_axes(shape: tuple[int, ...]) -> str:
    """The axes of an array without names: channels are first or last, and at most 4."""
    if len(shape) == 2:
        return "YX"
    if len(shape) == 3:
        return "SYX" if shape[0] <= 4 < shape[2] else "YXS"
    raise ValueError(f"it has the shape {tuple(shape)}: needed are rows, columns and at most 4 channels")


class _Mapped:
    """An array in a file that is mapped for each read: the pages of a lasting map would count as memory."""

    def __init__(self, open_map: Callable[[], np.ndarray]) -> None:
        self._open = open_map
        array = open_map()  # raises for a truncated file
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        return np.array(self._open()[index])


def _zarr(path: Path) -> Source:
    """An array, or the full resolution of OME-Zarr."""
    check_installed("a zarr array", "zarr", extra="gigapixel")
    import zarr

    array: Any = zarr.open(path, mode="r")
    if isinstance(array, zarr.Group):
        if "0" not in array:
            raise ValueError(f"it is a group of {', '.join(sorted(array)) or 'nothing'}: give the path of an array")
        array = array["0"]
    single = [n == 1 and i < len(array.shape) - 2 for i, n in enumerate(array.shape)]
    used = iter(array_axes(tuple(n for n, one in zip(array.shape, single, strict=True) if not one)))
    return ArraySource(array, "".join(SINGLE[i] if one else next(used) for i, one in enumerate(single)))


def _tiff(path: Path, folder: Path, stack: ExitStack, on_band: OnBand) -> Source | None:
    """The full resolution of the first image; None for colors that Pillow converts.

    These are palettes, CMYK, inverted gray and rotated images.
    """
    import tifffile
    import zarr

    file = stack.enter_context(tifffile.TiffFile(path))
    series = file.series[0]
    level = series.levels[0]  # the full resolution of a pyramid
    page: Any = level.keyframe
    end = max((offset + count for p in level.pages if p for offset, count in _segments(p)), default=0)
    if end > path.stat().st_size:
        raise ValueError(f"it is truncated: its pixels end at byte {end}, the file has {path.stat().st_size}")
    orientation = page.tags.get("Orientation")
    plain = page.photometric in (tifffile.PHOTOMETRIC.MINISBLACK, tifffile.PHOTOMETRIC.RGB) or (
        page.photometric == tifffile.PHOTOMETRIC.YCBCR and page.compression == tifffile.COMPRESSION.JPEG
    )
    if not plain or (orientation is not None and orientation.value != 1):
        return None
    if level.dataoffset is not None:  # without compression, and in one piece
        kind = np.dtype(level.dtype).newbyteorder(file.byteorder)
        return ArraySource(_Mapped(partial(np.memmap, path, kind, "r", level.dataoffset, level.shape)), level.axes)
    store = series.aszarr(level=0)
    stack.callback(store.close)
    source = ArraySource(zarr.open_array(store, mode="r"), level.axes)
    if page.is_tiled:
        return source
    return _decoded(source.size, source.read, folder, stack, on_band, strip=min(page.rowsperstrip, page.imagelength))


def _segments(page: Any) -> Iterator[tuple[int, int]]:
    return zip(page.dataoffsets, page.databytecounts, strict=True)


def _photo(path: Path, folder: Path, stack: ExitStack, on_band: OnBand) -> Source:
    """What Pillow reads. It decodes images as a whole."""
    from PIL import Image

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the user has asked for a large image
    try:
        with Image.open(path) as image:
            needed, free = 4 * image.width * image.height, free_memory()
            if free is not None and needed > free:
                raise ValueError(
                    f"{image.format} files are decoded as a whole: {image.width} x {image.height} pixels need "
                    f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; write it as a TIFF with tiles"
                )
            make_upright(image)
            size = (image.height, image.width)
            if image.mode.startswith("I;16") or image.mode in ("I", "F"):  # scaled by the limits of the whole image
                read = ArraySource(np.asarray(image), "YX").read
            else:

                def read(tile: Tile) -> np.ndarray:
                    return np.asarray(to_rgb(image.crop((tile.left, tile.top, tile.right, tile.bottom))))

            return _decoded(size, read, folder, stack, on_band)
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _decoded(
    size: tuple[int, int],
    read: Callable[[Tile], np.ndarray],
    folder: Path,
    stack: ExitStack,
    on_band: OnBand,
    strip: int = 1,
) -> Source:
    """The pixels in memory if they are few, else in a file; `strip` rows of them can only be read together."""
    height, width = size
    if 3 * height * width <= IN_MEMORY:
        return ArraySource(read(Tile(0, height, 0, width)), "YXS")
    done, part = folder / "pixels.rgb", folder / "pixels.part"
    array = FileArray(done if done.exists() else part, (height, width, 3), torch.uint8)
    stack.callback(array.close)
    if not done.exists():
        for band in bands(size, strip):
            array.write(band, torch.from_numpy(np.array(read(band))))
            on_band(band.bottom, height)
        part.rename(done)
    return DecodedSource(array)
