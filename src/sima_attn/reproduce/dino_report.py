"""Rows of the self-supervised grid -> tables and figure, with the paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sima_attn.report.figures import figure
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.dino import DINO, RUNS, DinoCurveRow, DinoResultRow
from sima_attn.reproduce.grid import FINISHED

COLORS = {
    "sima": "crimson",
    "xca": "dimgray",
    "vit_softmax": "black",
    "sima_paper": "mediumpurple",
    "sima_token_ref": "darkorange",
    "supervised": "seagreen",
    "random": "lightcoral",
    "random_vit": "silver",
}


ABOUT = {run.name: run.about for run in RUNS}
PAPER = {run.name: run.paper for run in RUNS}


def dino_table(rows: Sequence[DinoResultRow]) -> TextTable:
    """k-NN and linear accuracy of each run, here and in the paper (ImageNet)."""
    header = ["run", "what it is", "epochs", "k-NN", "linear", "paper: model", "k-NN", "linear"]
    lines = []
    for row in rows:
        done, paper = row.status == FINISHED, PAPER[row.name]
        ours = [f"{row.knn_top1:.1f}", f"{row.linear_top1:.1f}"] if done else [row.status, "-"]
        theirs = [paper.model, f"{paper.knn:.1f}", f"{paper.linear:.1f}"] if paper else ["-", "-", "-"]
        lines.append([row.name, ABOUT[row.name], str(row.epochs), *ours, *theirs])
    return TextTable(header, lines, bold={i for i, row in enumerate(rows) if row.name == "sima"})


def dino_curve_table(curves: Sequence[DinoCurveRow], epochs: int) -> TextTable:
    """k-NN accuracy by epoch of the runs with one number of epochs, unfinished ones included."""
    mine = [row for row in curves if row.epochs == epochs]
    places = sorted({row.epoch for row in mine})
    found = {(row.name, row.epoch): f"{row.knn_top1:.1f}" for row in mine}
    names = dict.fromkeys(row.name for row in mine)
    lines = [[name, ABOUT[name], *(found.get((name, place), "-") for place in places)] for name in names]
    return TextTable(["run", "what it is", *(f"epoch {place:g}" for place in places)], lines)


def tables(results: Sequence[DinoResultRow], curves: Sequence[DinoCurveRow]) -> dict[str, TextTable]:
    """Title -> table."""
    lengths = sorted({row.epochs for row in curves})
    return {
        "Frozen features here, and in the paper (ImageNet)": dino_table(results),
        **{f"k-NN accuracy by epoch, {epochs} epochs": dino_curve_table(curves, epochs) for epochs in lengths},
    }


def plot(results: Sequence[DinoResultRow], curves: Sequence[DinoCurveRow], path: Path) -> None:
    """k-NN accuracy by epoch, with lines for runs without DINO; k-NN and linear accuracy of each run.

    A run that has a curve and no result yet is drawn as far as it has come.
    """
    epochs = max([row.epochs for row in results] + [point.epochs for point in curves])
    shown = [row for row in results if row.epochs == epochs or row.weights != DINO]
    size = (12, max(4.5, 0.5 * len(shown) + 1))
    with figure(path, columns=2, figsize=size, width_ratios=(1.2, 1)) as (whole, (left, right)):
        _plot_curves(left, shown, [point for point in curves if point.epochs == epochs], epochs)
        _plot_bars(right, shown, epochs)
        whole.suptitle(f"DINO, {epochs} epochs at 64 px, {shown[0].device}")


def _label(row: DinoResultRow, epochs: int) -> str:
    """What a run is, and its length where that differs (supervised runs)."""
    return ABOUT[row.name] if row.epochs in (0, epochs) else f"{ABOUT[row.name]}, {row.epochs} epochs"


def _plot_curves(axes: Any, shown: Sequence[DinoResultRow], curves: Sequence[DinoCurveRow], epochs: int) -> None:
    for name in dict.fromkeys(point.name for point in curves):
        mine = [point for point in curves if point.name == name]
        places, heights = [point.epoch for point in mine], [point.knn_top1 for point in mine]
        axes.plot(places, heights, "o-", markersize=3, color=COLORS[name], label=ABOUT[name])
    # A line far above the curves would flatten them: that of the supervised run is in the other panel only.
    highest = 1.8 * max((point.knn_top1 for point in curves), default=100.0)
    for row in shown:
        if row.weights != DINO and row.status == FINISHED and row.knn_top1 <= highest:
            label = f"{_label(row, epochs)}: {row.knn_top1:.1f}"
            axes.axhline(row.knn_top1, color=COLORS[row.name], linestyle="--" if row.epochs else ":", label=label)
    if curves:
        axes.set_ylim(0, highest)
    axes.set(xlabel="epoch", ylabel=f"{shown[0].k}-NN top-1 on val, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _plot_bars(axes: Any, shown: Sequence[DinoResultRow], epochs: int) -> None:
    for place, row in enumerate(shown):
        if row.status != FINISHED:
            axes.text(0, place, f" {row.status}", va="center", fontsize=8)
            continue
        axes.barh(place - 0.2, row.knn_top1, 0.38, color=COLORS[row.name], alpha=0.55)
        axes.barh(place + 0.2, row.linear_top1, 0.38, color=COLORS[row.name])
    axes.set_yticks(range(len(shown)), [_label(row, epochs) for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("top-1 on val, %: k-NN (pale) and linear")
    axes.grid(axis="x", alpha=0.3)
