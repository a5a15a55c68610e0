"""`sima bench`: measure, write rows, print tables."""

from pathlib import Path
from typing import Annotated

import typer

from sima_attn.cli._shared import Seconds, console, print_table, progress_bar

app = typer.Typer(help="Measure, write rows, print tables.", no_args_is_help=True)


@app.command("cpu")
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
    with progress_bar() as progress:
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
        title = f"Speed against softmax, {count} thread{'s' * (count > 1)}, {rows[0].device}"
        print_table(cpu_table(rows, count), title, caption="GFLOP/s are SimA's; matmul is a 1024^3 product")
    console.print(f"Rows: {out}", highlight=False)


@app.command("table")
def bench_table_command(
    rows_file: Annotated[Path, typer.Argument(help="CSV file that `sima bench cpu` wrote.")] = Path(
        "benchmarks/results/cpu.csv"
    ),
    threads: Annotated[int, typer.Option(help="Which thread count to show.")] = 1,
) -> None:
    """Print the rows of the CPU benchmark as the Markdown table of the README."""
    from sima_attn.bench.cpu import CpuRow
    from sima_attn.bench.rows import read_rows
    from sima_attn.bench.tables import cpu_table

    print(cpu_table(read_rows(rows_file, CpuRow), threads).markdown())
