"""Logs -> figure of the learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sima_attn.report.figures import figure
from sima_attn.train.logs import read_log

MOST_CURVES = 3  # per panel: of a detector, AP, AP50 and AP75 of the boxes, and those of the masks
LARGEST_RATIO = 1.5  # metrics below it are ratios, others percentages: they do not share a panel


def plot_learning_curve(folder: Path, path: Path, title: str, kept_epoch: float | None = None) -> None:
    """Training and validation loss, and all other metrics, by epoch; a few curves per panel.

    Args:
        kept_epoch: The epoch whose weights are kept, which is marked; None for the last one.
    """
    train, evaluated = (read_log(file) if file.exists() else [] for file in (folder / "train.csv", folder / "eval.csv"))
    values = {
        name: [float(row[name]) for row in evaluated]
        for name in (evaluated[0] if evaluated else ())
        if name not in ("step", "epoch", "stage") and name.removeprefix("ema_") != "images"
    }
    panels = metric_panels(values)
    with figure(path, columns=1 + len(panels), figsize=(5.5 * (1 + len(panels)), 4.5), squeeze=False) as (drawn, axes):
        left, *others = axes[0]
        epochs = [float(row["epoch"]) for row in evaluated]
        final = len(epochs) - 1
        shown = final
        if kept_epoch is not None:
            shown = min(range(len(epochs)), key=lambda i: abs(epochs[i] - kept_epoch), default=final)
        what = "final" if shown == final else "kept"
        if train:
            losses = [float(row["loss"]) for row in train]
            _plot(left, [float(row["epoch"]) for row in train], losses, color="gray", label="train")
        if "loss" in values:
            _plot(left, epochs, values["loss"], color="crimson", label="val")
        left.set_ylabel("loss")
        for panel, names in zip(others, panels, strict=True):
            for number, name in enumerate(names):
                for full, dashes in ((name, "-"), (f"ema_{name}", "--")):
                    if full in values:
                        label = f"{full}: {what} {values[full][shown]:.4g}"
                        _plot(panel, epochs, values[full], color=f"C{number}", linestyle=dashes, label=label)
        for panel in (left, *others):
            if what == "kept":
                panel.axvline(epochs[shown], color="black", linestyle=":", label="kept weights")
            panel.set_xlabel("epoch")
            panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            panel.grid(alpha=0.3)
            if panel.get_legend_handles_labels()[0]:
                panel.legend(frameon=False)
        drawn.suptitle(title)


def metric_panels(values: dict[str, list[float]]) -> list[list[str]]:
    """The metrics of each panel: ratios and percentages apart, at most `MOST_CURVES` together.

    A metric of the averaged weights, ema_NAME, is in the panel of NAME.
    """
    names = [name for name in values if name.removeprefix("ema_") != "loss" and not name.startswith("ema_")]
    ratios = [name for name in names if max(map(abs, values[name])) <= LARGEST_RATIO]
    percentages = [name for name in names if name not in ratios]
    return [
        group[first : first + MOST_CURVES]
        for group in (percentages, ratios)
        for first in range(0, len(group), MOST_CURVES)
    ]


def _plot(axes: Any, epochs: Sequence[float], values: Sequence[float], **style: Any) -> None:
    """A curve; a single point, of which no line can be drawn, as a marker."""
    axes.plot(epochs, values, marker="o" if len(values) == 1 else None, **style)
