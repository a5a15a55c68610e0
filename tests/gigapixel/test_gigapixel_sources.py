"""Images of every format -> the pixels that the reader of photos gives; broken files are named errors."""

import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image

from sima_attn.data.images import open_photo, to_rgb
from sima_attn.gigapixel import sources
from sima_attn.gigapixel.sources import open_source
from sima_attn.gigapixel.tiles import Tile, tiles_of

HEIGHT, WIDTH = 70, 90


def pixels(*shape, dtype=np.uint8, high=256):
    return np.random.default_rng(0).integers(0, high, shape or (HEIGHT, WIDTH, 3)).astype(dtype)


def smooth():
    """Pixels that survive JPEG."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([2 * y, 2 * x, y + x], axis=2).astype(np.uint8)


def tiff(name, array, **options):
    def write(folder):
        tifffile.imwrite(folder / name, array, **options)
        return folder / name

    return write


def pyramid(folder):
    with tifffile.TiffWriter(folder / "image.ome.tif", ome=True) as file:
        options = {"tile": (32, 32), "photometric": "rgb", "metadata": {"axes": "YXS"}}
        file.write(pixels(), subifds=1, **options)
        file.write(pixels()[::2, ::2], subfiletype=1, tile=(32, 32), photometric="rgb")
    return folder / "image.ome.tif"


def npy(array):
    def write(folder):
        np.save(folder / "image.npy", array)
        return folder / "image.npy"

    return write


def zarr_array(array, **options):
    def write(folder):
        written = zarr.create_array(folder / "image.zarr", shape=array.shape, dtype=array.dtype, **options)
        written[:] = array
        return folder / "image.zarr"

    return write


def ome_zarr(folder):
    group = zarr.open_group(folder / "image.zarr", mode="w")
    group.create_array("0", shape=(1, 3, 1, HEIGHT, WIDTH), dtype="uint8", chunks=(1, 1, 1, 32, 32))
    group["0"][:] = np.moveaxis(pixels(), 2, 0)[None, :, None]
    return folder / "image.zarr"


def saved(name, image, **options):
    def write(folder):
        image.save(folder / name, **options)
        return folder / name

    return write


def as_rgb(array):
    return np.asarray(to_rgb(Image.fromarray(array)))


RGB, RGBA, GRAY = pixels(), pixels(HEIGHT, WIDTH, 4), pixels(HEIGHT, WIDTH)
DEEP = pixels(HEIGHT, WIDTH, dtype=np.uint16, high=65536)
FLOAT = (GRAY / 255).astype(np.float32)
EXIF = Image.Exif()
EXIF[274] = 6
# What writes the file, and its pixels.
FORMATS = {
    "tiff, tiles": (tiff("a.tif", RGB, tile=(32, 32), compression="zlib"), RGB),
    "tiff, strips": (tiff("a.tif", RGB, rowsperstrip=7, compression="lzw"), RGB),
    "tiff, one strip": (tiff("a.tif", RGB, rowsperstrip=HEIGHT, compression="zstd"), RGB),
    "tiff, planes": (tiff("a.tif", np.moveaxis(RGB, 2, 0), planarconfig="separate", photometric="rgb"), RGB),
    "tiff, big endian": (tiff("a.tif", DEEP, byteorder=">"), as_rgb(DEEP)),
    "tiff, transparent": (tiff("a.tif", RGBA, photometric="rgb", extrasamples=["unassalpha"]), as_rgb(RGBA)),
    "tiff, gray floats": (tiff("a.tif", FLOAT, tile=(16, 16)), as_rgb(FLOAT)),
    "tiff, 16-bit colors": (tiff("a.tif", RGB.astype(np.uint16) * 257, photometric="rgb"), RGB),
    "tiff, cmyk": (saved("a.tif", Image.fromarray(RGB).convert("CMYK")), None),
    "bigtiff": (tiff("a.tif", RGB, bigtiff=True), RGB),
    "ome-tiff, pyramid": (pyramid, RGB),
    "npy": (npy(RGB), RGB),
    "npy, channels first": (npy(np.moveaxis(RGB, 2, 0)), RGB),
    "npy, gray whole numbers": (npy(DEEP.astype(np.int64)), as_rgb(DEEP)),
    "npy, bits": (npy(GRAY > 127), as_rgb((GRAY > 127) * np.uint8(255))),
    "zarr": (zarr_array(RGB, chunks=(32, 32, 3)), RGB),
    "zarr, format 2": (zarr_array(GRAY, chunks=(20, 20), zarr_format=2), as_rgb(GRAY)),
    "ome-zarr": (ome_zarr, RGB),
    "png": (saved("a.png", Image.fromarray(RGB)), RGB),
    "png, transparent": (saved("a.png", Image.fromarray(RGBA)), as_rgb(RGBA)),
    "png, 16 bits": (saved("a.png", Image.fromarray(DEEP)), as_rgb(DEEP)),
    "png, palette": (saved("a.png", Image.fromarray(RGB).quantize(16)), None),
    "jpeg, rotated": (saved("a.jpg", Image.fromarray(smooth()), exif=EXIF), None),
}


@pytest.mark.parametrize("in_memory", [0, 10**9])
@pytest.mark.parametrize("name", FORMATS)
def test_any_rectangle_has_the_pixels_that_were_written(name, in_memory, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "IN_MEMORY", in_memory)
    monkeypatch.setattr(sources, "BAND", 16 * WIDTH)
    write, expected = FORMATS[name]
    path = write(tmp_path)
    if expected is None:  # Pillow converts the colors, for photos too
        expected = np.asarray(open_photo(path))
    (tmp_path / "work").mkdir()
    with open_source(path, tmp_path / "work") as source:
        assert source.size == expected.shape[:2]
        for tile in [*tiles_of(source.size, 33), Tile(0, source.size[0], 0, source.size[1])]:
            read = source.read(tile)
            assert (read.dtype, read.shape) == (np.uint8, (*tile.shape, 3))
            assert np.array_equal(read, expected[tile.slices])


IN_PLACE = ["tiff, tiles", "tiff, big endian", "bigtiff", "ome-tiff, pyramid", "npy", "zarr", "ome-zarr"]


@pytest.mark.parametrize("name", IN_PLACE)
def test_these_are_read_in_place_and_nothing_of_them_is_larger_than_what_is_asked_for(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "IN_MEMORY", 0)
    path, read = FORMATS[name][0](tmp_path), []
    (tmp_path / "work").mkdir()
    with open_source(path, tmp_path / "work", lambda *step: pytest.fail("it was decoded as a whole")) as source:
        inner = source._source
        raw = type(inner)._raw
        monkeypatch.setattr(type(inner), "_raw", lambda self, tile: read.append(raw(self, tile)) or read[-1])
        source.read(Tile(10, 14, 20, 27))
    assert [each.shape[:2] for each in read] == [(4, 7)]
    assert all(each.base is None or each.base.size <= each.size for each in read)
    assert list((tmp_path / "work").iterdir()) == []


def test_what_is_decoded_as_a_whole_is_decoded_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "IN_MEMORY", 0)
    path = FORMATS["png"][0](tmp_path)
    done = []
    for _ in range(2):
        with open_source(path, tmp_path, lambda rows, total: done.append((rows, total))) as source:
            assert np.array_equal(source.read(Tile(3, 9, 5, 50)), RGB[3:9, 5:50])
    assert done == [(70, 70)]


def damaged(write, keep):
    def broken(folder):
        path = write(folder)
        path.write_bytes(path.read_bytes()[:keep])
        return path

    return broken


def file_of(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def empty_folder(folder):
    (folder / "empty").mkdir()
    return folder / "empty"


def damaged_tile(folder):
    path = FORMATS["tiff, tiles"][0](folder)
    with tifffile.TiffFile(path) as file:
        place = file.pages[0].dataoffsets[0]
    content = bytearray(path.read_bytes())
    content[place : place + 20] = bytes(20)
    path.write_bytes(content)
    return path


BROKEN = {
    "truncated tiff": (damaged(tiff("a.tif", RGB), 9000), "is truncated: its pixels end at byte"),
    "truncated tiff, tiles": (damaged(tiff("a.tif", RGB, tile=(32, 32), compression="zlib"), 9000), "truncated"),
    "truncated big tiff": (damaged(tiff("a.tif", RGB, bigtiff=True, compression="zlib"), 9000), "truncated"),
    "beginning of a tiff": (damaged(tiff("a.tif", RGB), 6), "cannot be read as an image"),
    "damaged tile": (damaged_tile, r"cannot be read (at rows 0 to|as an image)"),
    "truncated npy": (damaged(npy(RGB), 5000), "cannot be read as an image"),
    "truncated jpeg": (damaged(saved("a.jpg", Image.fromarray(smooth())), 900), "cannot be read as an image"),
    "text": (file_of("a.png", b"hello"), "cannot be read as an image"),
    "folder": (empty_folder, "it is a folder, and no zarr array"),
    "no pixels": (npy(RGB[:0]), "it has no pixels"),
    "five channels": (npy(pixels(HEIGHT, WIDTH, 5)), "it has 5 channels"),
    "many planes": (tiff("a.tif", pixels(6, HEIGHT, WIDTH), photometric="minisblack"), "it has the shape"),
    "objects": (npy(np.array([["a"]])), "its pixels are <U1"),
    "negative": (npy(-GRAY.astype(np.int32)), "whole numbers from -255 to 0"),
    "large floats": (npy(1000 * FLOAT), "floats from 0 to 1000"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_a_named_error(name, tmp_path):
    write, message = BROKEN[name]
    path = write(tmp_path)
    with pytest.raises(ValueError, match=message) as error, open_source(path, tmp_path) as source:
        source.read(Tile(0, *source.size[:1], 0, source.size[1]))
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"there is no image .*none\.tif"),
        open_source(tmp_path / "none.tif", tmp_path),
    ):
        pass


def test_an_image_too_large_for_pillow_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "free_memory", lambda: 1000)
    path = FORMATS["png"][0](tmp_path)
    with (
        pytest.raises(
            ValueError, match=r"PNG files are decoded as a whole: 90 x 70 pixels need .* as a TIFF with tiles"
        ),
        open_source(path, tmp_path),
    ):
        pass
