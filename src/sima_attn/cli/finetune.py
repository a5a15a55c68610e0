"""`sima finetune`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from typer import Option

from sima_attn.cli import _options as option
from sima_attn.cli._next import after_run, say_next
from sima_attn.cli._shared import console, is_first_process
from sima_attn.cli.train import check_installed

app = typer.Typer()


@app.command("finetune")
@option.takes_model
def finetune_command(
    model: option.Model = None,
    data: Annotated[str | None, Option(help="Folder of images, CLASS/*.jpg; or digits.")] = None,
    out: Annotated[Path, option.folder("Folder of the run.")] = Path("runs/finetune"),
    attention: Annotated[
        str | None, Option(help="Build the model with this attention, e.g. sima.", show_default="the model's")
    ] = None,
    pretrained: Annotated[
        bool, Option("--pretrained", help="Download the weights that timm knows for the name.")
    ] = False,
    weights: option.Weights = None,
    epochs: Annotated[int | None, Option(help="Default: by the number of images.", min=1)] = None,
    batch: Annotated[int | None, Option(help="Images per step. Default: by their number.", min=1)] = None,
    size: Annotated[int | None, Option(help="Side of the images. Default: the model's.", min=1)] = None,
    freeze: Annotated[str | None, Option(help="backbone or all-but-attention: weights that keep their values.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate of the classifier.", show_default="5e-4")] = None,
    val: option.HeldOut = None,
    teacher: option.Teacher = None,
    overrides: option.Settings = None,
    resume: option.Resume = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
) -> None:
    """Fine-tune a trained model on your images. Runs on all processes of torchrun; --resume after a stop."""
    check_installed()
    from sima_attn.train.finetune import finetune

    done = finetune(
        model,
        data,
        out,
        attention=attention,
        weights=weights,
        pretrained=pretrained or None,
        epochs=epochs,
        batch=batch,
        size=size,
        freeze=freeze,
        lr=lr,
        val=val,
        overrides=[
            *(overrides or []),
            *(f"{name}={value}" for name, value in (("run.precision", precision), ("teacher.path", teacher)) if value),
        ],
        resume=resume,
        device=device,
    )
    if not is_first_process():
        return
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in done.metrics.items())
    when = f"after epoch {done.epoch:g}" if done.epoch else "at the start, which no epoch has improved"
    console.print(Text.assemble((numbers, "bold"), f" {when}; {done.summary.seconds:.0f} s"))
    console.print(f"Run: {out} (best weights, eval.csv, learning_curve.png)")
    say_next(after_run(out, done.metrics))
