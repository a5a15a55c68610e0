"""Rows of the benchmarks -> figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sima_attn.report.figures import check_can_plot, figure
from sima_attn.train.logs import read_log

if TYPE_CHECKING:
    from sima_attn.bench.demo import DemoRow, TwinRow
    from sima_attn.bench.edge import EdgeRow
    from sima_attn.bench.gpu import GpuRow


def plot_time_against_tokens(rows: Sequence[DemoRow], path: Path) -> None:
    """Time of each attention against the number of tokens, both axes logarithmic."""
    check_can_plot()
    from matplotlib import colormaps

    names = list(dict.fromkeys(row.attention for row in rows))
    with figure(path, figsize=(9, 6)) as (_, axes):
        # Slowest at the right first, so that the legend has the order of the lines.
        last = {row.attention: row.p50_ms for row in rows if max(r.N for r in rows) == row.N}
        colors = colormaps["tab20"]
        for name in sorted(names, key=lambda name: -last[name]):
            mine = sorted((row for row in rows if row.attention == name), key=lambda row: row.N)
            tokens, times = [row.N for row in mine], [row.p50_ms for row in mine]
            if name == "sima":
                axes.plot(tokens, times, "o-", color="crimson", linewidth=3, label="SimA", zorder=3)
            elif name == "softmax":
                axes.plot(tokens, times, "s-", color="black", linewidth=2.5, label="softmax (fused)", zorder=2)
            else:
                style = "--" if mine[0].exps == 0 else "-"
                axes.plot(tokens, times, style, marker=".", color=colors(names.index(name)), linewidth=1.2, label=name)
        first = rows[0]
        axes.set(xscale="log", yscale="log", xlabel="tokens N", ylabel="time of the attention core, ms (median)")
        ticks = sorted({row.N for row in rows})
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.minorticks_off()
        axes.set_title(f"{first.H} heads of {first.D} channels, float32, {first.threads} threads, {first.device}")
        axes.grid(alpha=0.3)
        axes.legend(title="SimA and dashed: no exp()", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def plot_gpu(rows: Sequence[GpuRow], path: Path) -> None:
    """Time and share of the bandwidth limit against the tokens per image, for 32768 tokens in total."""
    everywhere = [
        row
        for row in rows
        if (row.direction, row.dtype, row.H) == ("forward", "bfloat16", 6) and row.B * row.N == 32768
    ]
    styles = {
        "flash": ("softmax, flash", "s-", "black"),
        "cudnn": ("softmax, cuDNN", "D-", "dimgray"),
        "sima": ("SimA", "o-", "crimson"),
    }
    with figure(path, columns=2, figsize=(12, 4.6)) as (whole, (left, right)):
        for method, (label, style, color) in styles.items():
            mine = sorted((row for row in everywhere if row.method == method), key=lambda row: row.N)
            tokens = [row.N for row in mine]
            left.plot(tokens, [row.p50_us for row in mine], style, color=color, label=label)
            right.plot(tokens, [100 * row.share_of_limit for row in mine], style, color=color, label=label)
        limit = next(row.limit_us for row in everywhere)
        left.axhline(limit, color="gray", linestyle=":", label="q, k, v read and o written once")
        ticks = sorted({row.N for row in everywhere})
        for axes in (left, right):
            axes.set(xscale="log", xlabel="tokens per image N, 32768 tokens in total")
            axes.set_xticks(ticks, [str(n) for n in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        left.set(yscale="log", ylabel="time of the attention core, us (median)")
        right.set(ylabel="share of the bandwidth limit, %")
        left.legend(frameon=False)
        whole.suptitle(f"6 heads of 64 channels, bfloat16, forward, {rows[0].device}")


def plot_edge(rows: Sequence[EdgeRow], path: Path) -> None:
    """Speed relative to the float32 baseline: one panel per family and runtime, bars by image size and precision."""
    threads = min(row.threads for row in rows)
    rows = [row for row in rows if row.threads == threads]
    families = list(dict.fromkeys(row.family for row in rows))
    runtimes = list(dict.fromkeys(row.runtime for row in rows))
    colors = {"sima": "crimson", "sima + relu": "darkorange"}
    size = (4.2 * len(families), 3.4 * len(runtimes))
    with figure(path, rows=len(runtimes), columns=len(families), figsize=size, squeeze=False) as (whole, panels):
        for line, runtime in zip(panels, runtimes, strict=True):
            for axes, family in zip(line, families, strict=True):
                mine = [row for row in rows if row.runtime == runtime and row.family == family]
                groups = list(dict.fromkeys((row.pixels, row.precision) for row in mine))
                for i, variant in enumerate(dict.fromkeys(row.variant for row in mine)):
                    bars = {(row.pixels, row.precision): row.speedup for row in mine if row.variant == variant}
                    places = [x + 0.27 * (i - 1) for x, group in enumerate(groups) if group in bars]
                    heights = [bars[group] for group in groups if group in bars]
                    axes.bar(places, heights, 0.25, color=colors.get(variant, "dimgray"), label=variant)
                axes.axhline(1, color="black", linewidth=0.8)
                axes.set_xticks(range(len(groups)), [f"{pixels} px\n{precision}" for pixels, precision in groups])
                axes.set_title(f"{family}, {runtime}", fontsize=10)
                axes.legend(frameon=False, fontsize=8)
            line[0].set_ylabel("speed relative to the float32 baseline")
        whole.suptitle(f"one image, {threads} thread{'s' * (threads > 1)}, {rows[0].device}")


def plot_twins(rows: Sequence[TwinRow], out: Path, path: Path) -> None:
    """Accuracy by epoch, training time and exp() calls of the twins, from their rows and logs under `out`."""
    colors = {"sima": "crimson", "softmax": "black"}
    with figure(path, columns=3, figsize=(12, 4), width_ratios=(2, 1, 1)) as (whole, (curves, times, exps)):
        for row in rows:
            log = read_log(out / row.attention / "eval.csv")
            label = f"{row.attention}: {row.top1:.1f} % at the end"
            epochs, top1 = [float(r["epoch"]) for r in log], [float(r["top1"]) for r in log]
            curves.plot(epochs, top1, color=colors[row.attention], label=label)
        curves.set(xlabel="epoch", ylabel="accuracy on the test digits, %")
        curves.grid(alpha=0.3)
        curves.legend(frameon=False, loc="lower right")
        names = [row.attention for row in rows]
        for axes, values, title, text in (
            (times, [row.seconds for row in rows], "training, seconds", "{:.0f} s"),
            (exps, [row.attention_exps + row.other_exps for row in rows], "exp() per image", "{:,}"),
        ):
            bars = axes.bar(names, values, color=[colors[name] for name in names])
            axes.bar_label(bars, [text.format(value) for value in values])
            axes.set_title(title)
        whole.suptitle(f"The same recipe, one word changed. {rows[0].threads} thread, {rows[0].device}")
