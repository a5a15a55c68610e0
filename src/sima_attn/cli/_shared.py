"""Output that several commands share."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from sima_attn.report.tables import TextTable

# A table needs its width even where the output is not a terminal. COLUMNS says another one, as it does for rich.
_WIDTH = None if Console().is_terminal or "COLUMNS" in os.environ else 120
console = Console(width=_WIDTH, highlight=False, soft_wrap=True)


def teller(where: Console = console) -> Callable[[str], None]:
    """A function that prints a line as it is: file names are not markup."""
    return partial(where.print, markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a warning on stderr."""
    Console(stderr=True).print(f"[yellow]note:[/yellow] {escape(text)}", highlight=False)


def progress_bar() -> Progress:
    """Description, bar, count and time, on stderr."""
    columns = (TextColumn("[bold]{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def step_callback(bar: Progress, what: str) -> Callable[[int, int], None]:
    """A function of (done, total) that moves a new line of a progress bar."""
    task = bar.add_task(what, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def print_table(text: "TextTable", title: str, caption: str | None = None) -> None:
    """A table of strings as a table of the terminal."""
    table = Table(title=title, caption=caption)
    for column, heading in enumerate(text.header):
        table.add_column(heading, justify="right" if column else "left", no_wrap=True)
    for i, line in enumerate(text.lines):
        table.add_row(*line, style="bold green" if i in text.bold else None)
    console.print(table, soft_wrap=False)


def print_recipes(recipes: Mapping[str, Callable[[], object]]) -> None:
    """Names of recipes, and the first line of their docstrings."""
    for name, make in recipes.items():
        console.print(f"  [bold]{name:<18}[/bold]{(make.__doc__ or '').strip().splitlines()[0]}")
