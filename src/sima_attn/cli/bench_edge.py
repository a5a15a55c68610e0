"""`sima bench edge`, `paper-edge` and `paper-gpu`: whole models on this processor, and the paper's own protocols."""

from pathlib import Path
from typing import Annotated

import typer

from sima_attn.cli._shared import (
    BENCH_FOLDER,
    FigureFile,
    RowsFile,
    Seconds,
    Threads,
    console,
    print_table,
    progress_bar,
)

app = typer.Typer()


@app.command("edge")
def bench_edge_command(
    out: RowsFile = BENCH_FOLDER / "edge.csv",
    figure: FigureFile = BENCH_FOLDER / "edge.png",
    files: Annotated[Path, typer.Option(help="Folder for the .onnx files, kept for the next run.")] = Path("runs/edge"),
    model: Annotated[
        list[str] | None,
        typer.Option(help="xcit_mini (weights come with the package), deit_tiny, deit_small, xcit_tiny; repeat. All."),
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(help="Image side in pixels; repeat. xcit_mini: 64, 128; others: 224, 512.")
    ] = None,
    threads: Threads = [1, 2],  # noqa: B006
    precision: Annotated[list[str], typer.Option(help="fp32, int8; repeat.")] = ["fp32", "int8"],  # noqa: B006
    runtime: Annotated[
        list[str] | None, typer.Option(help="onnxruntime, openvino; repeat. All that are installed.")
    ] = None,
    seconds: Seconds = 20.0,
) -> None:
    """Whole models against their SimA twins in ONNX Runtime and OpenVINO: time, memory, size."""
    from sima_attn.bench.edge import FAMILIES, bench_edge, check_choice, edge_table, is_busy
    from sima_attn.bench.figures import plot_edge
    from sima_attn.export.onnx import check_installed
    from sima_attn.report.figures import check_can_plot
    from sima_attn.report.rows import write_rows

    check_installed()
    check_can_plot()
    if is_busy():
        console.print("[yellow]This machine is busy: the times will be too long, and the ratios may be off.[/yellow]")
    names = model or list(FAMILIES)
    check_choice("family", names, FAMILIES)
    rows = []
    with progress_bar() as progress:
        sizes = [size or FAMILIES[name].sizes for name in names]
        task = progress.add_task("starting", total=sum(map(len, sizes)) * len(threads))
        for measured in bench_edge(
            files,
            families=names,
            sizes=size,
            threads=threads,
            precisions=precision,
            wanted_runtimes=runtime,
            seconds=seconds,
            on_step=lambda what: progress.update(task, description=what),
        ):
            rows += measured
            write_rows(out, rows)
            progress.advance(task)
    plot_edge(rows, figure)
    for count in threads:
        title = f"One image, {count} thread{'s' * (count > 1)}, {rows[0].device}"
        print_table(edge_table(rows, count), title)
    console.print("speed: against the fp32 twin in the same runtime; exp: exp-like nodes in the file", highlight=False)
    console.print(f"Rows:   {out}\nFigure: {figure}", highlight=False, soft_wrap=True)


@app.command("paper-edge")
def bench_paper_edge_command(
    out: RowsFile = BENCH_FOLDER / "paper_edge.csv",
    runs: Annotated[int, typer.Option(help="Runs of every attention.", min=1)] = 1000,
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 1,
) -> None:
    """Table 3 and Figure 1 of the paper on this processor: attention cores, order pinned as the paper pins it."""
    from sima_attn.bench.paper_edge import CASES, bench_paper_edge, paper_edge_table
    from sima_attn.report.rows import write_rows

    groups = []
    with progress_bar() as progress:
        task = progress.add_task("Table 3", total=runs * len(CASES))
        for measured in bench_paper_edge(runs=runs, threads=threads, on_run=lambda: progress.advance(task)):
            groups.append(measured)
    write_rows(out, [row for rows in groups for row in rows])
    for rows in groups:
        first = rows[0]
        shape = f"{first.H} heads, N = {first.N}, D = {first.D}"
        print_table(paper_edge_table(rows), f"{shape}, {first.device}, {threads} thread{'s' * (threads > 1)}")
    console.print(
        "speed: against vanilla here; ours: norms folded, order free; paper: milliseconds of its Table 3",
        highlight=False,
    )
    console.print(f"Rows: {out}", highlight=False, soft_wrap=True)


@app.command("paper-gpu")
def bench_paper_gpu_command(
    out: RowsFile = BENCH_FOLDER / "paper_gpu.csv",
    seconds: Seconds = 1.0,
) -> None:
    """Figure A1 of the paper on a CUDA device: sweeps over resolution and width, order pinned, batch 8."""
    from sima_attn.bench.paper_edge import SWEEPS, bench_paper_gpu, paper_gpu_table
    from sima_attn.report.cuda_timing import check_cuda
    from sima_attn.report.rows import write_rows

    check_cuda()
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("Figure A1", total=sum(len(sweep.shapes) for sweep in SWEEPS))
        for measured in bench_paper_gpu(seconds=seconds):
            rows += measured
            write_rows(out, rows)
            progress.update(task, advance=1, description=f"{measured[0].sweep} {measured[0].grows}")
    print_table(paper_gpu_table(rows), title=f"Figure A1, {rows[0].device}, float32, batch {rows[0].B}")
    console.print(f"Rows: {out}", highlight=False, soft_wrap=True)
