"""Rows of the miniature grid -> tables and figure, with the paper's numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from sima_attn.report.figures import figure
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.grid import FINISHED
from sima_attn.reproduce.miniature import PAPER_TWINS, RUNS, CurveRow, MiniatureRun, ResultRow, SizeRow


def results_table(rows: Sequence[ResultRow]) -> TextTable:
    """Each run of each schedule: the mean over its seeds and the difference to its twin, here and in the paper."""
    header = ["run", "what it is", "heads", "params", "epochs", "top-1", "to twin", "top-1, paper", "to twin, paper"]
    lines = []
    for epochs in sorted({row.epochs for row in rows}):
        for run in RUNS:
            mine = [row for row in rows if row.name == run.name and row.epochs == epochs]
            if mine:
                params, difference = f"{mine[0].params / 1e6:.2f} M", to_twin(run, rows, epochs)
                ours = [_accuracy(mine), _signed(None if run.twin == run.name else difference)]
                lines.append([run.name, run.about, str(run.heads), params, str(epochs), *ours, *_paper_cells(run)])
    return TextTable(header, lines, bold={i for i, line in enumerate(lines) if line[0] == "sima"})


def sizes_table(rows: Sequence[SizeRow]) -> TextTable:
    """Top-1 of the headline runs at other image sizes, the mean over their seeds."""
    sizes = sorted({row.px for row in rows})
    header = ["run", "epochs", "token_ref", *(f"{px} px" for px in sizes)]
    lines = []
    for name, epochs, token_ref in sorted({(row.name, row.epochs, row.token_ref) for row in rows}):
        mine = [row for row in rows if (row.name, row.epochs) == (name, epochs)]
        cells = []
        for px in sizes:
            # At the training size token_ref is a no-op, and is not measured.
            here = [row for row in mine if row.px == px]
            here = [row for row in here if row.token_ref == token_ref] or here
            cells.append(f"{mean(row.top1 for row in here):.1f}" if here else "-")
        lines.append([name, str(epochs), "yes" if token_ref else "no", *cells])
    return TextTable(header, lines)


def to_twin(run: MiniatureRun, rows: Sequence[ResultRow], epochs: int) -> float | None:
    """Mean top-1 over seeds minus that of the twin, same schedule; None where either has no number."""
    ours, twins = (
        [row.top1 for row in rows if row.name == name and row.epochs == epochs] for name in (run.name, run.twin)
    )
    if not ours or not twins or any(map(math.isnan, ours + twins)):
        return None
    return mean(ours) - mean(twins)


def paper_to_twin(run: MiniatureRun) -> float | None:
    """The same for the paper's ImageNet numbers."""
    if run.paper is None or math.isnan(run.paper):
        return None
    return run.paper - PAPER_TWINS[run.paper_model]


def _accuracy(rows: Sequence[ResultRow]) -> str:
    failed = [row.status for row in rows if row.status != FINISHED]
    if failed:
        return failed[0] if len(rows) == 1 else f"{len(failed)} of {len(rows)} {failed[0]}"
    values = [row.top1 for row in rows]
    text = f"{mean(values):.1f}"
    return text if len(values) == 1 else f"{text} ({min(values):.1f} to {max(values):.1f}, {len(values)} seeds)"


def _paper_cells(run: MiniatureRun) -> list[str]:
    if run.paper is None:
        return ["-", "-"]
    if math.isnan(run.paper):
        return [f"did not converge, {run.paper_model}", "-"]
    return [f"{run.paper:.1f}, {run.paper_model}", _signed(paper_to_twin(run))]


def _signed(difference: float | None) -> str:
    return "-" if difference is None else f"{difference:+.1f}"


SHOWN = {
    "softmax": "black",
    "sima": "crimson",
    "softmax_lr": "steelblue",
    "sima_lr": "orchid",
    "xcit_xca": "dimgray",
    "xcit_sima": "darkorange",
}


def tables(results: Sequence[ResultRow], sizes: Sequence[SizeRow], curves: Sequence[CurveRow]) -> dict[str, TextTable]:
    """Title -> table."""
    found = {"Here, and in the paper (ImageNet)": results_table(results)}
    return found | ({"Top-1 at other image sizes": sizes_table(sizes)} if sizes else {})


def plot(results: Sequence[ResultRow], sizes: Sequence[SizeRow], curves: Sequence[CurveRow], path: Path) -> None:
    """Learning curves, and the difference of each run to its twin, here and in the paper.

    The curves are those of the schedule with the most runs. The differences are those of all its runs, and of the runs
    of other schedules that have a twin there.
    """
    made = Counter(row.epochs for row in results)
    epochs = max(made, key=lambda schedule: (made[schedule], schedule))
    bars = [(run, epochs) for run in RUNS if any(row.name == run.name and row.epochs == epochs for row in results)]
    bars += [
        (run, other)
        for other in sorted(made.keys() - {epochs})
        for run in RUNS
        if run.name != run.twin and to_twin(run, results, other) is not None
    ]
    size = (13, max(4.5, 0.36 * len(bars) + 1))
    with figure(path, columns=2, figsize=size, width_ratios=(1, 1.2)) as (whole, (left, right)):
        _plot_curves(left, [row for row in curves if row.epochs == epochs])
        _plot_differences(right, results, bars, epochs)
        unless = " unless stated otherwise" if len(made) > 1 else ""
        whole.suptitle(f"{epochs} epochs{unless} at 64 px, {results[0].device}")


def _plot_curves(axes: Any, curves: Sequence[CurveRow]) -> None:
    about = {run.name: run.about for run in RUNS}
    labeled = set()
    for name, seed in dict.fromkeys((row.name, row.seed) for row in curves):
        mine = [row for row in curves if (row.name, row.seed) == (name, seed)]
        is_shown = name in SHOWN
        axes.plot(
            [row.epoch for row in mine],
            [row.top1 for row in mine],
            color=SHOWN.get(name, "lightgrey"),
            linewidth=1.8 if is_shown else 0.8,
            zorder=2 if is_shown else 1,
            label=about[name] if is_shown and name not in labeled else None,
        )
        labeled.add(name)
    axes.set(xlabel="epoch", ylabel="top-1 on val, %")
    axes.grid(alpha=0.3)
    if labeled & SHOWN.keys():
        axes.legend(frameon=False, title="light gray: the other runs")


def _plot_differences(
    axes: Any, results: Sequence[ResultRow], bars: Sequence[tuple[MiniatureRun, int]], epochs: int
) -> None:
    for place, (run, schedule) in enumerate(bars):
        ours, paper = to_twin(run, results, schedule), paper_to_twin(run)
        if ours is None:
            found = next(row for row in results if row.name == run.name and row.epochs == schedule)
            status = found.status if found.status != FINISHED else f"{found.top1:.1f}, no twin yet"
            axes.text(0, place - 0.2, f" {status}", va="center", fontsize=8)
        else:
            axes.barh(place - 0.2, ours, 0.38, color="crimson" if "sima" in run.name else "gray")
        if paper is not None:
            axes.barh(place + 0.2, paper, 0.38, fill=False, edgecolor="black")
    axes.barh(0, 0, color="crimson", label="here")  # entries of the legend
    axes.barh(0, 0, fill=False, edgecolor="black", label="paper, ImageNet")
    axes.axvline(0, color="black", linewidth=0.8)
    labels = [run.about if schedule == epochs else f"{run.about}, {schedule} epochs" for run, schedule in bars]
    axes.set_yticks(range(len(bars)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("top-1 minus that of the softmax (XCiT: XCA) twin, points")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, loc="upper right")
