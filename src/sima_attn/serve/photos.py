"""Uploaded bytes -> photo, or a refusal with the reason. Sample photos of the page."""

import io
import re
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from sima_attn.data.images import ENDINGS, check_size, images_in, make_upright, to_rgb
from sima_attn.serve.limits import Limits, Refusal

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")  # those of ENDINGS
LONGEST = 1024  # pixels of a photo that is shown or mapped
MAX_SAMPLES = 60
JPEG_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")  # in coded data FF 00 is a byte, FF D0 to FF D7 a restart
END_OF_IMAGE, START_OF_SCAN, WITHOUT_LENGTH = 0xD9, 0xDA, (0x01, 0xD8)
SAMPLES = {  # files that come with scikit-image
    "cat": "chelsea.png",
    "astronaut": "astronaut.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
    "motorcycle": "motorcycle_left.png",
}


def decode(data: bytes, limits: Limits) -> Image.Image:
    """The photo in these bytes: RGB, upright by its EXIF orientation, with all its pixels, as the commands read it.

    The size is checked before any pixel is decoded.
    """
    if not data:
        raise Refusal(400, "the photo is empty; send the bytes of an image file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our limit is lower
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise Refusal(413, f"the photo has more than {limits.pixels / 1e6:.0f} million pixels") from None
    except UnidentifiedImageError:
        raise Refusal(415, f"not a readable image; supported formats: {', '.join(FORMATS)}") from None
    except Exception:  # decoders raise many kinds of errors for a broken header
        raise Refusal(422, "the photo is broken: its header cannot be read") from None
    millions = image.width * image.height / 1e6
    if millions > limits.pixels / 1e6:
        raise Refusal(413, f"the photo has {millions:.0f} million pixels; the limit is {limits.pixels / 1e6:g} million")
    if image.format in ("JPEG", "MPO") and count_scans(data, limits.scans) > limits.scans:
        raise Refusal(413, f"the photo is a progressive JPEG of more than {limits.scans} scans; save it with fewer")
    try:
        check_size(*image.size)
    except ValueError as error:
        raise Refusal(413, f"the photo cannot be used: {error}") from None
    try:
        return to_rgb(make_upright(image))
    except Exception:  # as above, for the pixels
        raise Refusal(422, "the photo is broken: its pixels cannot be decoded") from None


def shrink(photo: Image.Image, side: int = LONGEST) -> Image.Image:
    """The photo with its longer side at most `side` pixels, in place."""
    photo.thumbnail((side, side))
    return photo


def to_jpeg(photo: Image.Image) -> bytes:
    """The photo as a JPEG file."""
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def count_scans(data: bytes, most: int) -> int:
    """Number of scans of the first image in a JPEG file, counted up to `most` + 1.

    Markers inside a segment, such as those of a thumbnail, and after the end of the image are not counted.
    """
    count, position = 0, 0
    while count <= most and (marker := JPEG_MARKER.search(data, position)):
        kind, position = marker[1][0], marker.end()
        if kind == END_OF_IMAGE:
            break
        count += kind == START_OF_SCAN
        if kind not in WITHOUT_LENGTH:
            position += int.from_bytes(data[position : position + 2], "big")
    return count


def find_samples(folder: Path | None) -> Mapping[str, Path]:
    """Name -> file of the photos in a folder, by default of those that come with scikit-image."""
    if folder is not None:
        if not folder.is_dir():
            raise FileNotFoundError(f"the samples folder {folder} does not exist")
        files = [path for path in images_in(folder) if path.is_file()]  # no pipes
        if not files:
            raise FileNotFoundError(f"the samples folder {folder} has no images ({', '.join(ENDINGS)})")
        files = files[:MAX_SAMPLES]
        names = [path.stem for path in files]
        if len(set(names)) < len(names):  # x.jpg beside x.jpeg
            names = [path.name for path in files]
        return dict(zip(names, files, strict=True))
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        return {}
    home = Path(spec.origin).parent / "data"
    return {name: home / file for name, file in SAMPLES.items() if (home / file).is_file()}
