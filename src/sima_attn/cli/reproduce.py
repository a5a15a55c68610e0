"""`sima reproduce`: the paper's comparisons, run again."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from sima_attn._devices import resolve_device
from sima_attn._files import atomic_write
from sima_attn.cli import _options as option
from sima_attn.cli._shared import console, print_table, progress_bar, teller
from sima_attn.cli.train import check_installed
from sima_attn.report.figures import check_can_plot
from sima_attn.train.stopping import RunInterrupted

if TYPE_CHECKING:
    from sima_attn.reproduce.grid import Grid

app = typer.Typer(help="Run the paper's comparisons again.", no_args_is_help=True)

DataFolder = Annotated[str, Option(help="Folder of 64-pixel images, e.g. Tiny ImageNet.")]
OutFolder = Annotated[Path, option.folder("Folder for the runs, rows, tables and the figure.")]
RunNames = Annotated[list[str] | None, Option(help="Name of a run; repeat for several. Default: all.")]
Jobs = Annotated[int, Option(help="Number of runs that share the device.", min=1)]


@app.command("miniature")
def miniature_command(
    data: DataFolder,
    out: OutFolder = Path("runs/miniature"),
    only: RunNames = None,
    epochs: Annotated[int | None, Option(help="Epochs of each run.", min=2, show_default="60")] = None,
    seeds: Annotated[
        list[int], Option("--seed", help="Seeds of the headline pair; other runs use the first. Repeat.")
    ] = [0, 1],  # noqa: B006
    jobs: Jobs = 1,
    device: option.Device = "auto",
) -> None:
    """The paper's ablations on small images: tables and a figure. Run the same command again to resume."""
    check_installed()
    from sima_attn.reproduce import miniature, miniature_report

    runs = miniature.planned_runs(only or (), epochs=epochs, seeds=seeds)
    run_grid(miniature.GRID, lambda: runs, out, data, device, jobs, miniature_report, out / "miniature.png")


@app.command("fair")
def fair_command(
    data: DataFolder,
    out: OutFolder = Path("runs/fair"),
    only: Annotated[list[str] | None, Option(help="Name of a method; repeat for several. Default: all.")] = None,
    epochs: Annotated[int, Option(help="Epochs of each run.", min=2)] = 60,
    seeds: Annotated[
        list[int], Option("--seed", help="Seeds of the best settings; the sweep has the lowest. Repeat.")
    ] = [0, 1, 2],  # noqa: B006
    jobs: Jobs = 1,
    device: option.Device = "auto",
) -> None:
    """Each attention at the best setting of one sweep, with several seeds. Run the same command again to resume."""
    check_installed()
    from sima_attn.reproduce import fair

    grid = fair.FAIR_GRID

    def wanted() -> list[Any]:  # depends on the results so far
        return fair.next_runs(grid.read_collected(out)[0], epochs=epochs, seeds=seeds, only=only or ())

    run_grid(grid, wanted, out, data, device, jobs, fair, out / "fair.png")


@app.command("dino")
def dino_command(
    data: DataFolder,
    out: OutFolder = Path("runs/dino-miniature"),
    only: RunNames = None,
    epochs: Annotated[int | None, Option(help="Epochs of each run.", min=1, show_default="100")] = None,
    jobs: Jobs = 1,
    device: option.Device = "auto",
) -> None:
    """The paper's self-supervised comparison on small images: tables and a figure. Run it again to resume."""
    check_installed()
    from sima_attn.reproduce import dino, dino_report

    runs = dino.planned_dino_runs(only or (), epochs=epochs)
    run_grid(dino.GRID, lambda: runs, out, data, device, jobs, dino_report, out / "dino.png")


def run_grid(
    grid: "Grid",
    wanted: Callable[[], list[Any]],
    out: Path,
    data: str,
    device: str,
    jobs: int,
    report: Any,
    figure: Path,
) -> None:
    """Make the runs, then write and print the tables and the figure of all finished runs; also if it is interrupted.

    Args:
        wanted: Returns the runs to make, see `Grid.make_runs`.
        report: Module with `tables` and `plot` for the grid's rows.
    """
    from sima_attn.data.splits import open_data
    from sima_attn.reproduce.grid import RESULTS

    check_can_plot()
    for split in ("train", "val"):
        open_data(data, split)  # raises for wrong data before anything runs
    try:
        make_runs(grid, wanted, out, data, resolve_device(device), jobs)
    except RunInterrupted:
        if (out / RESULTS).exists():
            write_report(grid, out, report, figure)
        console.print("Run the same command again to resume the grid.")
        raise
    write_report(grid, out, report, figure)


def write_report(grid: "Grid", out: Path, report: Any, figure: Path) -> None:
    """Write and print the tables and the figure of the runs that are finished."""
    rows = grid.read_collected(out)
    tables = report.tables(*rows)
    with atomic_write(out / "tables.md") as temporary:
        temporary.write_text("\n\n".join(table.markdown() for table in tables.values()) + "\n")
    report.plot(*rows, figure)
    for title, table in tables.items():
        print_table(table, title=title)
    console.print(f"Rows, tables.md and {figure.name}: {out}")


def make_runs(grid: "Grid", wanted: Callable[[], list[Any]], out: Path, data: str, device: str, jobs: int) -> None:
    """Make the runs and print the result of each. One at a time, each run shows its own progress bar."""
    made: set[str] = set()

    def total() -> int:  # known so far
        return len(made.union(run.folder for run in wanted()))

    if jobs == 1:

        def announce(run: Any) -> None:
            console.print(f"run {len(made) + 1} of {total()}: {run.folder} ({run.about})")

        for run, row in grid.make_runs(wanted, out, data, device=device, on_start=announce):
            made.add(run.folder)
            console.print(f"  {row.summary()}")
        return
    with progress_bar() as bar:
        task = bar.add_task(f"{jobs} runs at a time", total=total())
        for run, row in grid.make_runs(wanted, out, data, device=device, jobs=jobs):
            made.add(run.folder)
            bar.update(task, completed=len(made), total=total())
            teller(bar.console)(f"{run.folder}: {row.summary()}")
