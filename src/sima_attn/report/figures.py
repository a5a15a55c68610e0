"""Figures: the one place that creates and writes a matplotlib figure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sima_attn._errors import check_installed
from sima_attn._files import atomic_write

FIGURES = (".png", ".jpg", ".pdf", ".svg")


def check_can_plot(path: Path | None = None) -> None:
    """Raise if matplotlib is missing or `path` is not the name of a figure; called before a long run."""
    check_installed("a figure", "matplotlib", extra="plots")
    if path is not None and (path.is_dir() or path.suffix.lower() not in FIGURES):
        raise ValueError(f"a figure must be a file that ends in {', '.join(FIGURES)}, got {path}")


@contextmanager
def figure(path: Path, *, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A matplotlib figure and its axes, written to `path` at the end of the block.

    Args:
        rows, columns: Panels of the figure; see `matplotlib.pyplot.subplots`.
        options: Further arguments of `subplots`, such as `figsize`.
    """
    check_can_plot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = Figure(layout="constrained", figsize=options.pop("figsize", None))
    FigureCanvasAgg(whole)
    axes = whole.subplots(rows, columns, **options)
    yield whole, axes
    _choose_fonts(whole)
    with atomic_write(path) as temporary:
        whole.savefig(temporary, dpi=150, format=path.suffix[1:])


def _choose_fonts(whole: Any) -> None:
    """Give each text of a figure the fonts that have its characters: class names may be of any script."""
    from matplotlib.text import Text

    from sima_attn.report.captions import PILLOW, drawable, split_by_font

    for axes in whole.axes:
        axes.get_xticklabels(), axes.get_yticklabels()  # the labels get their text
    for text in whole.findobj(Text):
        words = text.get_text()
        if not words.isascii():
            files = [file for file, _ in split_by_font(words) if file != PILLOW]
            text.set_fontfamily(["DejaVu Sans", *map(_family, files)])
            text.set_text(drawable(words))


@cache
def _family(file: str) -> str:
    """The name under which matplotlib finds a font file."""
    from matplotlib import font_manager

    font_manager.fontManager.addfont(file)
    return str(font_manager.get_font(file).family_name)
