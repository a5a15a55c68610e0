"""Image files as a user gives them: found, read upright in RGB, told apart by name, never written over."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")
MAX_PIXELS = 150_000_000  # 600 MB decoded, as Pillow keeps RGB in 4 bytes
MAX_RATIO = 100  # longer side : shorter side; a file of 400 bytes may hold 300000 x 1 pixels
MAX_RESIZED_RATIO = 10  # what is longer loses its ends before it is resized
READER_VERSION = 2  # increase it when a file gives other pixels than before: features on disk are stored under it


def is_hidden(name: str) -> bool:
    """Whether a file or folder is not the user's: .ipynb_checkpoints, and ._x.png and __MACOSX of macOS."""
    return name.startswith(".") or name == "__MACOSX"


def images_in(folder: Path, *, deep: bool = False) -> list[Path]:
    """The image files in a folder, and in folders in it where `deep`, in the order of their names; no hidden ones."""
    with os.scandir(folder) as listing:  # it tells files from folders, and a million of them need not be asked
        entries = sorted((entry for entry in listing if not is_hidden(entry.name)), key=lambda entry: entry.name)
    found: list[Path] = []
    for entry in entries:
        if deep and entry.is_dir(follow_symlinks=False):
            found += images_in(folder / entry.name, deep=True)
        elif entry.name.lower().endswith(ENDINGS) and not entry.is_dir():
            found.append(folder / entry.name)
    return found


def find_photos(paths: Sequence[str | Path]) -> list[Path]:
    """Files as they are given, the images of folders, and what patterns match that the shell has left as they are."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = images_in(path)
            if not inside:
                raise FileNotFoundError(f"the folder {path} has no images ({', '.join(ENDINGS)})")
            found += inside
        elif path.exists():
            found.append(path)
        elif glob.has_magic(str(path)):
            matches = sorted(path for path in map(Path, glob.glob(str(path), recursive=True)) if path.is_file())
            if not matches:
                raise FileNotFoundError(f"no file matches {path}")
            found += matches
        else:
            raise FileNotFoundError(f"there is no photo {path}; give a file, a folder of images, or a glob in quotes")
    return found


def read_image(file: str | Path | IO[bytes]) -> Image:
    """An image file, by its path or opened -> RGB, upright: turned and mirrored as its EXIF orientation says.

    All images of training, evaluation and inference are read here, so that a model sees the same pixels everywhere.
    A file that cannot be read, is not an image, or too large a one is a ValueError that gives the reason and leaves the
    name to the caller; a file that is missing is a FileNotFoundError.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if isinstance(file, str | Path) and not stat.S_ISREG(os.stat(file).st_mode):
            raise ValueError("it is not a regular file")  # opening a pipe would wait for a writer
        with Image.open(file) as image:
            check_size(*image.size)
            return to_rgb(make_upright(image))
    except FileNotFoundError:
        raise
    except UnidentifiedImageError:
        raise ValueError("it is not an image, or its beginning is damaged") from None
    except Image.DecompressionBombError:  # more than Pillow allows, which is more than we do
        raise ValueError(f"it has more than {MAX_PIXELS / 1e6:g} million pixels: make it smaller") from None
    except Exception as error:  # decoders raise anything on broken data
        raise ValueError(str(error) or type(error).__name__) from None


def check_size(width: int, height: int) -> None:
    """Raise ValueError for an image of too many pixels, or a longer side too many times the shorter one."""
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"it has {width} x {height} pixels, at most {MAX_PIXELS / 1e6:g} million are allowed: make it smaller"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(
            f"it has {width} x {height} pixels; the longer side may be at most {MAX_RATIO} times the shorter one: "
            "crop it"
        )


def make_upright(image: Image) -> Image:
    """The same object, decoded, turned and mirrored as its EXIF orientation says."""
    from PIL import ImageOps

    image.load()  # raises where pixels are missing; what comes after concerns EXIF alone
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # damaged EXIF says nothing about the pixels
        pass
    return image


def stored_size(path: str | Path) -> tuple[int, int]:
    """(width, height) of an image file as its pixels are stored, whatever its EXIF orientation says."""
    from PIL import Image

    with Image.open(path) as image:
        return image.size


def cut_ends(image: Image) -> Image:
    """The image, or the middle of a very long one, for a transform that resizes it and then cuts out the middle.

    Resized to 224 px, 100000 x 1000 pixels would be 22400 x 224, of which the middle 224 are used.
    """
    width, height = image.size
    longest = MAX_RESIZED_RATIO * min(width, height)
    x, y = max(0, width - longest) // 2, max(0, height - longest) // 2
    return image.crop((x, y, width - x, height - y)) if x or y else image


def open_photo(path: str | Path) -> Image:
    """A photo file -> RGB, upright; an error names the file."""
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
    """Photo after photo; one that cannot be read is named and left out, and an error where there is no other."""
    broken = 0
    for path in paths:
        try:
            photo = open_photo(path)
        except (ValueError, FileNotFoundError) as error:
            if len(paths) == 1:
                raise
            say(f"left out: {error}")
            broken += 1
        else:
            yield path, photo
        on_photo(path)
    if broken:
        if broken == len(paths):
            raise ValueError(f"none of the {broken} photos can be read")
        say(f"{broken} of the {len(paths)} photos cannot be read and were left out")


def check_not_over(photos: Sequence[Path], out: Path) -> None:
    """Raise where pictures of photos would be written into a folder that photos lie in: NAME.png may be one of them."""
    if out.resolve() in {photo.resolve().parent for photo in photos}:
        raise ValueError(
            f"the photos lie in {out}, where pictures of them may be written over them; give another --out"
        )


def unlike(name: str, taken: list[str]) -> str:
    """The name, with a number where it is taken: photos of several folders, one model with several weights."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    taken.append(found)
    return found


def to_rgb(image: Image) -> Image:
    """Any image in 8-bit RGB: grey, palette and transparent ones, and those of 16 bits, whole numbers or floats.

    Of transparent ones the colours stay and the transparency goes. Pillow would clip 16 bits and floats at 255 and make
    them white. Whole numbers up to 255 are taken for bytes and up to 65535 for 16 bits, floats up to 1 for shares of
    white and up to 255 for bytes; others raise.
    """
    if not image.mode.startswith("I;16") and image.mode not in ("I", "F"):
        return image.convert("RGB")
    import numpy as np
    from PIL.Image import fromarray

    pixels = np.asarray(image)
    low, high = pixels.min(), pixels.max()
    if image.mode == "F":
        if not (low >= 0 and high <= 255):  # so that NaN is refused too
            raise ValueError(f"it has floats from {low:g} to {high:g}; 0 to 1 or 0 to 255 can be read: scale them")
        pixels = np.rint(pixels * 255 if high <= 1 else pixels)
    else:
        if low < 0 or high > 65535:
            raise ValueError(f"it has whole numbers from {low} to {high}; 0 to 65535 can be read: scale them")
        if image.mode != "I" or high > 255:
            pixels = pixels >> 8  # the high byte, as Pillow takes it of 16-bit colours
    return fromarray(pixels.astype(np.uint8)).convert("RGB")
