"""`sima bench`: measure, write rows, print tables."""

from pathlib import Path
from typing import Annotated

import typer

from sima_attn.cli._shared import FigureFile, Pixels, RowsFile, Seconds, Threads, console, print_table, progress_bar

app = typer.Typer(help="Measure, write rows, print tables.", no_args_is_help=True)


@app.command("cpu")
def bench_cpu_command(
    out: RowsFile = Path("benchmarks/results/cpu.csv"),
    threads: Threads = [1, 2],  # noqa: B006
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


@app.command("gpu")
def bench_gpu_command(
    out: RowsFile = Path("benchmarks/results/gpu.csv"),
    figure: FigureFile = Path("docs/images/gpu.png"),
    seconds: Seconds = 0.3,
) -> None:
    """SimA's fused kernels against flash and cuDNN softmax, the paper's code, XCA and ELU, on a CUDA device."""
    from sima_attn.bench.cuda_timing import check_cuda
    from sima_attn.bench.figures import check_can_plot, plot_gpu
    from sima_attn.bench.gpu import CASES, FIGURE_CASES, FORWARD, TRAINING, bench_gpu
    from sima_attn.bench.rows import write_rows
    from sima_attn.bench.tables import gpu_table

    check_cuda()
    check_can_plot()
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("starting", total=len(CASES) + len(FIGURE_CASES))
        for cases, full in ((CASES, True), (FIGURE_CASES, False)):
            measured = bench_gpu(cases=cases, full=full, seconds=seconds)
            for case in cases:
                progress.update(task, description=str(case))
                rows += next(measured)
                write_rows(out, rows)
                progress.advance(task)
    plot_gpu(rows, figure)
    for direction in (FORWARD, TRAINING):
        print_table(gpu_table(rows, direction), f"{direction}, microseconds, bfloat16, {rows[0].device}")
    console.print(f"Rows:   {out}\nFigure: {figure}", highlight=False)


@app.command("model")
def bench_model_command(
    out: RowsFile = Path("benchmarks/results/model.csv"),
    model: Annotated[list[str] | None, typer.Option(help="deit or xcit; repeat for both. Default: both.")] = None,
    pixels: Pixels = None,
    seconds: Seconds = 2.0,
) -> None:
    """Whole models against their SimA twins on a CUDA device: inference, training, peak memory."""
    from sima_attn.bench.cuda_timing import check_cuda
    from sima_attn.bench.model import SIZES, TWINS, bench_models
    from sima_attn.bench.rows import write_rows
    from sima_attn.bench.tables import model_table

    sides = [size.pixels for size in SIZES]
    for kind, given, known in (("model", model, ["deit", "xcit"]), ("size", pixels, sides)):
        unknown = [one for one in given or () if one not in known]
        if unknown:
            raise ValueError(f"unknown {kind} {unknown[0]!r}; known: {', '.join(map(str, known))}")
    check_cuda()
    sizes = [size for size in SIZES if pixels is None or size.pixels in pixels]
    twins = [pair for pair in TWINS if model is None or pair.timm_name.partition("_")[0] in model]
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("compiling", total=2 * len(sizes) * len(twins))
        for measured in bench_models(twins=twins, sizes=sizes, seconds=seconds):
            rows += measured
            progress.update(task, advance=1, description=f"{measured[-1].model} {measured[-1].pixels} px")
            write_rows(out, rows)
    print_table(model_table(rows), f"images a second, bfloat16, {rows[0].device}")
    console.print(f"Rows: {out}", highlight=False)


@app.command("serve")
def bench_serve_command(
    out: RowsFile = Path("benchmarks/results/serve.csv"),
    model: Annotated[
        str | None, typer.Option(help="As in `sima serve`.", show_default="the model that it takes by itself")
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 64,
    seconds: Annotated[float, typer.Option(help="How long they ask.", min=1.0)] = 120.0,
) -> None:
    """Many clients at once against `sima serve`: no 5xx, nobody without an answer, memory flat."""
    from sima_attn.bench.load import bench_load
    from sima_attn.bench.rows import write_rows
    from sima_attn.serve.run import check_installed

    check_installed()
    with progress_bar() as progress:
        task = progress.add_task(f"{clients} clients", total=int(seconds))
        row = bench_load(model=model, clients=clients, seconds=seconds, on_second=lambda: progress.advance(task))
    write_rows(out, [row])
    console.print(f"{row.summary()}\nRow: {out}", highlight=False, soft_wrap=True)
    problem = row.problem()
    if problem is not None:
        raise ValueError(f"the server did not hold out: {problem}")


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


@app.command("knn")
def bench_knn_command(
    bank: Annotated[
        int | None, typer.Option(help="Images in the bank.", min=1, show_default="1281167; CPU 20000")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Channels of a feature.", min=1, show_default="384; CPU 64")] = None,
    queries: Annotated[
        int | None, typer.Option(help="Images to classify.", min=1, show_default="50000; CPU 1000")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: RowsFile = Path("benchmarks/results/knn_speed.csv"),
) -> None:
    """20-NN on synthetic features, the bank read from a file in blocks and held in memory: time and memory."""
    from sima_attn._devices import resolve_device
    from sima_attn.bench.knn import SIZES, Size, bench_knn, knn_speed_table
    from sima_attn.bench.rows import write_rows

    device = resolve_device(device)
    usual = SIZES[device]
    size = Size(*(given or number for given, number in zip((bank, dim, queries), usual, strict=True)))
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None)
        rows = bench_knn(
            size,
            device=device,
            on_step=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    write_rows(out, rows)
    print_table(knn_speed_table(rows), f"20-NN and its vote, features in half precision, {rows[0].device}")
    console.print(f"Rows: {out}", highlight=False)


@app.command("dino")
def bench_dino_command(
    names: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="RUN", help="A run of `sima reproduce dino`.", show_default="sima, xca, vit"),
    ] = None,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs of the digits, 11 steps each.")] = 6,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the recipe miniature.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: RowsFile = Path("benchmarks/results/dino_step.csv"),
) -> None:
    """A step of DINO: plain, recorded as a CUDA graph, compiled, and both.

    It is for a GPU: on a CPU, where nothing is recorded, it takes an hour.
    """
    from sima_attn._devices import resolve_device
    from sima_attn.bench.dino_step import RUNS, bench_dino_step, dino_step_table, ways_on
    from sima_attn.bench.rows import write_rows

    device = resolve_device(device)
    chosen = list(dict.fromkeys(names or RUNS))
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("starting", total=len(chosen) * len(ways_on(device)))
        for row in bench_dino_step(
            device=device,
            names=chosen,
            epochs=epochs,
            settings=overrides or (),
            on_start=lambda what: bar.update(task, description=what),
        ):
            rows.append(row)
            write_rows(out, rows)  # one by one: what was measured is kept, whatever comes
            bar.advance(task)
    print_table(dino_step_table(rows), f"A step of DINO, batch {rows[0].batch}, {rows[0].device}")
    console.print(f"Rows: {out}", highlight=False)
