"""`sima doctor`: installed packages, devices, and a check of the computed results, as tables or as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from sima_attn._examination import Check, Findings, Package, examine, how_to_install
from sima_attn.cli._shared import console

app = typer.Typer()

PURPOSES = {
    "": "operator, modules, models, convert, audit",
    "cuda": "the fused kernels on a GPU",
    "train": "sima train, eval, dino, knn, linear, classify, reproduce",
    "plots": "figures and pictures",
    "fonts": "Asian scripts in pictures",
    "data": "scikit-learn's digits, scikit-image's photos: sima demo",
    "detection": "sima detect",
    "hf": "convert of transformers' models",
    "onnx": "sima export, quantize, bench edge",
    "openvino": "OpenVINO in sima bench edge",
    "serve": "sima serve",
    "gigapixel": "sima features",
}


@app.command("doctor")
def doctor_command(
    as_json: Annotated[bool, Option("--json", help="Print JSON, for a bug report.")] = False,
) -> None:
    """Check this machine: versions, devices, kernels, missing extras. Exits with 1 if something is wrong."""
    with Console(stderr=True).status("checking"):
        findings = examine()
    if as_json:
        print(as_text(findings))
    else:
        show(findings)
    if findings.problems:
        raise typer.Exit(1)


def as_text(findings: Findings) -> str:
    """The findings as JSON, without the path of the home folder."""
    text = json.dumps(asdict(findings), indent=2, allow_nan=False)
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def show(findings: Findings) -> None:
    """Print the findings as tables, then the problems."""
    cpu = findings.cpu
    console.print(
        Text.assemble((f"sima-attn {findings.sima_attn}", "bold"), f", Python {findings.python}, {findings.system}")
    )
    console.print(
        f"CPU: {cpu['name']}, {cpu['cores']} cores, torch uses {cpu['threads']} threads\nGPU: {findings.cuda}"
    )

    def errors(check: Check) -> list[str]:
        return ["-" if error is None else f"{error:.0e}" for error in (check.error, check.gradient_error)]

    if findings.gpus:
        _print_table(
            "CUDA devices",
            ["GPU", "capability", "GiB", "kernels"],
            [[g.name, g.capability, f"{g.memory_gib:.0f}", g.kernels] for g in findings.gpus],
        )
    _print_table("Packages", ["extra", "for", "installed"], _by_extra(findings.packages))
    for extra in sorted({extra for p in findings.packages if p.verdict == "missing" for extra in p.extras}):
        console.print(f"Missing packages of {extra or 'sima-attn'}: {how_to_install([extra])}")
    _print_table(
        "sima_attention against the paper's equations in float64",
        ["device", "backend", "dtype", "error", "of gradients", "verdict"],
        [
            [c.device, c.backend, c.dtype, *errors(c), c.verdict + f": {c.reason}" * bool(c.reason)]
            for c in findings.checks
        ],
    )
    for name, about in findings.weights.items():
        console.print(f"Weights: {name}, {about}")
    for problem in findings.problems:
        console.print(Text.assemble(("Problem:", "bold red"), f" {problem}"))
    if not findings.problems:
        console.print("All checks passed.", style="bold green")


def _by_extra(packages: list[Package]) -> list[list[str]]:
    """One line per extra: its packages with their versions. A package of several extras is in each."""
    named = {extra for package in packages for extra in package.extras}
    lines = []
    for extra in [*(extra for extra in PURPOSES if extra in named), *sorted(named - PURPOSES.keys())]:
        mine = [package for package in packages if extra in package.extras]
        here = ", ".join(f"{package.name} {package.version or 'missing'}" for package in mine)
        shown = {"": "(always)", "cuda": "(with torch)"}.get(extra, extra)
        lines.append([shown, PURPOSES.get(extra, ""), here])
    return lines


def _print_table(title: str, header: list[str], lines: list[list[str]]) -> None:
    """A table whose long cells wrap."""
    table = Table(title=title, title_justify="left")
    for heading in header:
        table.add_column(heading, overflow="fold")
    for line in lines:
        table.add_row(*line)
    console.print(table, soft_wrap=False)
