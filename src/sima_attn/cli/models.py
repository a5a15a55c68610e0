"""`sima models` and `sima audit`: what a model costs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from sima_attn.cli._shared import console, print_table
from sima_attn.report.rows import write_rows

app = typer.Typer()


@app.command("models")
def models_command(
    out: Annotated[Path | None, Option(help="CSV file for the counts.", dir_okay=False)] = None,
) -> None:
    """Print Table 1 of the paper: our models, counted exactly, beside what the paper prints."""
    with Console(stderr=True).status("importing") as status:
        from sima_attn.reproduce.table_1 import count_models, table_1

        rows = count_models(on_step=status.update)
    if out is not None:
        write_rows(out, rows)
    print_table(
        table_1(rows),
        title="SimA models at 224 px, one image",
        caption="in brackets: as the paper prints it, with the MACs of the dearer order for DeiT and CvT",
    )


@app.command("audit")
def audit_command(
    model: Annotated[
        str, Argument(metavar="NAME_OR_FILE", help="A timm model name, a run's folder, or an .onnx file.")
    ],
    size: Annotated[int | None, Option(help="Image side in pixels. Default: the model's own.", min=1)] = None,
    by_module: Annotated[bool, Option("--by-module", help="One line for each module that has exp-like calls.")] = False,
    fail_on_exp: Annotated[bool, Option("--fail-on-exp", help="Exit with 1 if a call is exp-like.")] = False,
) -> None:
    """Count a model's parameters, MACs and memory, and every exp-like call in it."""
    with Console(stderr=True).status(f"auditing {model}"):
        from sima_attn.auditing.model import audit_named

        report = audit_named(model, size)
    console.print(f"[bold]{report.name}[/bold]")
    for fact in report.facts().split("; "):
        console.print(f"  {fact}")
    if report.calls:
        print_table(report.table(by_module), title=f"exp-like calls in {report.name}")
    console.print(f"[bold]{report.summary()}[/bold]")
    if fail_on_exp and not report.is_exp_free:
        raise typer.Exit(1)
