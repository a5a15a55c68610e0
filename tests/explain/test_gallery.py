"""Pictures as `sima heatmap` and `sima explain` write them."""

import numpy as np
import pytest
from PIL import Image
from small_models import deit, timm_vit
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.explain import photo_model as photo_model_module
from sima_attn.explain.effects import AttentionRow
from sima_attn.explain.gallery import _rows_by_depth
from sima_attn.report.drawing import EFFECT, HEAT, TEXT, Tile, color, overlay, sheet
from sima_attn.report.rows import read_rows

runner = CliRunner()


@pytest.fixture(autouse=True)
def small_models_loaded(monkeypatch):
    """Two small models under names of their own."""

    def load(what=None, *, device="cpu"):
        model = timm_vit() if what == "softmax" else deit()
        return photo_model_module.photo_model(model, name=what or "shipped", trained=what is not None, size=32)

    monkeypatch.setattr(photo_model_module, "load_photo_model", load)


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, size in (("wide", (90, 40)), ("tall", (30, 80)), ("square", (50, 50))):
        pixels = np.random.default_rng(len(name)).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


def sima(*arguments, code=0):
    result = runner.invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + str(result.exception)
    return result


def test_a_folder_becomes_pictures_and_a_contact_sheet(photos, tmp_path):
    out = tmp_path / "out"
    result = sima("heatmap", photos, "--out", out, "--raw")
    names = {p.name for p in out.iterdir()}
    assert names == {f"{n}.{e}" for n in ("wide", "tall", "square") for e in ("png", "npz")} | {"contact_sheet.png"}
    assert "shipped has no trained weights" in result.stderr
    arrays = np.load(out / "wide.npz")
    assert set(arrays) == {"blocks.2.attn.q", "blocks.2.attn.k"}
    assert arrays["blocks.2.attn.q"].shape == (3, 5)
    assert (arrays["blocks.2.attn.q"] > 0).all()


def test_all_layers_and_two_models_side_by_side(photos, tmp_path):
    one, all_ = tmp_path / "one", tmp_path / "all"
    sima("heatmap", photos / "wide.png", "--out", one, "--of", "k", "--model", "sima")
    sima("heatmap", photos / "wide.png", "--out", all_, "--layer", "all", "--model", "sima", "--compare", "softmax")
    assert Image.open(all_ / "wide.png").height > 3 * Image.open(one / "wide.png").height
    assert [p.name for p in one.iterdir()] == ["wide.png"]


def test_the_layers_of_a_part_stand_on_lines_of_the_same_length():
    tiles = [Tile(Image.new("RGB", (1, 1)), str(i)) for i in range(20)]
    assert [len(line) for line in _rows_by_depth(tiles, [10, 10])] == [5, 5, 5, 5]
    assert [len(line) for line in _rows_by_depth(tiles, [13, 4])] == [5, 5, 3, 4]


def test_the_size_of_the_pictures_is_that_of_the_cell(photos, tmp_path):
    for cell in (100, 300):
        sima("heatmap", photos, "--out", tmp_path / str(cell), "--cell", cell)
    for name, ratio in (("square.png", 2.5), ("contact_sheet.png", 2.5)):
        small, large = (Image.open(tmp_path / cell / name).width for cell in ("100", "300"))
        assert ratio < large / small < 3


def test_photos_of_the_same_name_do_not_overwrite_each_other(photos, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "wide.png").write_bytes((photos / "wide.png").read_bytes())
    sima("heatmap", photos / "wide.png", other / "wide.png", "--out", tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"wide.png", "wide-2.png", "contact_sheet.png"}


