"""`sima models` and `sima audit`: which models there are, and what they cost."""

import difflib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from sima_attn._errors import check_known
from sima_attn.cli import _options as option
from sima_attn.cli._shared import console, print_table, teller
from sima_attn.report.rows import write_rows

app = typer.Typer()


@app.command("models")
def models_command(
    pattern: Annotated[
        str | None, Argument(help="A part of the name, or a pattern such as 'vit_*_224'; of timm's models too.")
    ] = None,
    family: Annotated[str | None, Option(help="Of this family, e.g. sima_deit, or swin_transformer of timm.")] = None,
    attention: Annotated[str | None, Option(help="Of ours, those that can be built with it, e.g. performer.")] = None,
    paper: Annotated[bool, Option("--paper", help="Table 1 of the paper, counted exactly, instead.")] = False,
    out: Annotated[Path | None, option.file("csv", "With --paper, CSV file for the counts.")] = None,
) -> None:
    """List the names of models: ours, or with a pattern or a family, those of timm too."""
    if paper:
        if pattern or family or attention:
            raise ValueError("--paper prints all models of the paper's table: omit the pattern and the filters")
        print_table_1(out)
        return
    if out is not None:
        raise ValueError("--out applies only with --paper; to keep a list of names, redirect the output")
    from sima_attn.models.names import FAMILIES, WEIGHTS, matches, takes_attention, timm_families

    theirs = timm_families()
    known = {**FAMILIES, **theirs} if (pattern or family) and attention is None else FAMILIES
    if family is not None:
        check_known("family", family, {*known.values()})
    names = [
        name
        for name in known
        if (family is None or known[name] == family)
        and (pattern is None or matches(name, pattern))
        and (attention is None or takes_attention(name, attention))
    ]
    if not names:
        near = difflib.get_close_matches(pattern or "", known, n=3)
        similar = f"; did you mean {', '.join(near)}?" * bool(near)
        raise ValueError(f"no name of a model fits: use a shorter pattern, or omit a filter{similar}")
    width = max(map(len, names))
    for name in names:
        shipped = ", weights in the package" * (WEIGHTS / f"{name}.safetensors").is_file()
        console.print(f"{name:<{width}}  {known[name]}{shipped}")
    if known is FAMILIES:
        teller(Console(stderr=True))(f"{len(theirs)} models of timm are listed by a pattern: sima models '*vit*'")


def print_table_1(out: Path | None) -> None:
    """Table 1 of the paper: our models, counted exactly, beside what the paper prints."""
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
@option.takes_model
def audit_command(
    model: Annotated[
        str | None,
        Option(help="A model name, the folder of a run or an .onnx file.", show_default="the model in the package"),
    ] = None,
    size: Annotated[int | None, Option(help="Image side in pixels. Default: the model's own.", min=1)] = None,
    by_module: Annotated[bool, Option("--by-module", help="One line for each module that has exp-like calls.")] = False,
    fail_on_exp: Annotated[bool, Option("--fail-on-exp", help="Exit with 1 if a call is exp-like.")] = False,
) -> None:
    """Count a model's parameters, MACs and memory, and every exp-like call in it."""
    with Console(stderr=True).status(escape(f"auditing {model or 'the model in the package'}")):
        from sima_attn.auditing.model import audit_named
        from sima_attn.models.loading import DEFAULT

        report = audit_named(model or DEFAULT, size)
    console.print(report.name, style="bold")
    for fact in report.facts().split("; "):
        console.print(f"  {fact}")
    if report.calls:
        print_table(report.table(by_module), title=f"exp-like calls in {report.name}")
    console.print(report.summary(), style="bold")
    if fail_on_exp and not report.is_exp_free:
        raise typer.Exit(1)
