"""The command `sima`: one thin function per command. Heavy imports wait until a command runs."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Option
from typer.core import TyperGroup

from sima_attn._version import __version__
from sima_attn.cli import (
    bench,
    classify,
    demo,
    detect,
    doctor,
    explain,
    export,
    features,
    finetune,
    linearize,
    models,
    reproduce,
    selfsupervised,
    serve,
    train,
)
from sima_attn.cli._shared import console

# What `sima` shows, in this order. A test holds that every command has its place.
THEMES = {
    "Try it": ("demo", "classify", "serve", "doctor"),
    "Train": ("train", "finetune", "eval", "recipes", "linearize", "dino", "knn", "linear", "detect"),
    "Look": ("heatmap", "explain", "features", "audit", "models"),
    "Ship": ("export", "quantize", "ship"),
    "Measure": ("bench", "reproduce"),
}


class ByTheme(TyperGroup):
    """The commands under the headings of `THEMES`."""

    def list_commands(self, ctx):
        """The names, theme by theme."""
        return [name for names in THEMES.values() for name in names]

    def get_command(self, ctx, cmd_name):
        """The command, with its theme as the panel of the help that lists it."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            theme = next(theme for theme, names in THEMES.items() if cmd_name in names)
            command.rich_help_panel = theme  # type: ignore[attr-defined]
        return command


app = typer.Typer(
    name="sima",
    cls=ByTheme,
    help="Vision transformers without a single exp().",
    epilog="`sima COMMAND --help` tells what a command takes; `sima demo` is the place to start.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for module in (
    demo,
    models,
    train,
    finetune,
    linearize,
    selfsupervised,
    explain,
    features,
    serve,
    classify,
    export,
    doctor,
):
    app.add_typer(module.app)
for name, group in {
    "explain": explain.group,
    "reproduce": reproduce.app,
    "detect": detect.app,
    "bench": bench.app,
}.items():
    app.add_typer(group, name=name)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"sima-attn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Vision transformers without a single exp()."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def main() -> None:
    """Run the command line; an error the user can mend is one line, without a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error).__name__ != "OutOfMemoryError":  # of torch
            raise
        Console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {error}"), soft_wrap=True)
        sys.exit(2)
