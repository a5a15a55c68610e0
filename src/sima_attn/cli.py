"""The command `sima`: one thin function a command. Heavy imports wait until a command runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sima_attn._version import __version__

if TYPE_CHECKING:
    from sima_attn.bench.tables import TextTable

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
    from sima_attn.bench.demo import COUNTED_TOKENS, TOKENS, run_demo
    from sima_attn.bench.figures import check_can_plot, plot_time_against_tokens
    from sima_attn.bench.rows import write_rows
    from sima_attn.bench.tables import demo_table
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
    figure = out / "time_against_tokens.png"
    plot_time_against_tokens(rows, figure)
    first = rows[0]
    _print_table(
        demo_table(rows, COUNTED_TOKENS),
        title=f"{first.H} heads of {first.D} channels, float32, {first.threads} threads, {first.device}",
        caption=f"exp(), MACs and error at N = {COUNTED_TOKENS}; speed against fused softmax, higher is faster",
    )
    orders = ", ".join(f"{row.order} at N = {row.N}" for row in rows if row.attention == "sima")
    console.print(f"SimA took the cheaper order of its products: {orders}.", highlight=False)
    console.print(f"Figure: {figure}\nRows:   {out / 'rows.csv'}", highlight=False, soft_wrap=True)


def _print_table(text: "TextTable", title: str, caption: str | None = None) -> None:
    table = Table(title=title, caption=caption)
    for column, heading in enumerate(text.header):
        table.add_column(heading, justify="right" if column else "left", no_wrap=True)
    for i, line in enumerate(text.lines):
        table.add_row(*line, style="bold green" if i in text.bold else None)
    console.print(table)


@app.command("models")
def models_command(
    out: Annotated[Path | None, typer.Option(help="CSV file for the counts.")] = None,
) -> None:
    """Print Table 1 of the paper: our models, counted exactly, beside what the paper prints."""
    with _progress_bar() as progress:
        task = progress.add_task("importing", total=None)
        from sima_attn.bench.rows import write_rows
        from sima_attn.export.table_1 import count_models, table_1
        from sima_attn.models.paper_table import TABLE_1

        progress.update(task, total=len(TABLE_1), completed=-1)
        rows = count_models(on_step=lambda name: progress.update(task, advance=1, description=name))
        progress.update(task, advance=1)
    if out is not None:
        write_rows(out, rows)
    _print_table(
        table_1(rows),
        title="SimA models at 224 px, one image",
        caption="in brackets: as the paper prints it, with the MACs of the dearer order for DeiT and CvT",
    )


@app.command("audit")
def audit_command(
    model: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="A timm model name, or an .onnx file.")],
    size: Annotated[int | None, typer.Option(help="Image side in pixels; without it the model's own.", min=1)] = None,
    by_module: Annotated[bool, typer.Option("--by-module", help="One line for each module.")] = False,
    fail_on_exp: Annotated[bool, typer.Option("--fail-on-exp", help="Exit with 1 if a call is exp-like.")] = False,
) -> None:
    """Count a model's parameters, MACs and memory, and every exp-like call in it."""
    with Console(stderr=True).status(f"auditing {model}"):
        from sima_attn.export.audit_model import audit_named

        report = audit_named(model, size)
    console.print(f"[bold]{report.name}[/bold]", highlight=False)
    for fact in report.facts().split("; "):
        console.print(f"  {fact}", highlight=False)
    if report.calls:
        _print_table(report.table(by_module), title=f"exp-like calls in {report.name}")
    console.print(f"[bold]{report.summary()}[/bold]", highlight=False, soft_wrap=True)
    if fail_on_exp and not report.is_exp_free:
        raise typer.Exit(1)


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
        title = f"Speed against softmax, {count} thread{'s' * (count > 1)}, {rows[0].device}"
        _print_table(cpu_table(rows, count), title, caption="GFLOP/s are SimA's; matmul is a 1024^3 product")
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
    from sima_attn.bench.tables import cpu_table

    print(cpu_table(read_rows(rows_file, CpuRow), threads).markdown())


def main() -> None:
    """Run the command line; an error the user can mend is one line, without a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        # Escaped: 'sima-attn[plots]' is no markup.
        Console(stderr=True).print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
