"""Find image files, read them as upright RGB, and name outputs without overwriting the inputs."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff", ".avif")
MAX_PIXELS = 150_000_000  # 600 MB decoded: Pillow stores RGB in 4 bytes
MAX_RATIO = 100  # longer side : shorter side; a file of 400 bytes can contain 300000 x 1 pixels
MAX_RESIZED_RATIO = 10  # longer images are cropped to this ratio before they are resized
READER_VERSION = 3  # part of the key of cached features; increase it when the same file gives different pixels


def is_hidden(name: str) -> bool:
    """Whether a file or folder was made by a tool: .ipynb_checkpoints, and ._x.png and __MACOSX of macOS."""
    return name.startswith(".") or name == "__MACOSX"


def images_in(folder: Path, *, deep: bool = False, above: Sequence[str] = ()) -> list[Path]:
    """The image files in a folder, sorted by name, without hidden ones; with `deep` also those in its subfolders.

    Links to folders are followed. `above` holds the real paths of the parent folders, to detect a loop of links.
    """
    with os.scandir(folder) as listing:  # it gives the file type too, which saves a call per file
        entries = sorted((entry for entry in listing if not is_hidden(entry.name)), key=lambda entry: entry.name)
    above = [*above, os.path.realpath(folder)]
    found: list[Path] = []
    for entry in entries:
        path = folder / entry.name
        if deep and entry.is_dir():
            if entry.is_symlink() and os.path.realpath(path) in above:
                raise ValueError(f"{path} is a link to a folder that contains it; remove the link")
            found += images_in(path, deep=True, above=above)
        elif entry.name.lower().endswith(ENDINGS) and not entry.is_dir():
            found.append(path)
    return found


def find_photos(paths: Sequence[str | Path]) -> list[Path]:
    """Expand files, folders of images, and glob patterns that the shell did not expand."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = images_in(path)
            if not inside:
                raise FileNotFoundError(f"the folder {path} has no images directly in it ({', '.join(ENDINGS)})")
            found += inside
        elif path.exists():
            found.append(path)
        elif glob.has_magic(str(path)):
            matches = sorted(path for path in map(Path, glob.glob(str(path), recursive=True)) if path.is_file())
            if not matches:
                raise FileNotFoundError(f"no file matches {path}")
            found += matches
        else:
            raise FileNotFoundError(f"there is no photo {path}; pass a file, a folder of images, or a glob in quotes")
    return found


