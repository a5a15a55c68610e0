"""`sima reproduce`: the paper's comparisons, run again."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sima_attn._devices import resolve_device
from sima_attn._files import atomic_write
from sima_attn.cli._shared import console, print_table, progress_bar
from sima_attn.cli.train import check_installed
from sima_attn.train.stopping import RunInterrupted

if TYPE_CHECKING:
    from sima_attn.reproduce.dino import DinoResultRow

app = typer.Typer(help="Run the paper's comparisons again.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Run the paper's comparisons again."""


@app.command("miniature")
def miniature_command(
    data: Annotated[str, typer.Option(help="Folder of 64-pixel images, e.g. Tiny ImageNet.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs, rows, tables and the figure.")] = Path(
        "runs/miniature"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Name of a run; repeat for several. Default: all.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of every run.", min=2, show_default="60")] = None,
    seeds: Annotated[
        list[int], typer.Option("--seed", help="Seeds of the headline pair; the others take the first. Repeat.")
    ] = [0, 1],  # noqa: B006
    jobs: Annotated[int, typer.Option(help="Runs side by side on the one device.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """The paper's ablations on small images: one run each, tables and a figure. Start it again to go on."""
    check_installed()
    from sima_attn.data import open_data
    from sima_attn.report.figures import check_can_plot
    from sima_attn.reproduce.miniature import make_runs, planned_runs, read_collected
    from sima_attn.reproduce.miniature_report import plot_miniature, results_table, sizes_table

    runs = planned_runs(only or (), epochs=epochs, seeds=seeds)
    check_can_plot()
    open_data(data, "train")  # wrong data are named before anything runs
    make = partial(make_runs, runs, out, data, device=resolve_device(device), jobs=jobs)
    follow(make, len(runs), jobs, lambda row: outcome(row.top1, row.status, row.seconds))
    results, sizes, curves = read_collected(out)
    tables = [results_table(results)] + ([sizes_table(sizes)] if sizes else [])
    with atomic_write(out / "tables.md") as temporary:
        temporary.write_text("\n\n".join(table.markdown() for table in tables) + "\n")
    plot_miniature(results, curves, out / "miniature.png")
    print_table(tables[0], title="Here, and in the paper (ImageNet)")
    if sizes:
        print_table(tables[1], title="Top-1 at other image sizes")
    console.print(f"Rows, tables.md and miniature.png: {out}", highlight=False, soft_wrap=True)


def follow(make: Callable[..., Any], count: int, jobs: int, outcome: Callable[[Any], str]) -> None:
    """Make the runs of a grid and say what became of each; alone, every run shows a bar of its own."""
    try:
        _follow(make, count, jobs, outcome)
    except RunInterrupted:
        console.print("Start the same command again to resume the grid.", highlight=False)
        raise


def _follow(make: Callable[..., Any], count: int, jobs: int, outcome: Callable[[Any], str]) -> None:
    if jobs == 1:
        numbers = itertools.count(1)

        def started(run: Any) -> None:
            console.print(f"run {next(numbers)} of {count}: {run.folder} ({run.about})", highlight=False)

        for _, row in make(on_start=started):
            console.print(f"  {outcome(row)}", highlight=False)
        return
    with progress_bar() as bar:
        task = bar.add_task(f"{jobs} runs at a time", total=count)
        for run, row in make():
            bar.update(task, advance=1)
            bar.console.print(f"{run.folder}: {outcome(row)}", highlight=False)


def outcome(top1: float, status: str, seconds: float) -> str:
    """What became of a run, in a few words."""
    return f"top-1 {top1:.2f}, {seconds:.0f} s" if status == "finished" else f"{status}, {seconds:.0f} s"


@app.command("dino")
def dino_command(
    data: Annotated[str, typer.Option(help="Folder of 64-pixel images, e.g. Tiny ImageNet.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs, rows, the table and the figure.")] = Path(
        "runs/dino-miniature"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Name of a run; repeat for several. Default: all.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of every run.", min=1, show_default="100")] = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side on the one device.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """The paper's self-supervised comparison on small images: a table and a figure. Start it again to go on."""
    check_installed()
    from sima_attn.data import open_data
    from sima_attn.report.figures import check_can_plot
    from sima_attn.reproduce.dino import make_dino_runs, planned_dino_runs, read_collected_dino
    from sima_attn.reproduce.dino_report import dino_curve_table, dino_table, plot_dino

    runs = planned_dino_runs(only or (), epochs=epochs)
    check_can_plot()
    for split in ("train", "val"):
        open_data(data, split)  # wrong data are named before anything runs
    make = partial(make_dino_runs, runs, out, data, device=resolve_device(device), jobs=jobs)
    follow(make, len(runs), jobs, dino_outcome)
    results, curves = read_collected_dino(out)
    table = dino_table(results)
    with atomic_write(out / "tables.md") as temporary:
        tables = [table, *(dino_curve_table(curves, length) for length in sorted({row.epochs for row in curves}))]
        temporary.write_text("\n\n".join(t.markdown() for t in tables) + "\n")
    plot_dino(results, curves, out / "dino.png")
    print_table(table, title="Frozen features here, and in the paper (ImageNet)")
    console.print(f"Rows, tables.md and dino.png: {out}", highlight=False, soft_wrap=True)


def dino_outcome(row: "DinoResultRow") -> str:
    """What became of a run of DINO, in a few words."""
    found = f"k-NN {row.knn_top1:.2f}, linear {row.linear_top1:.2f}" if row.status == "finished" else row.status
    return f"{found}, {row.seconds:.0f} s of training"
