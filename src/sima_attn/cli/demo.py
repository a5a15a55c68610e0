"""`sima demo`."""

from pathlib import Path
from typing import Annotated

import typer

from sima_attn.cli._shared import Seconds, console, print_table, progress_bar

app = typer.Typer()


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
    with progress_bar() as progress:
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
    print_table(
        demo_table(rows, COUNTED_TOKENS),
        title=f"{first.H} heads of {first.D} channels, float32, {first.threads} threads, {first.device}",
        caption=f"exp(), MACs and error at N = {COUNTED_TOKENS}; speed against fused softmax, higher is faster",
    )
    orders = ", ".join(f"{row.order} at N = {row.N}" for row in rows if row.attention == "sima")
    console.print(f"SimA took the cheaper order of its products: {orders}.", highlight=False)
    console.print(f"Figure: {figure}\nRows:   {out / 'rows.csv'}", highlight=False, soft_wrap=True)
