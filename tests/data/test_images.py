"""Photos of a user: found, opened, told apart, not written over."""

import numpy as np
import pytest
from PIL import Image

from sima_attn.data.images import check_not_over, find_photos, images_in, open_photo, open_photos, to_rgb, unique_name


@pytest.fixture
def folder(tmp_path):
    for name in ("b.png", "a.JPG", "c.txt"):
        Image.new("RGB", (4, 2), "red").save(tmp_path / name, format="PNG")
    (tmp_path / "x.png").mkdir()  # a folder, whatever its name is
    return tmp_path


def test_files_folders_and_patterns_are_found(folder):
    a, b = folder / "a.JPG", folder / "b.png"
    assert find_photos([folder]) == [a, b]
    assert find_photos([folder / "c.txt", b]) == [folder / "c.txt", b]  # a named file is taken at its word
    assert find_photos([str(folder / "[ab].*"), a]) == [a, b, a]
    assert find_photos([folder / "*.png"]) == [b]


def test_hidden_files_and_folders_are_passed_over(folder):
    for name in ("._a.png", ".b.jpg", ".cache/c.png", "__MACOSX/d.png", "deeper/e.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((folder / "b.png").read_bytes())
    flat = [folder / "a.JPG", folder / "b.png"]
    assert images_in(folder) == flat
    assert images_in(folder, deep=True) == [*flat, folder / "deeper" / "e.png"]
    assert images_in(folder / ".cache") == [folder / ".cache" / "c.png"]  # a named folder is taken at its word


@pytest.mark.parametrize(
    ("what", "message"), [("x.png", "has no images"), ("*.gif", "no file matches"), ("d.png", "a glob in quotes")]
)
def test_what_is_not_there_is_named(folder, what, message):
    with pytest.raises(FileNotFoundError, match=message):
        find_photos([folder / what])


def test_a_photo_is_turned_as_its_camera_noted(tmp_path):
    image, exif = Image.new("RGB", (4, 2)), Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert open_photo(tmp_path / "turned.jpg").size == (2, 4)


def test_broken_photos_among_others_are_named_and_counted(folder):
    (folder / "a.JPG").write_bytes(b"no image")
    said, seen = [], []
    opened = open_photos(find_photos([folder]), say=said.append, on_photo=seen.append)
    assert [path.name for path, _ in opened] == ["b.png"]
    assert [path.name for path in seen] == ["a.JPG", "b.png"]
    assert "a.JPG cannot be read" in said[0]
    assert said[1] == "skipped 1 of 2 photos, which cannot be read"
    for photos in ([folder / "a.JPG"], [folder / "a.JPG"] * 2):
        with pytest.raises(ValueError, match=r"can(not)? be read"):
            list(open_photos(photos, say=said.append))


def test_names_that_are_taken_get_a_number_that_is_not():
    taken = []
    assert [unique_name(name, taken) for name in ("a-3", "a", "a", "a", "a-2")] == ["a-3", "a", "a-2", "a-4", "a-2-2"]


def test_pictures_do_not_go_where_the_photos_are(folder, tmp_path_factory):
    check_not_over([folder / "b.png"], tmp_path_factory.mktemp("out"))
    with pytest.raises(ValueError, match="could overwrite them"):
        check_not_over([folder / "b.png"], folder / "x.png" / "..")


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.array([[-1, 7]], np.int32), "whole numbers from -1 to 7"),
        (np.array([[0, 65536]], np.int32), "whole numbers from 0 to 65536"),
        (np.array([[-0.5, 1]], np.float32), "floats from -0.5 to 1"),
        (np.array([[0, 300]], np.float32), "floats from 0 to 300"),
        (np.array([[0, np.nan]], np.float32), "floats from nan to nan"),
    ],
)
def test_numbers_that_are_no_brightness_are_an_error(pixels, message):
    with pytest.raises(ValueError, match=message):
        to_rgb(Image.fromarray(pixels))
