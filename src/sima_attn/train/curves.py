"""Logs -> figure of the learning curve."""

from __future__ import annotations

from pathlib import Path

from sima_attn.report.figures import figure
from sima_attn.train.logs import read_log


def plot_learning_curve(folder: Path, path: Path, title: str) -> None:
    """Training and validation loss, and all other metrics, by epoch."""
    train, evaluated = (read_log(file) if file.exists() else [] for file in (folder / "train.csv", folder / "eval.csv"))
    with figure(path, columns=2, figsize=(11, 4.5)) as (drawn, (left, right)):
        if train:
            left.plot(
                [float(r["epoch"]) for r in train], [float(r["loss"]) for r in train], color="grey", label="train"
            )
        epochs = [float(r["epoch"]) for r in evaluated]
        metrics = [name for name in evaluated[0] if name not in ("step", "epoch", "stage")] if evaluated else []
        for name in metrics:
            values = [float(r[name]) for r in evaluated]
            if name == "loss":
                left.plot(epochs, values, color="crimson", label="val")
            elif name.removeprefix("ema_") not in ("loss", "images"):
                style = "--" if name.startswith("ema_") else "-"
                right.plot(epochs, values, style, label=f"{name}: final {values[-1]:.2f}")
        left.set_ylabel("loss")
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False)
        drawn.suptitle(title)
