"""What several commands use to speak to the user."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from sima_attn.report.tables import TextTable

# A table needs its width even where the output is not a terminal. COLUMNS says another one, as it does for rich.
console = Console() if Console().is_terminal or "COLUMNS" in os.environ else Console(width=120)

# Where benchmarks write unless they are told where. The rows and figures that are committed are written by `make`.
BENCH_FOLDER = Path("runs/bench")

# Checked before anything is measured: what was measured until then would be lost.
RowsFile = Annotated[Path, typer.Option(help="CSV file for the rows.", dir_okay=False)]
FigureFile = Annotated[Path, typer.Option(help="PNG file for the figure.", dir_okay=False)]
Threads = Annotated[list[int], typer.Option(help="Thread counts; repeat for several.", min=1)]
Pixels = Annotated[list[int] | None, typer.Option(help="Image sides; repeat for several. Default: all.", min=1)]
Seconds = Annotated[float, typer.Option(help="Time for each group of measurements.", min=0.0)]


def teller(where: Console = console) -> Callable[[str], None]:
    """What prints a line as it is: names of files are no markup."""
    return partial(where.print, markup=False, highlight=False, soft_wrap=True)


def progress_bar() -> Progress:
    """Description, bar, count and time, on stderr."""
    columns = (TextColumn("[bold]{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


def print_table(text: "TextTable", title: str, caption: str | None = None) -> None:
    """A table of strings as a table of the terminal."""
    table = Table(title=title, caption=caption)
    for column, heading in enumerate(text.header):
        table.add_column(heading, justify="right" if column else "left", no_wrap=True)
    for i, line in enumerate(text.lines):
        table.add_row(*line, style="bold green" if i in text.bold else None)
    console.print(table)
