"""Rows of the explain commands -> figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sima_attn.explain.deletion import DeletionRow
from sima_attn.explain.effects import AttentionRow
from sima_attn.report.figures import figure

COLORS = {"highest first": "crimson", "random": "dimgray", "lowest first": "royalblue"}
DASHES = {"q": "o-", "k": "s--"}


def plot_statistics(rows: Sequence[AttentionRow], path: Path) -> None:
    """Share of negative entries and share of the largest channel, by layer; one line per model."""
    with figure(path, columns=2, figsize=(11, 4.2)) as (_, (left, right)):
        for name in dict.fromkeys(row.model for row in rows):
            mine = [row for row in rows if row.model == name]
            layers = [row.layer + 1 for row in mine]
            left.plot(layers, [100 * row.negative_share for row in mine], "o-", label=name)
            (line,) = right.plot(layers, [100 * row.largest_channel_share for row in mine], "o-", label=name)
            right.plot(layers, [100 / row.D for row in mine], ":", color=line.get_color())
        left.set_title("negative entries of the attention matrix")
        right.set_title("share of the largest channel (dotted: 1/D)")
        for axes in (left, right):
            axes.set(xlabel="layer", ylabel="%")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        left.legend(frameon=False)


def plot_deletion(rows: Sequence[DeletionRow], path: Path) -> None:
    """One layer: probability of the right class against the share of patches; several layers: areas by layer."""
    several = len({row.layer for row in rows}) > 1
    with figure(path, columns=2, figsize=(11, 4.2), sharey=not several) as (whole, panels):
        for axes, mode, verb in zip(panels, ("deletion", "insertion"), ("hidden", "sharpened"), strict=True):
            mine = [row for row in rows if row.mode == mode]
            if several:
                _plot_areas(axes, mine)
            else:
                _plot_curves(axes, mine)
                top = 1.3 * max(row.probability for row in rows)  # room for the legend
                axes.set(ylim=(0, top), xlabel=f"patches {verb}, %")
            axes.set_title(mode)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False, fontsize="small")
        panels[0].set_ylabel(
            "area minus that of the random order" if several else "mean probability of the right class"
        )
        of = " and ".join(dict.fromkeys(row.of for row in rows))
        where = "" if several else f" of layer {rows[0].layer + 1}"
        whole.suptitle(f"{rows[0].model}, {of}{where}, {rows[0].images} images")


def _plot_curves(axes: Any, rows: Sequence[DeletionRow]) -> None:
    """One line per part and order; the random order is the same for all parts."""
    parts = list(dict.fromkeys(row.of for row in rows))
    for order, color in COLORS.items():
        for part in parts[:1] if order == "random" else parts:
            line = [row for row in rows if (row.of, row.order) == (part, order)]
            name = order if order == "random" else f"{part}, {order}"
            axes.plot(
                [100 * row.fraction for row in line],
                [row.probability for row in line],
                DASHES[part],
                color=color,
                label=f"{name} (area {line[0].area:.3f})",
            )


def _plot_areas(axes: Any, rows: Sequence[DeletionRow]) -> None:
    """Area of each order minus that of the random order, with two standard errors."""
    axes.axhline(0, color=COLORS["random"], label="random")
    for order in (order for order in COLORS if order != "random"):
        for part in dict.fromkeys(row.of for row in rows):
            line = [row for row in rows if (row.of, row.order) == (part, order) and row.fraction == 0]
            axes.errorbar(
                [row.layer + 1 for row in line],
                [row.over_random for row in line],
                yerr=[2 * row.error for row in line],
                fmt=DASHES[part],
                color=COLORS[order],
                capsize=2,
                label=f"{part}, {order}",
            )
    axes.set_xlabel("layer")
