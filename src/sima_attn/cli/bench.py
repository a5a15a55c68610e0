"""`sima bench`: measure, write rows, print tables."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from sima_attn._errors import check_known
from sima_attn.cli import _options as option
from sima_attn.cli._shared import console, print_table, progress_bar
from sima_attn.report.figures import check_can_plot
from sima_attn.report.rows import merge_rows, read_rows, write_rows

Update = Annotated[bool, Option("--update", help="Keep rows of other cases in the file.")]

app = typer.Typer(help="Measure, write rows, print tables.", no_args_is_help=True)


def measure(
    groups: Callable[[Callable[[str], None]], Iterable[list[Any]]],
    out: Path,
    total: int,
    *,
    merge: Callable[[list[Any], list[Any]], list[Any]] = lambda rows, new: rows + new,
    rows: list[Any] | None = None,
) -> list[Any]:
    """Measure groups of rows under a progress bar; the file is written after each, so an interruption keeps it.

    `groups` takes a function that sets the text of the progress bar. `merge` adds new rows to those so far.
    """
    rows = rows or []
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=total)
        for new in groups(lambda text: progress.update(task, description=text)):
            rows = merge(rows, new)
            write_rows(out, rows)
            progress.advance(task)
    return rows


def print_paths(**paths: Path) -> None:
    """Where the results are: rows, figure."""
    for kind, path in paths.items():
        console.print(f"{kind.capitalize()}: {path}")


@app.command("cpu")
def bench_cpu_command(
    out: option.RowsFile = option.BENCH_FOLDER / "cpu.csv",
    threads: option.Threads = [1, 2],  # noqa: B006
    seconds: option.Seconds = 6.0,
    compiled: Annotated[bool, Option("--compile/--no-compile", help="Also time torch.compile.")] = True,
) -> None:
    """SimA's attention core against softmax and the paper's code on the CPU: forward, and forward + backward."""
    from sima_attn.bench.cores import DIRECTIONS
    from sima_attn.bench.cpu import CASES, bench_cpu, can_compile
    from sima_attn.bench.tables import cpu_table

    if compiled and not can_compile():
        console.print("No C++ compiler was found: torch.compile is skipped.", style="yellow")
        compiled = False

    def groups(show: Callable[[str], None]) -> Iterable[list[Any]]:
        for count in threads:
            show(f"{count} thread{'s' * (count > 1)}")
            yield from bench_cpu(threads=count, seconds=seconds, compiled=compiled)

    rows = measure(groups, out, len(threads) * len(CASES))
    for count in threads:
        for direction in DIRECTIONS:
            title = f"Speed relative to softmax, {direction}, {count} thread{'s' * (count > 1)}, {rows[0].device}"
            caption = "GFLOP/s are SimA's; matmul is a 1024^3 product"
            print_table(cpu_table(rows, count, direction), title, caption=caption)
    print_paths(rows=out)


@app.command("gpu")
def bench_gpu_command(
    out: option.RowsFile = option.BENCH_FOLDER / "gpu.csv",
    figure: option.FigureFile = option.BENCH_FOLDER / "gpu.png",
    shape: Annotated[
        list[str] | None, Option(metavar="B,N,H,D", help="Shapes, e.g. 256,196,6,64; repeat for several. Default: all.")
    ] = None,
    dtype: Annotated[list[str] | None, Option(help="bfloat16, float16, float32; repeat. Default: all.")] = None,
    update: Update = False,
    seconds: option.Seconds = 0.3,
) -> None:
    """SimA's fused kernels against flash and cuDNN softmax, the paper's code, XCA and ELU, on a CUDA device."""
    from sima_attn.bench.cores import DIRECTIONS
    from sima_attn.bench.figures import plot_gpu
    from sima_attn.bench.gpu import FIGURE_CASES, GpuRow, bench_gpu, select_cases
    from sima_attn.bench.tables import dtype_table, gpu_table
    from sima_attn.report.cuda_timing import check_cuda

    cases = select_cases(shapes=shape, dtypes=dtype)
    check_cuda()
    check_can_plot()
    old = read_rows(out, GpuRow) if update and out.exists() else []
    rows = measure(lambda show: bench_gpu(cases, seconds=seconds), out, len(cases), merge=merge_rows, rows=old)
    for direction in DIRECTIONS:
        print_table(gpu_table(rows, direction), f"{direction}, microseconds, bfloat16, {rows[0].device}")
    print_table(dtype_table(rows), f"other dtypes, microseconds, {rows[0].device}")
    print_paths(rows=out)
    if {row.shape for row in rows} >= {(case.B, case.N, case.H, case.D) for case in FIGURE_CASES}:
        plot_gpu(rows, figure)
        print_paths(figure=figure)


@app.command("call-overhead")
def bench_call_overhead_command(
    out: option.RowsFile = option.BENCH_FOLDER / "call_overhead.csv", seconds: option.Seconds = 2.0
) -> None:
    """CPU time per call of the attention operator on a CUDA device, against torch's softmax attention."""
    from sima_attn.bench.call_overhead import SHAPES, bench_call_overhead
    from sima_attn.bench.tables import call_overhead_table, targets_table
    from sima_attn.report.cuda_timing import check_cuda

    check_cuda()
    rows = measure(lambda show: bench_call_overhead(seconds=seconds), out, 2 * len(SHAPES))
    print_table(call_overhead_table(rows), f"CPU time per call, bfloat16, {rows[0].cpu}, {rows[0].device}")
    print_table(targets_table([], rows), "Targets: ratio = softmax time / SimA time")
    print_paths(rows=out)


