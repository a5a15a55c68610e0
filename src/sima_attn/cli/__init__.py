"""The command `sima`: one thin function a command. Heavy imports wait until a command runs."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option
from typer.core import TyperGroup

from sima_attn._version import __version__
from sima_attn.cli import (
    bench,
    bench_edge,
    classify,
    demo,
    detect,
    doctor,
    explain,
    export,
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
    "Train": ("train", "eval", "recipes", "dino", "knn", "linear", "detect"),
    "Look": ("heatmap", "explain", "audit", "models"),
    "Ship": ("export", "quantize", "ship"),
    "Measure": ("bench", "reproduce"),
}


class ByTheme(TyperGroup):
    """The commands under the headings of `THEMES`."""

    def list_commands(self, ctx):
        """The names, theme by theme; a command without one comes last."""
        placed = [name for names in THEMES.values() for name in names if name in self.commands]
        return [*placed, *(name for name in self.commands if name not in placed)]

    def get_command(self, ctx, cmd_name):
        """The command, with its theme as the panel of the help that lists it."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            theme = next((theme for theme, names in THEMES.items() if cmd_name in names), None)
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
app.add_typer(doctor.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"sima-attn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, Option("--version", callback=_show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Vision transformers without a single exp()."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def main() -> None:
    """Run the command line; an error the user can mend is one line, without a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        # Escaped: 'sima-attn[plots]' is no markup.
        Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
