"""`sima linearize`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from sima_attn.cli import _options as option
from sima_attn.cli._next import after_linearize, say_next
from sima_attn.cli._shared import console, is_first_process, print_table
from sima_attn.cli.train import check_installed

app = typer.Typer()


@app.command("linearize")
@option.takes_model
def linearize_command(
    model: Annotated[str | None, Option(help=f"The teacher. {option.MODEL}")] = None,
    data: Annotated[str | None, Option(help="Folder of images, labels are not needed; or digits.")] = None,
    out: Annotated[Path, option.folder("Folder of the run.")] = Path("runs/linearize"),
    attention: Annotated[
        str | None, Option(help="The new attention, e.g. sima, sima_local or relu2_wide.", show_default="sima_local")
    ] = None,
    size: Annotated[int | None, Option(help="Side of the images. Default: the teacher's.", min=1)] = None,
    steps: Annotated[int | None, Option(help="Training steps.", min=4, show_default="1000")] = None,
    batch: Annotated[int | None, Option(help="Images per step.", min=1, show_default="48")] = None,
    keep: Annotated[
        str | None, Option(help="Attentions that stay softmax: a number, or auto for a budget.", show_default="0")
    ] = None,
    budget: Annotated[
        float | None, Option(help="For --keep auto: cosine, or accuracy relative to the teacher's. Default: 0.99.")
    ] = None,
    finetune: Annotated[
        int | None, Option(help="Epochs of supervised fine-tuning at the end.", min=0, show_default="0")
    ] = None,
    pretrained: Annotated[
        bool, Option("--pretrained", help="Download the weights that timm knows for the name.")
    ] = False,
    weights: option.Weights = None,
    overrides: option.Settings = None,
    resume: option.Resume = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
) -> None:
    """Replace the softmax of a trained model and teach the new attention on unlabeled images."""
    check_installed()
    from sima_attn.distill.api import linearize
    from sima_attn.distill.report import block_table, summary_of

    settings = [*(overrides or []), *([f"run.precision={precision}"] if precision else [])]
    done = linearize(
        model,
        data,
        out,
        attention=attention,
        size=size,
        steps=steps,
        batch=batch,
        keep=int(keep) if keep and keep.isdecimal() else keep,
        budget=budget,
        finetune=finetune,
        weights=weights,
        pretrained=pretrained or None,
        overrides=settings,
        resume=resume,
        device=device,
    )
    if not is_first_process():
        return
    print_table(block_table(done), title="relative error of each attention, given the teacher's input")
    console.print(summary_of(done), style="bold")
    names = ("weights.safetensors", "model.safetensors", "report.md", "features.png", "learning_curve.png")
    console.print(f"Run: {out} ({', '.join(name for name in names if (out / name).exists())}, rows as CSV)")
    say_next(after_linearize(out, done.metrics))
