"""The command `sima`: one thin function a command. Heavy imports wait until a command runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sima_attn._version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sima_attn.bench.demo import DemoRow

app = typer.Typer(
    name="sima",
    help="Vision transformers without a single exp().",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Measure, write rows, print tables.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
# A table needs its width even where the output is not a terminal.
console = Console() if Console().is_terminal else Console(width=120)

Seconds = Annotated[float, typer.Option(help="Time for each group of measurements.", min=0.0)]


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"sima-attn {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Vision transformers without a single exp()."""


def _progress_bar() -> Progress:
    columns = (TextColumn("[bold]{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the rows and the figure.")] = Path("runs/demo"),
    seconds: Seconds = 3.0,
) -> None:
    """Compare every attention on this machine: parity, exp() calls, MACs, speed against softmax."""
    from sima_attn.bench.demo import TOKENS, run_demo
    from sima_attn.bench.figures import check_can_plot, plot_time_against_tokens
    from sima_attn.bench.rows import write_rows
    from sima_attn.nn import ATTENTIONS

    check_can_plot()
    with _progress_bar() as progress:
        task = progress.add_task("starting", total=len(ATTENTIONS) + len(TOKENS))
        done = -1

        def step(what: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=what)

        rows = run_demo(seconds=seconds, on_step=step)
        step("done")

    write_rows(out / "rows.csv", rows)
    plot_time_against_tokens(rows, out / "time_against_tokens.png")
    console.print(_demo_table(rows))
    orders = ", ".join(f"{row.order} at N = {row.N}" for row in rows if row.attention == "sima")
    console.print(f"SimA took the cheaper order of its products: {orders}.", highlight=False)
    console.print(
        f"Figure: {out / 'time_against_tokens.png'}    Rows: {out / 'rows.csv'}", highlight=False, soft_wrap=True
    )


def _demo_table(rows: "Sequence[DemoRow]") -> Table:
    from sima_attn.bench.demo import COUNTED_TOKENS

    first, tokens = rows[0], sorted({row.N for row in rows})
    table = Table(
        title=f"{first.H} heads of {first.D} channels, float32, {first.threads} threads, {first.device}",
        caption=f"exp(), MACs and error at N = {COUNTED_TOKENS}; speed against fused softmax, higher is faster",
    )
    table.add_column("attention", no_wrap=True)
    for heading in ("error", "exp()", "in paper", "MMACs", *(f"N={n}" for n in tokens)):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in dict.fromkeys(row.attention for row in rows):
        mine = {row.N: row for row in rows if row.attention == name}
        counted = mine[COUNTED_TOKENS]
        speeds = [f"{mine[n].speedup:.2f}x" if mine[n].speedup < 10 else f"{mine[n].speedup:.0f}x" for n in tokens]
        facts = [f"{counted.error:.0e}", f"{counted.exps:,}", counted.exps_in_paper, f"{counted.macs / 1e6:.1f}"]
        table.add_row(name, *facts, *speeds, style="bold green" if name == "sima" else None)
    return table


@bench_app.command("cpu")
def bench_cpu_command(
    out: Annotated[Path, typer.Option(help="CSV file for the rows.")] = Path("benchmarks/results/cpu.csv"),
    threads: Annotated[list[int], typer.Option(help="Thread counts; repeat for several.")] = [1, 2],  # noqa: B006
    seconds: Seconds = 6.0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile too.")] = True,
) -> None:
    """SimA's attention core against torch's softmax attention and the paper's code, on the CPU."""
    from sima_attn.bench.cpu import CASES, bench_cpu, can_compile
    from sima_attn.bench.rows import write_rows
    from sima_attn.bench.tables import cpu_table

    if compiled and not can_compile():
        console.print("[yellow]There is no C++ compiler here: torch.compile is left out.[/yellow]")
        compiled = False
    rows = []
    with _progress_bar() as progress:
        task = progress.add_task("starting", total=len(threads) * len(CASES))
        for count in threads:
            measured = bench_cpu(threads=count, seconds=seconds, compiled=compiled)
            for case in CASES:
                progress.update(task, description=f"{count} threads, {case}")
                rows += next(measured)
                progress.advance(task)
            measured.close()
    write_rows(out, rows)
    for count in threads:
        header, cells = cpu_table(rows, count)
        table = Table(*header, title=f"Speed against softmax, {count} thread{'s' * (count > 1)}, {rows[0].device}")
        for line in cells:
            table.add_row(*(cell.strip("*") for cell in line))
        console.print(table)
    console.print(f"Rows: {out}", highlight=False)


@bench_app.command("table")
def bench_table_command(
    rows_file: Annotated[Path, typer.Argument(help="CSV file that `sima bench cpu` wrote.")] = Path(
        "benchmarks/results/cpu.csv"
    ),
    threads: Annotated[int, typer.Option(help="Which thread count to show.")] = 1,
) -> None:
    """Print the rows of the CPU benchmark as the Markdown table of the README."""
    from sima_attn.bench.cpu import CpuRow
    from sima_attn.bench.rows import read_rows
    from sima_attn.bench.tables import cpu_table, markdown

    print(markdown(*cpu_table(read_rows(rows_file, CpuRow), threads)))


def main() -> None:
    """Run the command line; an error the user can mend is one line, without a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        Console(stderr=True).print(f"[bold red]error:[/bold red] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
