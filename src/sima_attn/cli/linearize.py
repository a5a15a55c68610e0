"""`sima linearize`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from sima_attn.cli import _options as option
from sima_attn.cli._shared import console, print_table
from sima_attn.cli.train import check_installed

app = typer.Typer()


@app.command("linearize")
def linearize_command(
    model: Annotated[
        str | None, Argument(metavar="MODEL", help="The teacher: a timm name, NAME=WEIGHTS, a folder or a file.")
    ] = None,
    images: Annotated[str | None, Option(help="Folder of images, labels are not needed; or digits.")] = None,
    out: Annotated[Path, Option(help="Folder of the run.")] = Path("runs/linearize"),
    attention: Annotated[
        str | None, Option(help="The new attention, e.g. sima, sima_local or relu2.", show_default="sima_local")
    ] = None,
    size: Annotated[int | None, Option(help="Side of the images. Default: the teacher's.", min=1)] = None,
    steps: Annotated[int, Option(help="Training steps.", min=4)] = 1000,
    batch: Annotated[int, Option(help="Images per step.", min=1)] = 48,
    pretrained: Annotated[
        bool, Option("--pretrained", help="Download the weights that timm knows for the name.")
    ] = False,
    overrides: option.Settings = None,
    resume: option.Resume = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
) -> None:
    """Replace the softmax of a trained model and teach the new attention on unlabelled images."""
    check_installed()
    from sima_attn.distill.api import linearize
    from sima_attn.distill.report import block_table, summary_of

    settings = [*(overrides or []), *([f"run.precision={precision}"] if precision else [])]
    done = linearize(
        model,
        images,
        out,
        attention=attention,
        size=size,
        steps=steps,
        batch=batch,
        pretrained=pretrained or None,
        overrides=settings,
        resume=resume,
        device=device,
    )
    print_table(block_table(done), title="relative error of each attention, given the teacher's input")
    console.print(f"[bold]{summary_of(done)}[/bold]")
    console.print(f"Run: {out} (weights.safetensors, report.md, blocks.csv, learning_curve.png)")
    console.print(f"Next: sima audit {out}, sima export {out}, sima eval {out} --data FOLDER")
