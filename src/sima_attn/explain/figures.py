"""Rows -> plots. Needs matplotlib, which is imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sima_attn._files import written_whole
from sima_attn.bench.figures import check_can_plot

if TYPE_CHECKING:
    from sima_attn.explain.deletion import DeletionRow
    from sima_attn.explain.effects import AttentionRow

COLOURS = {"highest first": "crimson", "random": "dimgrey", "lowest first": "royalblue"}


def plot_statistics(rows: Sequence[AttentionRow], path: Path) -> None:
    """Share of negative entries and the largest channel's share, by layer; one line a model."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == name]
        layers = [row.layer + 1 for row in mine]
        left.plot(layers, [100 * row.negative_share for row in mine], "o-", label=name)
        (line,) = right.plot(layers, [100 * row.largest_channel_share for row in mine], "o-", label=name)
        right.plot(layers, [100 / row.D for row in mine], ":", color=line.get_color())
    left.set_title("negative entries of the attention matrix")
    right.set_title("the largest channel's share (dotted: 1/D)")
    for axes in (left, right):
        axes.set_xlabel("layer")
        axes.set_ylabel("%")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    _save(plt, figure, path)


def plot_deletion(rows: Sequence[DeletionRow], path: Path) -> None:
    """Probability of the right class against the share of patches hidden, or sharpened."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for axes, mode, verb in zip(panels, ("deletion", "insertion"), ("hidden", "sharpened"), strict=True):
        for order, colour in COLOURS.items():
            mine = [row for row in rows if row.mode == mode and row.order == order]
            label = f"{order} (area {mine[0].area:.3f})"
            axes.plot([100 * row.fraction for row in mine], [row.probability for row in mine], "o-", color=colour)
            axes.lines[-1].set_label(label)
        axes.set_title(mode)
        axes.set_xlabel(f"patches {verb}, %")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    panels[0].set_ylabel("mean probability of the right class")
    first = rows[0]
    figure.suptitle(f"{first.model}, {first.of} of layer {first.layer}, {first.images} images")
    _save(plt, figure, path)


def _pyplot() -> Any:
    check_can_plot()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix.lstrip(".") or "png")
    plt.close(figure)
