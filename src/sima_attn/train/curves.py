"""Logs -> the learning curve. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from sima_attn.report.figures import check_can_plot
from sima_attn.train.logs import read_log


def plot_learning_curve(folder: Path, path: Path, title: str) -> None:
    """Loss of training and evaluation, and the evaluated accuracy (or the first other metric), against epochs."""
    check_can_plot()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train = read_log(folder / "train.csv") if (folder / "train.csv").exists() else []
    evaluated = read_log(folder / "eval.csv") if (folder / "eval.csv").exists() else []
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    if train:
        left.plot([float(r["epoch"]) for r in train], [float(r["loss"]) for r in train], color="grey", label="train")
    epochs = [float(r["epoch"]) for r in evaluated]
    metrics = [name for name in (evaluated[0] if evaluated else {}) if name not in ("step", "epoch")]
    if "loss" in metrics:
        left.plot(epochs, [float(r["loss"]) for r in evaluated], color="crimson", label="val")
    others = [name for name in metrics if name.removeprefix("ema_") not in ("loss", "images")]
    for name in others:
        values = [float(r[name]) for r in evaluated]
        right.plot(
            epochs, values, "--" if name.startswith("ema_") else "-", label=f"{name}: {values[-1]:.2f} at the end"
        )
    left.set_ylabel("loss")
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
