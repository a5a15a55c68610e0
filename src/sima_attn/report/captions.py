"""Text in pictures, in any script: drawn in fonts that have its characters, and as escapes where none has.

Pillow's own font comes first; it has ASCII alone. Then come DejaVu of matplotlib, the fonts of the extra `fonts`, and
those of the system.
"""

import subprocess
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageDraw, ImageFont

PILLOW = ""  # as a font file: the font inside Pillow
NO_CHARACTER = "\U0010fffd"  # for private use: a font draws its sign for a missing character
TESTED_SIZE = 16
FONT_PACKAGES = ("noto_cjk_sans_otc", "justmytype_intl_south_asia", "justmytype_intl_sea")  # of the extra `fonts`
FONT_FILES = (".ttf", ".otf", ".ttc")


def text_width(text: str, size: int) -> float:
    """Width of a line of text in pixels."""
    return sum(_font(file, size).getlength(piece) for file, piece in split_by_font(text))


def text_height(size: int) -> int:
    """Height of a line of text in pixels."""
    return sum(_font(PILLOW, size).getmetrics())


def draw_text(draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, size: int, fill: object) -> None:
    """Draw a line of text; `place` is its upper left corner, `size` that of the font in pixels."""
    x, y = place
    baseline = y + _font(PILLOW, size).getmetrics()[0]
    for file, piece in split_by_font(text):
        font = _font(file, size)
        draw.text((x, baseline), piece, fill=fill, font=font, anchor="ls")  # type: ignore[arg-type]
        x += font.getlength(piece)


def shorten(text: str, size: int, width: float) -> str:
    """The text, cut and with dots at its end if it is wider than `width` pixels."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "...", size) > width:
        text = text[:-1]
    return text + "..."


def drawable(text: str) -> str:
    """The text, with escapes in place of characters that no font has."""
    # macOS stores é as e and an accent; fonts have the one character.
    return "".join(_drawable(char) for char in unicodedata.normalize("NFC", text))


def split_by_font(text: str) -> list[tuple[str, str]]:
    """Font files and the pieces of text to draw in them: one font for all of it where there is one."""
    shown = drawable(text)
    for file in _font_files():
        if all(has_glyph(file, char) for char in shown):
            return [(file, shown)]
    pieces: list[tuple[str, str]] = []
    for char in shown:
        if pieces and has_glyph(pieces[-1][0], char):
            file, piece = pieces.pop()
        else:
            file, piece = next(file for file in _font_files() if has_glyph(file, char)), ""
        pieces.append((file, piece + char))
    return pieces


@cache
def has_glyph(file: str, char: str) -> bool:
    """Whether a font has a character: what it draws is not its sign for a missing one."""
    # Without shaping, which draws a circle below the vowel sign of a script that the font does not have.
    font = _font(file, TESTED_SIZE).font_variant(layout_engine=ImageFont.Layout.BASIC)
    return char == " " or bytes(font.getmask(char)) != bytes(font.getmask(NO_CHARACTER))


@cache
def _drawable(char: str) -> str:
    """The character if a font has it, otherwise its escape; nothing for signs that choose how emoji look."""
    if unicodedata.name(char, "").startswith("VARIATION SELECTOR"):
        return ""
    is_text = unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp")  # line breaks, bytes that are no text
    if is_text and any(has_glyph(file, char) for file in _font_files()):
        return char
    return char.encode("ascii", "backslashreplace").decode() if char > "\x7f" else repr(char)[1:-1]


@cache
def _font(file: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size) if file else ImageFont.load_default(size)  # type: ignore[return-value]


def _font_files() -> Iterator[str]:
    """Files of fonts, the first choice first; those beside Pillow's are looked for only when they are needed."""
    yield PILLOW
    yield from _other_fonts()


@cache
def _other_fonts() -> list[str]:
    return [file for file in font_list() if _can_be_drawn(file)]


def font_list() -> list[str]:
    """Font files, the first choice first."""
    if find_spec("matplotlib") is None:
        return [*package_fonts(), *_fonts_of_fontconfig()]
    from matplotlib import font_manager, get_data_path

    own = Path(get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return [str(own), *package_fonts(), *sorted(font_manager.findSystemFonts())]


def package_fonts() -> list[str]:
    """Font files of the installed packages of the extra `fonts`, which are not imported."""
    specs = [find_spec(name) for name in FONT_PACKAGES]
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    return [str(file) for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in FONT_FILES]


def _fonts_of_fontconfig() -> list[str]:
    try:
        listed = subprocess.run(["fc-list", "--format", "%{file}\n"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return sorted(listed.stdout.splitlines())


def _can_be_drawn(file: str) -> bool:
    """False for fonts of pictures in one size, as of colored emoji, and for files that Pillow cannot read."""
    try:
        _font(file, TESTED_SIZE).getmask("a")
    except (OSError, ValueError):
        return False
    return True
