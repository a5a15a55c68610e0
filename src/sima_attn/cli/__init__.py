"""The command `sima`: one thin function a command. Heavy imports wait until a command runs."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from sima_attn._version import __version__
from sima_attn.cli import (
    bench,
    bench_edge,
    classify,
    demo,
    detect,
    explain,
    export,
    models,
    reproduce,
    selfsupervised,
    serve,
    train,
)
from sima_attn.cli._shared import console

app = typer.Typer(
    name="sima",
    help="Vision transformers without a single exp().",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(demo.app)
app.add_typer(models.app)
app.add_typer(train.app)
app.add_typer(selfsupervised.app)
app.add_typer(explain.app)
app.add_typer(explain.group, name="explain")
app.add_typer(serve.app)
app.add_typer(classify.app)
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(detect.app, name="detect")
app.add_typer(export.app)
bench.app.add_typer(bench_edge.app)
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"sima-attn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Vision transformers without a single exp()."""


def main() -> None:
    """Run the command line; an error the user can mend is one line, without a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        # Escaped: 'sima-attn[plots]' is no markup.
        Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