def test_a_photo_named_as_the_contact_sheet_is_kept_beside_it(photos, tmp_path):
    (photos / "wide.png").rename(photos / "contact_sheet.png")
    sima("heatmap", photos, "--out", tmp_path / "out")
    names = {"contact_sheet-2.png", "tall.png", "square.png", "contact_sheet.png"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names


def test_one_model_with_two_weights_leaves_the_numbers_of_both(photos, tmp_path):
    sima("heatmap", photos / "wide.png", "--model", "m", "--compare", "m", "--of", "q", "--raw", "--out", tmp_path)
    assert set(np.load(tmp_path / "wide.npz")) == {"m.blocks.2.attn.q", "m-2.blocks.2.attn.q"}
    sima("explain", "statistics", photos / "wide.png", "--model", "m", "--compare", "m", "--out", tmp_path)
    rows = read_rows(tmp_path / "statistics.csv", AttentionRow)
    assert [row.model for row in rows] == ["m"] * 3 + ["m-2"] * 3


def test_a_broken_photo_is_named_counted_and_left_out(photos, tmp_path):
    whole = (photos / "tall.png").read_bytes()
    (photos / "[tall].png").write_bytes(whole[: len(whole) // 2])
    (photos / "tall.png").unlink()
    pictures, numbers = tmp_path / "pictures", tmp_path / "numbers"
    for arguments in (["heatmap", photos, "--out", pictures], ["explain", "statistics", photos, "--out", numbers]):
        said = sima(*arguments, "--compare", "softmax").stderr
        assert said.count("[tall].png cannot be read as an image") == 1
        assert "skipped 1 of 3 photos, which cannot be read" in said
    assert {p.name for p in pictures.iterdir()} == {"wide.png", "square.png", "contact_sheet.png"}
    assert {row.images for row in read_rows(numbers / "statistics.csv", AttentionRow)} == {2}
    broken = photos / "[tall].png"
    assert "cannot be read as an image" in str(sima("heatmap", broken, "--out", pictures, code=1).exception)
    result = sima("heatmap", broken, broken, "--out", pictures, code=1)
    assert str(result.exception) == "none of the 2 photos can be read"


def test_photos_are_not_written_over(photos):
    before = (photos / "wide.png").read_bytes()
    for arguments in (["heatmap", photos], ["heatmap", photos / "wide.png"]):
        assert "could overwrite them" in str(sima(*arguments, "--out", photos, code=1).exception)
    over = ["explain", "effect", photos / "wide.png", "--patch", "1,2", "--out", photos / "wide.png"]
    assert "overwrite the photo" in str(sima(*over, code=1).exception)
    assert (photos / "wide.png").read_bytes() == before


def test_effect_and_statistics(photos, tmp_path):
    target = tmp_path / "effect.png"
    sima("explain", "effect", photos / "wide.png", "--patch", "1,2", "--compare", "softmax", "--out", target)
    pixels = np.asarray(Image.open(target)).astype(int)
    assert (pixels[..., 0] - pixels[..., 2] > 60).any()  # red: it adds
    assert (pixels[..., 2] - pixels[..., 0] > 60).any()  # blue: it takes away
    sima("explain", "statistics", photos, "--compare", "softmax", "--out", tmp_path)
    rows = read_rows(tmp_path / "statistics.csv", AttentionRow)
    assert [row.model for row in rows] == ["shipped"] * 3 + ["softmax"] * 3
    assert (tmp_path / "statistics.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "last"], "--layer is a whole number or all, got 'last'"),
        (["--layer", "7"], "layer must be from -3 to 2, got 7; layer 1 in captions is number 0"),
        (["--of", "v"], "of must be 'q'"),
        (["--size", "4"], "size must be 8 px or more"),
    ],
)
def test_what_is_wrong_is_said(photos, tmp_path, arguments, message):
    result = sima("heatmap", photos / "wide.png", "--out", tmp_path / "out", *arguments, code=1)
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("patch", ["5", "5,", "1,2,3", "a,b"])
def test_a_patch_is_a_row_and_a_column(photos, patch):
    result = sima("explain", "effect", photos / "wide.png", "--patch", patch, code=1)
    assert str(result.exception) == f"--patch is ROW,COLUMN, two whole numbers such as 3,5, got '{patch}'"


def test_a_folder_without_images_and_a_photo_that_is_not_there(tmp_path):
    assert "has no images" in str(sima("heatmap", tmp_path, code=1).exception)
    assert "there is no photo" in str(sima("heatmap", tmp_path / "none.jpg", code=1).exception)


def test_colors_are_the_ends_and_the_middle_of_the_ramp():
    assert np.array_equal(color(np.array([0.0, 1.0]), HEAT), HEAT[[0, -1]])
    assert np.array_equal(color(np.array([0.5]), EFFECT)[0], EFFECT[1])
    photo = Image.new("RGB", (4, 3), (9, 9, 9))
    assert np.array_equal(np.asarray(overlay(photo, np.zeros((3, 4)), opacity=0.0)), np.asarray(photo))


def test_a_sheet_holds_every_picture_whole():
    red = Tile(Image.new("RGB", (100, 50), (255, 0, 0)), "wide and with a caption much too long for its cell")
    blue = Tile(Image.new("RGB", (20, 80), (0, 0, 255)), "tall")
    page = np.asarray(sheet([[red, blue], [red]], "title", cell=100)).astype(int)
    is_red = (page[..., 0] > 200) & (page[..., 1] < 50)
    assert is_red.sum() == 2 * 100 * 50
    assert ((page[..., 2] > 200) & (page[..., 1] < 50)).sum() == 25 * 100


def test_a_caption_of_two_lines_makes_its_row_higher():
    one, two = (sheet([[Tile(Image.new("RGB", (9, 9)), text)] * 2] * 2, cell=100) for text in ("cat", "cat\ndog"))
    assert two.height == one.height + 2 * (TEXT + 8)
    above, below = (np.asarray(two)[16 + 100 + part * (TEXT + 8) :][: TEXT + 8] for part in (0, 1))
    assert above.min() < 128
    assert below.min() < 128
