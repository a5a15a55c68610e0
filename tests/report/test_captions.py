"""Captions of pictures: file names in any script."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sima_attn.report import captions
from sima_attn.report.captions import draw_text, shorten, split_by_font, text_width

NAMES = {
    "Latin": "Zürich été",
    "Cyrillic": "жук на траве",
    "Greek": "θάλασσα",
    "Arabic": "قطة",
    "CJK": "金魚と猫",
    "Devanagari": "बिल्ली",
    "Thai": "แมวน้ำ",
    "emoji": "party 😀🚀",
}
DEJAVU = ("Latin", "Cyrillic", "Greek", "Arabic")


@pytest.fixture
def fonts(monkeypatch):
    """A function that sets the fonts beside Pillow's."""

    def use(*files):
        forget()
        monkeypatch.setattr(captions, "font_list", lambda: [str(file) for file in files])

    def forget():
        for cached in (captions._other_fonts, captions._drawable):
            cached.cache_clear()

    yield use
    monkeypatch.undo()
    forget()


@pytest.fixture
def dejavu():
    matplotlib = pytest.importorskip("matplotlib")
    return Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")


@pytest.fixture
def of_one_sign(tmp_path):
    """A function that writes a font with one character, a filled square."""
    pytest.importorskip("fontTools")
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    def square(side):
        pen = TTGlyphPen(None)
        pen.moveTo((0, 0))
        for corner in ((0, side), (side, side), (side, 0)):
            pen.lineTo(corner)
        pen.closePath()
        return pen.glyph()

    def write(char):
        font = FontBuilder(1000, isTTF=True)
        font.setupGlyphOrder([".notdef", "sign"])
        font.setupCharacterMap({ord(char): "sign"})
        font.setupGlyf({".notdef": square(300), "sign": square(900)})
        font.setupHorizontalMetrics({".notdef": (400, 0), "sign": (1000, 0)})
        font.setupHorizontalHeader(ascent=900, descent=-100)
        font.setupNameTable({"familyName": "one sign", "styleName": "Regular"})
        font.setupOS2()
        font.setupPost()
        font.save(tmp_path / f"{ord(char):x}.ttf")
        return tmp_path / f"{ord(char):x}.ttf"

    return write


def drawn(text, size=30):
    picture = Image.new("L", (900, 60), 255)
    draw_text(ImageDraw.Draw(picture), (5, 5), text, size, 0)
    return np.asarray(picture)


@pytest.mark.parametrize("script", NAMES)
def test_each_character_is_drawn_by_a_font_that_has_it(fonts, dejavu, script):
    from fontTools.ttLib import TTFont

    fonts(dejavu)
    known = TTFont(dejavu).getBestCmap()
    pieces = split_by_font(NAMES[script])
    for file, piece in pieces:
        assert all(ord(char) in known for char in piece) if file else piece.isascii()
    if script in DEJAVU:
        assert pieces == [(str(dejavu), NAMES[script])]  # in one piece: its letters can join
    else:
        assert "\\" in "".join(piece for _, piece in pieces)  # what DejaVu lacks


@pytest.mark.parametrize("script", NAMES)
def test_without_fonts_every_name_stays_readable(fonts, script):
    fonts()
    (only,) = split_by_font(NAMES[script])
    assert only[0] == captions.PILLOW
    assert only[1].isascii()
    assert only[1].encode().decode("unicode_escape") == NAMES[script]


def test_a_font_of_the_system_helps_with_its_characters_alone(fonts, dejavu, of_one_sign):
    cjk = of_one_sign("魚")
    fonts(dejavu, cjk)
    assert split_by_font("金魚.jpg") == [(captions.PILLOW, "\\u91d1"), (str(cjk), "魚"), (captions.PILLOW, ".jpg")]
    assert (drawn("魚") == 0).sum() > 25**2  # the square of that font
    assert text_width("魚魚", 20) == pytest.approx(2 * text_width("魚", 20))


def test_fonts_of_packages_come_before_those_of_the_system(monkeypatch, tmp_path, dejavu, of_one_sign):
    """The packages are not imported, and one that is not installed is no error."""
    package = tmp_path / "noto_cjk_sans_otc"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    font = of_one_sign("魚").rename(package / "cjk.ttf")
    (package / "LICENSE").write_text("OFL")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(captions, "FONT_PACKAGES", ("noto_cjk_sans_otc", "no_such_package"))
    assert captions.package_fonts() == [str(font)]
    assert captions.font_list()[:2] == [str(dejavu), str(font)]


def test_figures_draw_what_captions_draw(fonts, dejavu, of_one_sign, tmp_path, recwarn):
    from sima_attn.report.figures import figure

    fonts(dejavu, of_one_sign("魚"))
    with figure(tmp_path / "a.png") as (_, axes):
        axes.set_title("魚 été 猫")
        axes.set_yticks([0, 1], ["魚", "fish"])
    assert not [str(warning.message) for warning in recwarn if "missing" in str(warning.message)]
    assert axes.get_title() == "魚 été \\u732b"
    first, second = axes.get_yticklabels()
    assert first.get_fontfamily() == ["DejaVu Sans", "one sign"]
    assert second.get_fontfamily() != first.get_fontfamily()


def test_ascii_needs_no_other_font(monkeypatch):
    monkeypatch.setattr(captions, "_other_fonts", lambda: pytest.fail("other fonts were looked for"))
    assert split_by_font("layer 3, q") == [(captions.PILLOW, "layer 3, q")]


def test_names_from_other_systems(fonts, dejavu):
    fonts(dejavu)
    assert split_by_font("e\u0301te\u0301") == [(str(dejavu), "été")]  # as macOS stores it
    assert split_by_font("a\ufe0fb") == [(captions.PILLOW, "ab")]  # a sign that has no form
    assert split_by_font("a\nb\udcff") == [(captions.PILLOW, "a\\nb\\udcff")]  # a line feed, a byte that is no text
    assert split_by_font("") == [(captions.PILLOW, "")]


def test_fonts_that_cannot_be_drawn_are_skipped(fonts, tmp_path):
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    fonts(tmp_path / "broken.ttf", tmp_path / "missing.ttf")
    assert split_by_font("Ж") == [(captions.PILLOW, "\\u0416")]


def test_a_long_name_is_cut_to_its_width(fonts, dejavu):
    fonts(dejavu)
    short = shorten("длинное имя файла " * 5, 15, 100)
    assert short.endswith("...")
    assert 70 < text_width(short, 15) <= 100
    assert shorten("имя", 15, 100) == "имя"


def test_the_text_begins_at_its_corner_and_has_the_height_of_the_font(fonts, dejavu):
    fonts(dejavu)
    for name in ("Hxg", "Жук"):
        rows, columns = np.nonzero(drawn(name) < 128)
        assert rows.min() >= 5
        assert rows.max() < 5 + 1.3 * 30
        assert 5 <= columns.min() < 10