@app.command("model")
def bench_model_command(
    out: option.RowsFile = option.BENCH_FOLDER / "model.csv",
    model: Annotated[list[str] | None, Option(help="deit or xcit; repeat for both. Default: both.")] = None,
    mode: Annotated[
        list[str] | None, Option(help="eager, compile, reduce-overhead or graph; repeat for several. Default: all.")
    ] = None,
    direction: Annotated[list[str] | None, Option(help="inference, training; repeat. Default: both.")] = None,
    size: option.Sizes = None,
    batch: Annotated[list[int] | None, Option(help="Batch sizes; repeat for several. Default: all.", min=1)] = None,
    update: Update = False,
    seconds: option.Seconds = 2.0,
) -> None:
    """Whole models against their SimA twins on a CUDA device: eager, compiled and as CUDA graphs."""
    from sima_attn.bench.model import ModelSpeedRow, bench_models, select_cases
    from sima_attn.bench.tables import model_table, step_table, targets_table
    from sima_attn.report.cuda_timing import check_cuda

    cases = select_cases(models=model, modes=mode, directions=direction, pixels=size, batches=batch)
    check_cuda()
    old = read_rows(out, ModelSpeedRow) if update and out.exists() else []

    def merge(rows: list[ModelSpeedRow], new: list[ModelSpeedRow]) -> list[ModelSpeedRow]:
        return sorted(merge_rows(rows, new), key=lambda row: row.position)

    rows = measure(lambda show: bench_models(cases, seconds=seconds), out, len(cases), merge=merge, rows=old)
    print_table(model_table(rows), f"images per second, CUDA graphs, bfloat16, {rows[0].device}")
    print_table(step_table(rows), f"milliseconds per step, called from Python, bfloat16, {rows[0].device}")
    print_table(targets_table(rows), "Targets: ratio = softmax time / SimA time")
    print_paths(rows=out)


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
    from sima_attn.bench.edge import FAMILIES, bench_edge, edge_table, is_busy
    from sima_attn.bench.figures import plot_edge
    from sima_attn.export.onnx import check_installed

    check_installed()
    check_can_plot()
    if is_busy():
        console.print("This machine is busy: times will be too long, and ratios may be wrong.", style="yellow")
    names = model or list(FAMILIES)
    for name in names:
        check_known("family", name, FAMILIES)
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
    console.print("speed: relative to the fp32 baseline in the same runtime; exp: exp-like nodes")
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

    rows = measure(lambda show: bench_paper_gpu(seconds=seconds), out, sum(len(sweep.shapes) for sweep in SWEEPS))
    print_table(paper_gpu_table(rows), title=f"Figure A1, {rows[0].device}, float32, batch {rows[0].B}")
    print_paths(rows=out)


@app.command("table")
def bench_table_command(
    rows_file: Annotated[Path, Argument(help="CSV file of `sima bench cpu`.")] = option.BENCH_FOLDER / "cpu.csv",
    threads: Annotated[int, Option(help="Number of threads to show.")] = 1,
) -> None:
    """Print the rows of the CPU benchmark as Markdown tables: forward, then forward + backward."""
    from sima_attn.bench.cores import DIRECTIONS
    from sima_attn.bench.cpu import CpuRow
    from sima_attn.bench.tables import cpu_table

    rows = read_rows(rows_file, CpuRow)
    print("\n\n".join(cpu_table(rows, threads, direction).markdown() for direction in DIRECTIONS))
