"""Rows of the speed benchmarks -> figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sima_attn.report.figures import check_can_plot, figure

if TYPE_CHECKING:
    from sima_attn.bench.demo import DemoRow
    from sima_attn.bench.gpu import GpuRow


def plot_time_against_tokens(rows: Sequence[DemoRow], path: Path) -> None:
    """Time of each attention against the number of tokens, both logarithmic."""
    check_can_plot()
    from matplotlib import colormaps

    names = list(dict.fromkeys(row.attention for row in rows))
    with figure(path, figsize=(9, 6)) as (_, axes):
        # Most time at the right first, so that the legend reads in the order of the lines.
        last = {row.attention: row.p50_ms for row in rows if max(r.N for r in rows) == row.N}
        colours = colormaps["tab20"]
        for name in sorted(names, key=lambda name: -last[name]):
            mine = sorted((row for row in rows if row.attention == name), key=lambda row: row.N)
            tokens, times = [row.N for row in mine], [row.p50_ms for row in mine]
            if name == "sima":
                axes.plot(tokens, times, "o-", color="crimson", linewidth=3, label="SimA", zorder=3)
            elif name == "softmax":
                axes.plot(tokens, times, "s-", color="black", linewidth=2.5, label="softmax (fused)", zorder=2)
            else:
                style = "--" if mine[0].exps == 0 else "-"
                axes.plot(tokens, times, style, marker=".", color=colours(names.index(name)), linewidth=1.2, label=name)
        first = rows[0]
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = sorted({row.N for row in rows})
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tokens N")
        axes.set_ylabel("time of the attention core, ms (median)")
        axes.set_title(f"{first.H} heads of {first.D} channels, float32, {first.threads} threads, {first.device}")
        axes.grid(alpha=0.3)
        axes.legend(title="dashed: no exp()", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def plot_gpu(rows: Sequence[GpuRow], path: Path) -> None:
    """Time against the number of tokens, and the share of the bandwidth limit, at one number of tokens in all."""
    everywhere = [
        row
        for row in rows
        if (row.direction, row.dtype, row.H) == ("forward", "bfloat16", 6) and row.B * row.N == 32768
    ]
    styles = {
        "flash": ("softmax, flash", "s-", "black"),
        "cudnn": ("softmax, cuDNN", "D-", "dimgrey"),
        "sima": ("SimA", "o-", "crimson"),
    }
    with figure(path, columns=2, figsize=(12, 4.6)) as (whole, (left, right)):
        for method, (label, style, colour) in styles.items():
            mine = sorted((row for row in everywhere if row.method == method), key=lambda row: row.N)
            tokens = [row.N for row in mine]
            left.plot(tokens, [row.p50_us for row in mine], style, color=colour, label=label)
            right.plot(tokens, [100 * row.share_of_limit for row in mine], style, color=colour, label=label)
        limit = next(row.limit_us for row in everywhere)
        left.axhline(limit, color="grey", linestyle=":", label="q, k, v read and o written once")
        ticks = sorted({row.N for row in everywhere})
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xticks(ticks, [str(n) for n in ticks])
            axes.minorticks_off()
            axes.set_xlabel("tokens an image N, 32768 tokens in all")
            axes.grid(alpha=0.3)
        left.set_yscale("log")
        left.set_ylabel("time of the attention core, us (median)")
        right.set_ylabel("share of the bandwidth limit, %")
        left.legend(frameon=False)
        whole.suptitle(f"6 heads of 64 channels, bfloat16, forward, {rows[0].device}")