def read_image(file: str | Path | IO[bytes]) -> Image:
    """Read an image file (a path or an open file) as RGB, with its EXIF orientation applied.

    Training, evaluation and inference all read images here, so that a model sees the same pixels everywhere.
    Raises FileNotFoundError for a missing file, and ValueError for one that is unreadable, not an image, or too large;
    the ValueError gives the reason, and the caller adds the name.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if isinstance(file, str | Path) and not stat.S_ISREG(os.stat(file).st_mode):
            raise ValueError("it is not a regular file")  # opening a pipe would block
        with Image.open(file) as image:
            check_size(*image.size)
            return to_rgb(make_upright(image))
    except FileNotFoundError:
        raise
    except UnidentifiedImageError:
        raise ValueError("it is not an image, or its beginning is damaged") from None
    except Exception as error:  # decoders raise anything on broken data
        raise ValueError(str(error) or type(error).__name__) from None


def upright_size(path: Path) -> tuple[int, int]:
    """(width, height) of the image that `read_image` returns, from the header of the file alone."""
    from PIL import Image
    from PIL.ExifTags import Base

    with Image.open(path) as image:
        width, height = image.size
        with contextlib.suppress(Exception):  # damaged EXIF, as in `make_upright`
            if image.getexif().get(Base.Orientation) in (5, 6, 7, 8):  # rotated by 90 degrees
                return height, width
    return width, height


def check_size(width: int, height: int) -> None:
    """Raise ValueError if an image has too many pixels or too large an aspect ratio."""
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"it has {width} x {height} pixels, at most {MAX_PIXELS / 1e6:g} million are allowed: make it smaller"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(
            f"it has {width} x {height} pixels; the longer side can be at most {MAX_RATIO} times the shorter one: "
            "crop it"
        )


def make_upright(image: Image) -> Image:
    """Decode the image and apply its EXIF orientation, in place."""
    from PIL import ImageOps

    image.load()  # raises if pixels are missing; errors below concern only EXIF
    with contextlib.suppress(Exception):  # damaged EXIF; the pixels are fine
        ImageOps.exif_transpose(image, in_place=True)
    return image


def cut_ends(image: Image) -> Image:
    """Crop a very long image to its middle, before a transform that resizes and center-crops it.

    100000 x 1000 pixels would be resized to 22400 x 224, of which only the middle 224 are used.
    """
    width, height = image.size
    longest = MAX_RESIZED_RATIO * min(width, height)
    x, y = max(0, width - longest) // 2, max(0, height - longest) // 2
    return image.crop((x, y, width - x, height - y)) if x or y else image


def open_photo(path: str | Path) -> Image:
    """Like `read_image`, with the path in error messages."""
    try:
        return read_image(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no photo {path}") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from None


def open_photos(
    paths: Sequence[Path],
    *,
    say: Callable[[str], object] = print,
    on_photo: Callable[[Path], object] = lambda path: None,
) -> Iterator[tuple[Path, Image]]:
    """Open photos one by one. Unreadable ones are reported and skipped; if all are unreadable, raises ValueError."""
    broken = 0
    for path in paths:
        try:
            photo = open_photo(path)
        except (ValueError, FileNotFoundError) as error:
            if len(paths) == 1:
                raise
            say(f"skipped: {error}")
            broken += 1
        else:
            yield path, photo
        on_photo(path)
    if broken:
        if broken == len(paths):
            raise ValueError(f"none of the {broken} photos can be read")
        say(f"skipped {broken} of {len(paths)} photos, which cannot be read")


def check_not_over(photos: Sequence[Path], out: Path) -> None:
    """Raise ValueError if `out` is one of the photos, or contains one: writing NAME.png there could overwrite it."""
    if out.resolve() in {photo.resolve() for photo in photos}:
        raise ValueError(f"--out would overwrite the photo {out}; use another name")
    if out.resolve() in {photo.resolve().parent for photo in photos}:
        raise ValueError(
            f"the photos are in {out}, and the output could overwrite them; choose another folder with --out"
        )


def unique_name(name: str, taken: list[str]) -> str:
    """The name, with a number appended if it is in `taken`; the result is added to `taken`."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    taken.append(found)
    return found


def to_rgb(image: Image) -> Image:
    """Convert any image to 8-bit RGB; what is transparent becomes white, as on the page of a browser.

    Images with 16-bit, integer or float pixels are scaled, where Pillow would clip them to white. Integers up to 255
    are taken as 8 bits and up to 65535 as 16 bits; floats up to 1 as fractions of white and up to 255 as 8 bits. Other
    values raise ValueError.
    """
    from PIL.Image import fromarray, new

    if not image.mode.startswith("I;16") and image.mode not in ("I", "F"):
        if image.has_transparency_data:
            white = new("RGBA", image.size, "white")
            white.alpha_composite(image.convert("RGBA"))
            image = white
        return image.convert("RGB")
    import numpy as np

    pixels = np.asarray(image)
    return fromarray(to_bytes(pixels, pixels.min(), pixels.max())).convert("RGB")


def to_bytes(pixels: np.ndarray, low: float, high: float) -> np.ndarray:
    """Pixels of 16 bits, whole numbers or floats -> 8 bits, as `to_rgb` does.

    `low` and `high` are those of the whole image, of which the pixels may be a part.
    """
    import numpy as np

    if pixels.dtype.kind == "f":
        if not (low >= 0 and high <= 255):  # also true for NaN
            raise ValueError(f"it has floats from {low:g} to {high:g}; scale them to 0 to 1 or 0 to 255")
        pixels = np.rint(pixels * 255 if high <= 1 else pixels)
    else:
        if low < 0 or high > 65535:
            raise ValueError(f"it has whole numbers from {low} to {high}; scale them to 0 to 65535")
        if pixels.dtype.itemsize == 2 or high > 255:
            pixels = pixels >> 8  # the high byte, as Pillow does for 16-bit colors
    return pixels.astype(np.uint8)
