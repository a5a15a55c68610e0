"""`sima bench edge`, `paper-edge` and `paper-gpu`: whole models on this processor, and the paper's protocols."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from sima_attn.cli import _options as option
from sima_attn.cli._shared import console, print_table
from sima_attn.cli.bench import measure, print_paths
from sima_attn.report.figures import check_can_plot

app = typer.Typer()


@app.command("edge")
def bench_edge_command(
    out: option.RowsFile = option.BENCH_FOLDER / "edge.csv",
    figure: option.FigureFile = option.BENCH_FOLDER / "edge.png",
    files: Annotated[Path, Option(help="Folder for the .onnx files, reused by later runs.")] = Path("runs/edge"),
    model: Annotated[
        list[str] | None, Option(help="xcit_mini (trained), deit_tiny, deit_small, xcit_tiny; repeat. Default: all.")
    ] = None,
    size: Annotated[list[int] | None, Option(help="Image sides; repeat. Default: 224, 512; xcit_mini 64, 128.")] = None,
    threads: option.Threads = [1, 2],  # noqa: B006
    precision: Annotated[list[str], Option(help="fp32, int8; repeat.")] = ["fp32", "int8"],  # noqa: B006
    runtime: Annotated[
        list[str] | None, Option(help="onnxruntime, openvino; repeat. Default: those installed.")
    ] = None,
    seconds: option.Seconds = 20.0,
) -> None:
    """Whole models against their SimA twins in ONNX Runtime and OpenVINO: time, memory, size."""
    from sima_attn.bench.edge import FAMILIES, bench_edge, check_choice, edge_table, is_busy
    from sima_attn.bench.figures import plot_edge
    from sima_attn.export.onnx import check_installed

    check_installed()
    check_can_plot()
    if is_busy():
        console.print("[yellow]This machine is busy: times will be too long, and ratios may be wrong.[/yellow]")
    names = model or list(FAMILIES)
    check_choice("family", names, FAMILIES)
    rows = measure(
        lambda show: bench_edge(
            files,
            families=names,
            sizes=size,
            threads=threads,
            precisions=precision,
            wanted_runtimes=runtime,
            seconds=seconds,
            on_step=show,
        ),
        out,
        sum(len(size or FAMILIES[name].sizes) for name in names) * len(threads),
    )
    plot_edge(rows, figure)
    for count in threads:
        print_table(edge_table(rows, count), f"One image, {count} thread{'s' * (count > 1)}, {rows[0].device}")
    console.print("speed: relative to the fp32 twin in the same runtime; exp: exp-like nodes")
    print_paths(rows=out, figure=figure)


@app.command("paper-edge")
def bench_paper_edge_command(
    out: option.RowsFile = option.BENCH_FOLDER / "paper_edge.csv",
    runs: Annotated[int, Option(help="Runs of each attention.", min=1)] = 1000,
    threads: Annotated[int, Option(help="Number of threads.", min=1)] = 1,
) -> None:
    """Table 3 and Figure 1 of the paper on this processor: attention cores, with the paper's fixed order."""
    from sima_attn.bench.paper_edge import CASES, bench_paper_edge, paper_edge_table

    rows = measure(lambda show: bench_paper_edge(runs=runs, threads=threads), out, len(CASES))
    for case in CASES:
        shape = f"{rows[0].H} heads, N = {case.N}, D = {case.D}"
        title = f"{shape}, {rows[0].device}, {threads} thread{'s' * (threads > 1)}"
        print_table(paper_edge_table([row for row in rows if row.N == case.N]), title)
    console.print("speed: relative to vanilla here; ours: norms folded, order free; paper: milliseconds of Table 3")
    print_paths(rows=out)


@app.command("paper-gpu")
def bench_paper_gpu_command(
    out: option.RowsFile = option.BENCH_FOLDER / "paper_gpu.csv",
    seconds: option.Seconds = 1.0,
) -> None:
    """Figure A1 of the paper on a CUDA device: sweeps over resolution and width, fixed order, batch 8."""
    from sima_attn.bench.paper_edge import SWEEPS, bench_paper_gpu, paper_gpu_table
    from sima_attn.report.cuda_timing import check_cuda

    check_cuda()
    rows = measure(lambda show: bench_paper_gpu(seconds=seconds), out, sum(len(sweep.shapes) for sweep in SWEEPS))
    print_table(paper_gpu_table(rows), title=f"Figure A1, {rows[0].device}, float32, batch {rows[0].B}")
    print_paths(rows=out)
