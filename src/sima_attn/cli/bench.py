"""`sima bench`: measure, write rows, print tables."""

from pathlib import Path
from typing import Annotated

import typer

from sima_attn.cli._shared import (
    BENCH_FOLDER,
    FigureFile,
    Pixels,
    RowsFile,
    Seconds,
    Threads,
    console,
    print_table,
    progress_bar,
)

Update = Annotated[
    bool, typer.Option("--update", help="Keep the file's rows of other cases. Default: the file is replaced.")
]

app = typer.Typer(help="Measure, write rows, print tables.", no_args_is_help=True)


@app.command("cpu")
def bench_cpu_command(
    out: RowsFile = BENCH_FOLDER / "cpu.csv",
    threads: Threads = [1, 2],  # noqa: B006
    seconds: Seconds = 6.0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile too.")] = True,
) -> None:
    """SimA's attention core against softmax and the paper's code on the CPU: forward, and forward + backward."""
    from sima_attn.bench.cpu import CASES, FORWARD, TRAINING, bench_cpu, can_compile
    from sima_attn.bench.tables import cpu_table
    from sima_attn.report.rows import write_rows

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
        for direction in (FORWARD, TRAINING):
            title = f"Speed against softmax, {direction}, {count} thread{'s' * (count > 1)}, {rows[0].device}"
            caption = "GFLOP/s are SimA's; matmul is a 1024^3 product"
            print_table(cpu_table(rows, count, direction), title, caption=caption)
    console.print(f"Rows: {out}", highlight=False, soft_wrap=True)


@app.command("gpu")
def bench_gpu_command(
    out: RowsFile = BENCH_FOLDER / "gpu.csv",
    figure: FigureFile = BENCH_FOLDER / "gpu.png",
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="B,N,H,D", help="Shapes, as in 256,196,6,64; repeat for several. Default: all."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16, float16 or float32; repeat for several. Default: all.")
    ] = None,
    update: Update = False,
    seconds: Seconds = 0.3,
) -> None:
    """SimA's fused kernels against flash and cuDNN softmax, the paper's code, XCA and ELU, on a CUDA device."""
    from sima_attn.bench.figures import plot_gpu
    from sima_attn.bench.gpu import FIGURE_CASES, FORWARD, TRAINING, GpuRow, bench_gpu, select_cases
    from sima_attn.bench.tables import dtype_table, gpu_table
    from sima_attn.report.cuda_timing import check_cuda
    from sima_attn.report.figures import check_can_plot
    from sima_attn.report.rows import merge_rows, read_rows, write_rows

    cases = select_cases(shapes=shape, dtypes=dtype)
    check_cuda()
    check_can_plot()
    rows = read_rows(out, GpuRow) if update and out.exists() else []
    with progress_bar() as progress:
        task = progress.add_task("starting", total=len(cases))
        measured = bench_gpu(cases, seconds=seconds)
        for case in cases:
            progress.update(task, description=f"{case} {case.dtype}")
            rows = merge_rows(rows, next(measured))
            write_rows(out, rows)
            progress.advance(task)
    for direction in (FORWARD, TRAINING):
        print_table(gpu_table(rows, direction), f"{direction}, microseconds, bfloat16, {rows[0].device}")
    print_table(dtype_table(rows), f"other dtypes, microseconds, {rows[0].device}")
    console.print(f"Rows:   {out}", highlight=False, soft_wrap=True)
    if {row.shape for row in rows} >= {(case.B, case.N, case.H, case.D) for case in FIGURE_CASES}:
        plot_gpu(rows, figure)
        console.print(f"Figure: {figure}", highlight=False, soft_wrap=True)


@app.command("call-overhead")
def bench_call_overhead_command(out: RowsFile = BENCH_FOLDER / "call_overhead.csv", seconds: Seconds = 2.0) -> None:
    """CPU time per call of the attention operator on a CUDA device, against torch's softmax attention."""
    from sima_attn.bench.call_overhead import SHAPES, bench_call_overhead
    from sima_attn.bench.tables import call_overhead_table, targets_table
    from sima_attn.report.cuda_timing import check_cuda
    from sima_attn.report.rows import write_rows

    check_cuda()
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("call overhead", total=2 * len(SHAPES))
        for measured in bench_call_overhead(seconds=seconds):
            rows += measured
            write_rows(out, rows)
            progress.advance(task)
    print_table(call_overhead_table(rows), f"CPU time per call, bfloat16, {rows[0].cpu}, {rows[0].device}")
    print_table(targets_table([], rows), "Targets: ratio = softmax time / SimA time")
    console.print(f"Rows: {out}", highlight=False, soft_wrap=True)


@app.command("model")
def bench_model_command(
    out: RowsFile = BENCH_FOLDER / "model.csv",
    model: Annotated[list[str] | None, typer.Option(help="deit or xcit; repeat for both. Default: both.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="eager, compile, reduce-overhead or graph; repeat for several. Default: all."),
    ] = None,
    direction: Annotated[
        list[str] | None, typer.Option(help="inference or training; repeat for both. Default: both.")
    ] = None,
    pixels: Pixels = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Batch sizes; repeat for several. Default: all.", min=1)
    ] = None,
    update: Update = False,
    seconds: Seconds = 2.0,
) -> None:
    """Whole models against their SimA twins on a CUDA device: eager, compiled and as CUDA graphs."""
    from sima_attn.bench.model import ModelSpeedRow, bench_models, select_cases
    from sima_attn.bench.tables import model_table, step_table, targets_table
    from sima_attn.report.cuda_timing import check_cuda
    from sima_attn.report.rows import merge_rows, read_rows, write_rows

    cases = select_cases(models=model, modes=mode, directions=direction, pixels=pixels, batches=batch)
    check_cuda()
    rows = read_rows(out, ModelSpeedRow) if update and out.exists() else []
    with progress_bar() as progress:
        task = progress.add_task("compiling", total=len(cases))
        for measured in bench_models(cases, seconds=seconds):
            last = measured[-1]
            rows = sorted(merge_rows(rows, measured), key=lambda row: row.position)
            write_rows(out, rows)
            done = f"{last.mode}, {last.direction}, {last.pixels} px, batch {last.batch}"
            progress.update(task, advance=1, description=done)
    print_table(model_table(rows), f"images per second, CUDA graphs, bfloat16, {rows[0].device}")
    print_table(step_table(rows), f"milliseconds per step, called from Python, bfloat16, {rows[0].device}")
    print_table(targets_table(rows), "Targets: ratio = softmax time / SimA time")
    console.print(f"Rows: {out}", highlight=False, soft_wrap=True)


@app.command("table")
def bench_table_command(
    rows_file: Annotated[Path, typer.Argument(help="CSV file that `sima bench cpu` wrote.")] = BENCH_FOLDER / "cpu.csv",
    threads: Annotated[int, typer.Option(help="Which thread count to show.")] = 1,
) -> None:
    """Print the rows of the CPU benchmark as Markdown tables: forward, then forward + backward."""
    from sima_attn.bench.cpu import FORWARD, TRAINING, CpuRow
    from sima_attn.bench.tables import cpu_table
    from sima_attn.report.rows import read_rows

    rows = read_rows(rows_file, CpuRow)
    print("\n\n".join(cpu_table(rows, threads, direction).markdown() for direction in (FORWARD, TRAINING)))
