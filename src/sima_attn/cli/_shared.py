"""Output that several commands share."""

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sima_attn.report.tables import TextTable

# Where the output is not a terminal, the widest table fits. COLUMNS says another width, as it does for rich.
_WIDTH = None if Console().is_terminal or "COLUMNS" in os.environ else 240
# Text is printed as it is, in tables too, because the names of files and classes may contain [brackets]. A line that is
# partly bold or colored is a `Text`.
console = Console(width=_WIDTH, highlight=False, soft_wrap=True, markup=False, emoji=False)


def teller(where: Console) -> Callable[[str], None]:
    """A function that prints a line as it is on another console, such as stderr or that of a progress bar."""
    return partial(where.print, markup=False, emoji=False, highlight=False, soft_wrap=True)


def is_first_process() -> bool:
    """Whether this is the first process of torchrun, which prints for all, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def note(text: str) -> None:
    """Print a warning on stderr."""
    Console(stderr=True).print(Text.assemble(("note:", "yellow"), f" {text}"))


def progress_bar() -> Progress:
    """Description, bar, count and time, on stderr."""
    what = TextColumn("{task.description:<40}", style="bold", markup=False)
    return Progress(what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True))


def step_callback(bar: Progress, what: str) -> Callable[[int, int], None]:
    """A function of (done, total) that moves a new line of a progress bar."""
    task = bar.add_task(what, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def print_table(text: "TextTable", title: str, caption: str | None = None) -> None:
    """A table of strings as a table of the terminal. One that is too wide has broken lines, but all of its numbers."""
    table = _to_rich(text, text.header, title=title, caption=caption)
    if _width_of(table) > console.width:
        lengths = [max((len(line[i]) for line in text.lines), default=0) for i in range(len(text.header))]
        header = [
            textwrap.fill(heading, max(6, length), break_long_words=False)
            for heading, length in zip(text.header, lengths, strict=True)
        ]
        table = _to_rich(text, header, title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    console.print(table, soft_wrap=False)


def _to_rich(text: "TextTable", header: Sequence[str], **options: Any) -> Table:
    table = Table(**options)
    for column, heading in enumerate(header):
        table.add_column(heading, justify="right" if column else "left", overflow="fold")
    for i, line in enumerate(text.lines):
        table.add_row(*line, style="bold green" if i in text.bold else None)
    return table


def _width_of(table: Table) -> int:
    """The width at which no cell is broken."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def print_recipes(recipes: Mapping[str, Callable[[], object]]) -> None:
    """Names of recipes, and the first line of their docstrings."""
    for name, make in recipes.items():
        console.print(Text.assemble((f"  {name:<18}", "bold"), (make.__doc__ or "").strip().splitlines()[0]))
