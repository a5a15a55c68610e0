"""Rows of the miniature grid -> its tables and its figure, the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from sima_attn.report.figures import check_can_plot
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.miniature import GRID, PAPER_TWINS, CurveRow, MiniatureRun, ResultRow, SizeRow


def results_table(rows: Sequence[ResultRow]) -> TextTable:
    """Every run of every schedule: the mean over its seeds, the difference to its twin, and the paper's two."""
    header = ["run", "what it is", "heads", "params", "epochs", "top-1", "to twin", "top-1, paper", "to twin, paper"]
    lines: list[list[str]] = []
    bold = set()
    for epochs in sorted({row.epochs for row in rows}):
        for run in GRID:
            mine = [row for row in rows if row.name == run.name and row.epochs == epochs]
            if not mine:
                continue
            if run.name == "sima":
                bold.add(len(lines))
            difference = to_twin(run, rows, epochs)
            lines.append(
                [
                    run.name,
                    run.about,
                    str(run.heads),
                    f"{mine[0].params / 1e6:.2f} M",
                    str(epochs),
                    _accuracy(mine),
                    "-" if difference is None or run.twin == run.name else f"{difference:+.1f}",
                    *_paper_cells(run),
                ]
            )
    return TextTable(header, lines, bold)


def sizes_table(rows: Sequence[SizeRow]) -> TextTable:
    """Top-1 of the headline runs at other image sizes, the mean over their seeds."""
    sizes = sorted({row.px for row in rows})
    header = ["run", "epochs", "token_ref", *(f"{px} px" for px in sizes)]
    lines = []
    for name, epochs, token_ref in sorted({(row.name, row.epochs, row.token_ref) for row in rows}):
        mine = [row for row in rows if (row.name, row.epochs) == (name, epochs)]
        cells = []
        for px in sizes:
            # At the training size token_ref changes nothing, and is measured without it.
            here = [row for row in mine if row.px == px]
            here = [row for row in here if row.token_ref == token_ref] or here
            cells.append(f"{mean(row.top1 for row in here):.1f}" if here else "-")
        lines.append([name, str(epochs), "yes" if token_ref else "no", *cells])
    return TextTable(header, lines, bold=set())


def to_twin(run: MiniatureRun, rows: Sequence[ResultRow], epochs: int) -> float | None:
    """Points of top-1 above the twin under the same schedule, means over seeds; None where either has no number."""
    ours, twins = (
        [row.top1 for row in rows if row.name == name and row.epochs == epochs] for name in (run.name, run.twin)
    )
    if not ours or not twins or any(map(math.isnan, ours + twins)):
        return None
    return mean(ours) - mean(twins)


def paper_to_twin(run: MiniatureRun) -> float | None:
    """The same of the paper's ImageNet numbers."""
    if run.paper is None or math.isnan(run.paper):
        return None
    return run.paper - PAPER_TWINS[run.paper_model]


def _accuracy(rows: Sequence[ResultRow]) -> str:
    lost = [row.status for row in rows if row.status != "finished"]
    if lost:
        return lost[0] if len(rows) == 1 else f"{len(lost)} of {len(rows)} {lost[0]}"
    values = [row.top1 for row in rows]
    text = f"{mean(values):.1f}"
    return text if len(values) == 1 else f"{text} ({min(values):.1f} to {max(values):.1f}, {len(values)} seeds)"


def _paper_cells(run: MiniatureRun) -> list[str]:
    if run.paper is None:
        return ["-", "-"]
    if math.isnan(run.paper):
        return [f"did not converge, {run.paper_model}", "-"]
    difference = paper_to_twin(run)
    return [f"{run.paper:.1f}, {run.paper_model}", f"{difference:+.1f}"]


def plot_miniature(results: Sequence[ResultRow], curves: Sequence[CurveRow], path: Path) -> None:
    """Learning curves, and every run's distance to its twin beside the paper's.

    All runs of the schedule that has most of them; of other schedules those that have a twin there.
    """
    check_can_plot()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = Counter(row.epochs for row in results)
    epochs = max(made, key=lambda schedule: (made[schedule], schedule))
    bars = [(run, epochs) for run in GRID if any(row.name == run.name and row.epochs == epochs for row in results)]
    bars += [
        (run, other)
        for other in sorted(made.keys() - {epochs})
        for run in GRID
        if run.name != run.twin and to_twin(run, results, other) is not None
    ]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, max(4.5, 0.36 * len(bars) + 1)), layout="constrained", width_ratios=(1, 1.2)
    )
    shown = {
        "softmax": "black",
        "sima": "crimson",
        "softmax_lr": "steelblue",
        "sima_lr": "orchid",
        "xcit_xca": "dimgrey",
        "xcit_sima": "darkorange",
    }
    about = {run.name: run.about for run in GRID}
    labelled = set()
    for name, schedule, seed in dict.fromkeys((row.name, row.epochs, row.seed) for row in curves):
        mine = [row for row in curves if (row.name, row.epochs, row.seed) == (name, schedule, seed)]
        named = name in shown and name not in labelled
        labelled.add(name)
        left.plot(
            [row.epoch for row in mine],
            [row.top1 for row in mine],
            color=shown.get(name, "lightgrey"),
            linestyle="-" if schedule == epochs else "--",
            linewidth=1.8 if name in shown else 0.8,
            zorder=2 if name in shown else 1,
            label=about[name] if named else None,
        )
    left.set_xlabel("epoch")
    left.set_ylabel("top-1 on val, %")
    left.grid(alpha=0.3)
    if left.get_legend_handles_labels()[0]:
        dashes = ", dashed: other schedules" if len(made) > 1 else ""
        left.legend(frameon=False, title=f"light grey: the other runs{dashes}")

    for place, (run, schedule) in enumerate(bars):
        ours, paper = to_twin(run, results, schedule), paper_to_twin(run)
        if ours is None:
            found = next(row for row in results if row.name == run.name and row.epochs == schedule)
            status = found.status if found.status != "finished" else f"{found.top1:.1f}, no twin yet"
            right.text(0, place - 0.2, f" {status}", va="center", fontsize=8)
        else:
            right.barh(place - 0.2, ours, 0.38, color="crimson" if "sima" in run.name else "grey")
        if paper is not None:
            right.barh(place + 0.2, paper, 0.38, fill=False, edgecolor="black")
    right.axvline(0, color="black", linewidth=0.8)
    labels = [run.about if schedule == epochs else f"{run.about}, {schedule} epochs" for run, schedule in bars]
    right.set_yticks(range(len(bars)), labels, fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("points of top-1 above the softmax (XCiT: XCA) twin")
    right.grid(axis="x", alpha=0.3)
    handles = [
        plt.Rectangle((0, 0), 1, 1, color="crimson", label="here"),
        plt.Rectangle((0, 0), 1, 1, fill=False, edgecolor="black", label="paper, ImageNet"),
    ]
    right.legend(handles=handles, frameon=False, loc="upper right")
    first = results[0]
    figure.suptitle(
        f"{epochs} epochs{' where nothing else is said,' if len(made) > 1 else ''} at 64 px, {first.device}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
