"""Rows of the self-supervised grid -> its table and its figure, the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sima_attn.report.figures import check_can_plot
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.dino import DINO, GRID, DinoCurveRow, DinoResultRow

COLOURS = {
    "sima": "crimson",
    "xca": "dimgrey",
    "vit_softmax": "black",
    "sima_paper": "mediumpurple",
    "sima_token_ref": "darkorange",
    "supervised": "seagreen",
    "random": "lightcoral",
    "random_vit": "silver",
}


def dino_table(rows: Sequence[DinoResultRow]) -> TextTable:
    """Every run: k-NN and linear accuracy here, and the paper's two on ImageNet."""
    header = ["run", "what it is", "epochs", "k-NN", "linear", "paper: model", "k-NN", "linear"]
    grid = {run.name: run for run in GRID}
    lines: list[list[str]] = []
    bold = set()
    for row in rows:
        run = grid.get(row.name)
        if row.name == "sima":
            bold.add(len(lines))
        accuracies = [f"{row.knn_top1:.1f}", f"{row.linear_top1:.1f}"]
        paper = run.paper if run else None
        lines.append(
            [
                row.name,
                run.about if run else row.model,
                str(row.epochs),
                *(accuracies if row.status == "finished" else [row.status, "-"]),
                *([paper.model, f"{paper.knn:.1f}", f"{paper.linear:.1f}"] if paper else ["-", "-", "-"]),
            ]
        )
    return TextTable(header, lines, bold)


def dino_curve_table(curves: Sequence[DinoCurveRow], epochs: int) -> TextTable:
    """k-NN accuracy by epoch of the runs of one length, as far as each has come."""
    about = {run.name: run.about for run in GRID}
    mine = [row for row in curves if row.epochs == epochs]
    places = sorted({row.epoch for row in mine})
    found = {(row.name, row.epoch): f"{row.knn_top1:.1f}" for row in mine}
    names = list(dict.fromkeys(row.name for row in mine))
    lines = [[n, about.get(n, n), *(found.get((n, place), "-") for place in places)] for n in names]
    return TextTable(["run", "what it is", *(f"epoch {place:g}" for place in places)], lines, set())


def plot_dino(results: Sequence[DinoResultRow], curves: Sequence[DinoCurveRow], path: Path) -> None:
    """k-NN accuracy by epoch, the lines of other weights across it; and k-NN and linear accuracy of every run.

    A run that has curves and no result yet is drawn as far as it has come.
    """
    check_can_plot()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    about = {run.name: run.about for run in GRID}
    epochs = max([row.epochs for row in results] + [point.epochs for point in curves])
    shown = [row for row in results if row.epochs == epochs or row.weights != DINO]

    def label(row: DinoResultRow) -> str:
        name = about.get(row.name, row.name)
        return name if row.epochs in (0, epochs) else f"{name}, {row.epochs} epochs"  # trained with labels

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, max(4.5, 0.5 * len(shown) + 1)), layout="constrained", width_ratios=(1.2, 1)
    )
    longest = [point for point in curves if point.epochs == epochs]
    for name in dict.fromkeys(point.name for point in longest):
        mine = [point for point in longest if point.name == name]
        places, heights = [point.epoch for point in mine], [point.knn_top1 for point in mine]
        colour = COLOURS.get(name, "steelblue")
        left.plot(places, heights, "o-", markersize=3, color=colour, label=about.get(name, name))
    for row in shown:
        if row.weights != DINO and row.status == "finished":
            colour, style = COLOURS.get(row.name, "steelblue"), "--" if row.epochs else ":"
            left.axhline(row.knn_top1, color=colour, linestyle=style, label=f"{label(row)}: {row.knn_top1:.1f}")
    if longest:  # labels are worth so much that with their line in it the curves would lie flat
        left.set_ylim(0, 1.8 * max(point.knn_top1 for point in longest))
    left.set_xlabel("epoch")
    left.set_ylabel(f"{shown[0].k}-NN top-1 on val, %")
    left.grid(alpha=0.3)
    left.legend(frameon=False, fontsize=8, loc="upper left")
    for place, row in enumerate(shown):
        if row.status != "finished":
            right.text(0, place, f" {row.status}", va="center", fontsize=8)
            continue
        colour = COLOURS.get(row.name, "steelblue")
        right.barh(place - 0.2, row.knn_top1, 0.38, color=colour, alpha=0.55)
        right.barh(place + 0.2, row.linear_top1, 0.38, color=colour)
    right.set_yticks(range(len(shown)), [label(row) for row in shown], fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("top-1 on val, %: k-NN (pale) and linear")
    right.grid(axis="x", alpha=0.3)
    figure.suptitle(f"DINO, {epochs} epochs at 64 px, {shown[0].device}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
