"""`sima demo`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from sima_attn._install import install_command
from sima_attn.cli import _options as option
from sima_attn.cli._shared import console, print_table
from sima_attn.report.figures import check_can_plot
from sima_attn.report.rows import write_rows

app = typer.Typer()
# Photos of scikit-image, and what they show. Only the cat is among the 100 classes of the shipped model (tabby,
# Egyptian cat, Persian cat); the cup shows the output for an unknown class.
PHOTOS = {"chelsea": "a cat", "coffee": "a cup of coffee, which is not one of its classes"}
DRAWN = "chelsea"


@app.command()
def demo(
    out: Annotated[Path, option.folder("Folder for the runs, rows and figures.")] = Path("runs/demo"),
    attentions: Annotated[
        bool, Option("--attentions", help="Compare all attentions instead: parity, exp(), MACs, speed.")
    ] = False,
    seconds: Annotated[
        float | None, Option(help="With --attentions, time for each number of tokens.", min=0.0, show_default="3")
    ] = None,
) -> None:
    """Train the same small model with SimA and with softmax, compare them; classify two photos, draw a heat map."""
    if attentions:
        compare_attentions(out, 3.0 if seconds is None else seconds)
        return
    if seconds is not None:
        raise ValueError("--seconds applies only with --attentions")
    from sima_attn.cli.train import check_installed

    check_installed()
    compare_twins(out)
    show_photos(out)


def compare_twins(out: Path) -> None:
    """Train both on the digits; print a table, and write rows, curves and a figure."""
    from sima_attn.bench.demo import train_twins, twins_table
    from sima_attn.bench.figures import plot_twins

    check_can_plot()
    console.print("Two small vision transformers learn scikit-learn's digits: the same recipe, one word changed.")
    rows = train_twins(out, on_twin=lambda name: console.print(f"Training with model.attention={name}"))
    figure = out / "twins.png"
    write_rows(out / "twins.csv", rows)
    plot_twins(rows, out, figure)
    print_table(
        twins_table(rows),
        title="The same recipe, one word changed: model.attention",
        caption=f"accuracy on the test digits; exp() evaluations per image; one thread, {rows[0].device}",
    )
    console.print("With sima, the whole network evaluates no exp(). The number of parameters is the same.")
    curves = ", ".join(str(out / row.attention / "learning_curve.png") for row in rows)
    console.print(f"Figure: {figure}\nCurves: {curves}\nRows:   {out / 'twins.csv'}")


def show_photos(out: Path) -> None:
    """Classify two photos of scikit-image with the shipped model, and draw a heat map."""
    from importlib.util import find_spec

    from PIL import Image

    from sima_attn.cli.classify import print_answer
    from sima_attn.explain.answer import classify
    from sima_attn.explain.gallery import Gallery
    from sima_attn.explain.photo_model import load_photo_model

    if find_spec("skimage") is None:
        console.print(f"The photos need scikit-image, which is not installed: {install_command('data')}")
        return
    from skimage import data

    model = load_photo_model()
    console.print(f"Classifying two photos of scikit-image with {model.name}, the trained model in this package:")
    photos = {name: Image.fromarray(getattr(data, name)()) for name in PHOTOS}
    for name, photo in photos.items():
        print_answer(f"{name} ({PHOTOS[name]})", classify(model, photo))
    drawn = Gallery([model]).write_one(photos[DRAWN], DRAWN, out / "heatmap.png")
    console.print(f"Heat map of {DRAWN}: {drawn}")


def compare_attentions(out: Path, seconds: float) -> None:
    """Compare all attentions of the registry on this machine: rows, a figure and a table."""
    from sima_attn.bench.demo import COUNTED_TOKENS, run_demo
    from sima_attn.bench.figures import plot_time_against_tokens
    from sima_attn.bench.tables import demo_table

    check_can_plot()
    with Console(stderr=True).status("starting") as status:
        rows = run_demo(seconds=seconds, on_step=status.update)
    write_rows(out / "rows.csv", rows)
    figure = out / "time_against_tokens.png"
    plot_time_against_tokens(rows, figure)
    first = rows[0]
    print_table(
        demo_table(rows, COUNTED_TOKENS),
        title=f"{first.H} heads of {first.D} channels, float32, {first.threads} threads, {first.device}",
        caption=f"exp(), MACs and error at N = {COUNTED_TOKENS}; speed relative to fused softmax, higher is faster",
    )
    orders = ", ".join(f"{row.order} at N = {row.N}" for row in rows if row.attention == "sima")
    console.print(f"SimA selected the cheaper order of its products: {orders}.")
    console.print(f"Figure: {figure}\nRows:   {out / 'rows.csv'}")
