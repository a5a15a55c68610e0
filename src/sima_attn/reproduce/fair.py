"""The fair comparison: each method at the best setting of the same sweep, then that setting with several seeds.

METHODS is the table; a new method is one line of it. `next_runs` says what is still to be run, so that the table grows
from one call of the command to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from sima_attn._errors import check_known
from sima_attn.report.figures import figure
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.miniature import GRID, VIT, XCIT, CurveRow, MiniatureRun, ResultRow, SizeRow
from sima_attn.reproduce.miniature_report import sizes_table

SEEDS = (0, 1, 2)
LEARNING_RATES = ("1e-3", "2e-3")
BEYOND = {"1e-3": "5e-4", "2e-3": "4e-3"}  # best rate of the sweep -> the next one in its direction, which is tried too
ALL_RATES = (BEYOND["1e-3"], *LEARNING_RATES, BEYOND["2e-3"])
ACTIVATIONS = ("gelu", "relu")


class Setting(NamedTuple):
    """What a sweep varies."""

    activation: str
    lr: str


@dataclass(frozen=True)
class Method:
    """One line of the table: an attention in a model, and the method that it is compared with.

    Attributes:
        about: What it is, in words.
        activations: Of its sweep.
        options: Arguments of the model.
    """

    name: str
    about: str
    attention: str
    model: str = VIT
    baseline: str = "softmax"
    activations: tuple[str, ...] = ACTIVATIONS
    options: dict[str, Any] = field(default_factory=dict)

    def sweep(self) -> list[Setting]:
        """The settings that are always tried."""
        return [setting for setting in self.settings() if setting.lr in LEARNING_RATES]

    def settings(self) -> list[Setting]:
        """Those, and the ones beyond them."""
        return [Setting(activation, lr) for activation in self.activations for lr in ALL_RATES]

    def run(self, setting: Setting) -> MiniatureRun:
        """The run of a setting. Methods that share it have one run."""
        kind = "xcit" if self.model == XCIT else "vit"
        return MiniatureRun(
            f"{kind}_{self.attention}_{setting.activation}_{setting.lr}",
            f"{self.about}, {setting.activation}, learning rate {setting.lr}",
            self.attention,
            self.model,
            options={**self.options, **({"relu": True} if setting.activation == "relu" else {})},
            settings=(f"optim.lr={setting.lr}",),
            headline=True,  # evaluated at other image sizes
        )


SCALED_POSITIONS = {"attention_options": {"grid_ref": [16, 16]}}  # the grid at 64 px; for the evaluation at other sizes

METHODS = (
    Method("softmax", "ViT, softmax", "softmax"),
    Method("sima", "ViT, SimA", "sima"),
    Method("sima_relu", "ViT, SimA without any exp()", "sima", activations=("relu",)),
    Method("cosformer", "ViT, cosFormer without re-weighting", "cosformer"),
    Method("softmax_local", "ViT, softmax and a 3 x 3 convolution of v", "softmax_local", baseline="softmax_local"),
    Method("sima_local", "ViT, SimA and a 3 x 3 convolution of v", "sima_local", baseline="softmax_local"),
    Method("relu2", "ViT, relu2, which has the same convolution", "relu2", baseline="softmax_local"),
    Method(
        "softmax_rope",
        "ViT, softmax, the convolution and rotations",
        "softmax_rope",
        baseline="softmax_rope",
        options=SCALED_POSITIONS,
    ),
    Method(
        "sima_rope",
        "ViT, SimA, the convolution and rotations",
        "sima_rope",
        baseline="softmax_rope",
        options=SCALED_POSITIONS,
    ),
    Method(
        "relu2_rope",
        "ViT, relu2, the convolution and rotations",
        "relu2_rope",
        baseline="softmax_rope",
        options=SCALED_POSITIONS,
    ),
    Method("xcit_xca", "XCiT, XCA", "xca", XCIT, "xcit_xca"),
    Method("xcit_sima", "XCiT, SimA", "sima", XCIT, "xcit_xca"),
)
FAIR_GRID = replace(
    GRID,
    runs=tuple({run.name: run for method in METHODS for run in map(method.run, method.settings())}.values()),
)


@dataclass(frozen=True)
class Outcome:
    """The best setting of a method.

    Attributes:
        tried: Number of settings of its sweep.
        top1: Its accuracy with each seed so far.
        failed: Number of seeds with which it diverged.
    """

    setting: Setting
    tried: int
    top1: list[float]
    failed: int

    @property
    def squared_error(self) -> float:
        """The square of the standard error of the mean."""
        return stdev(self.top1) ** 2 / len(self.top1)


class Results:
    """The results of one schedule."""

    def __init__(self, rows: Sequence[ResultRow], epochs: int) -> None:
        self.top1 = {(row.name, row.seed): row.top1 for row in rows if row.epochs == epochs}  # nan if it diverged
        self.seeds = sorted({seed for _, seed in self.top1})

    def has(self, method: Method, setting: Setting, seed: int) -> bool:
        """Whether this run was made."""
        return (method.run(setting).name, seed) in self.top1

    def sweep(self, method: Method, seed: int) -> dict[Setting, float]:
        """The settings that were tried with a seed, and their accuracies."""
        return {
            setting: self.top1[method.run(setting).name, seed]
            for setting in method.settings()
            if self.has(method, setting, seed)
        }

    def best(self, method: Method, seed: int) -> Setting | None:
        """The setting with the best accuracy with this seed; None where all runs diverged."""
        finished = {setting: top1 for setting, top1 in self.sweep(method, seed).items() if not math.isnan(top1)}
        return max(finished, key=lambda setting: finished[setting], default=None)

    def outcome(self, method: Method) -> Outcome | None:
        """What is known of the best setting of a method; None before its first run."""
        best = self.best(method, self.seeds[0]) if self.seeds else None
        if best is None:
            return None
        found = [self.top1[method.run(best).name, seed] for seed in self.seeds if self.has(method, best, seed)]
        finished = [top1 for top1 in found if not math.isnan(top1)]
        return Outcome(best, len(self.sweep(method, self.seeds[0])), finished, len(found) - len(finished))


def select_methods(only: Sequence[str]) -> list[Method]:
    """The methods with these names, by default all."""
    known = {method.name: method for method in METHODS}
    for name in only:
        check_known("method", name, known)
    return [method for method in METHODS if not only or method.name in only]


def next_runs(
    rows: Sequence[ResultRow], *, epochs: int, seeds: Sequence[int] = SEEDS, only: Sequence[str] = ()
) -> list[MiniatureRun]:
    """The runs of the methods with these names that can be made now; none if their lines of the table are complete.

    First the sweeps with the lowest seed, then the setting beyond the best one, then the best settings with the other
    seeds.
    """
    results, first = Results(rows, epochs), min(seeds)
    wanted: dict[str, MiniatureRun] = {}
    for method in select_methods(only):
        asked = [(setting, first) for setting in method.sweep()]
        if all(results.has(method, *run) for run in asked):
            best = results.best(method, first)
            if best is None:
                continue
            asked = [(best, seed) for seed in sorted(seeds)]
            if best.lr in BEYOND:
                beyond = best._replace(lr=BEYOND[best.lr])
                if not results.has(method, beyond, first):
                    asked = [(beyond, first)]
        for setting, seed in asked:
            if not results.has(method, setting, seed):
                run = replace(method.run(setting), seed=seed, epochs=epochs)
                wanted[run.folder] = run
    return list(wanted.values())


def verdict(ours: Outcome, baseline: Outcome | None) -> str:
    """The difference of two means, or "level" where it is smaller than two standard errors."""
    if baseline is None:
        return "no run of it"
    difference = mean(ours.top1) - mean(baseline.top1)
    if min(len(ours.top1), len(baseline.top1)) < 2:
        return f"{difference:+.1f}, one seed"
    if abs(difference) < 2 * math.sqrt(ours.squared_error + baseline.squared_error):
        return f"level ({difference:+z.1f})"
    return f"{difference:+.1f}"


def fair_table(rows: Sequence[ResultRow]) -> TextTable:
    """One line per method and schedule: its best setting, mean and standard deviation, and the verdict."""
    header = ["method", "epochs", "settings tried", "best setting", "top-1", "seeds", "to its baseline"]
    lines = []
    for epochs in sorted({row.epochs for row in rows}):
        results = Results(rows, epochs)
        outcomes = {method.name: results.outcome(method) for method in METHODS}
        for method in METHODS:
            ours, baseline = outcomes[method.name], outcomes[method.baseline]
            if ours is None:
                continue
            spread = f" ± {stdev(ours.top1):.1f}" if len(ours.top1) > 1 else ""
            lines.append(
                [
                    method.about,
                    str(epochs),
                    str(ours.tried),
                    f"{ours.setting.activation}, {ours.setting.lr}",
                    f"{mean(ours.top1):.1f}{spread}",
                    f"{len(ours.top1)}{f', {ours.failed} diverged' * bool(ours.failed)}",
                    "-" if method.name == method.baseline else verdict(ours, baseline),
                ]
            )
    return TextTable(header, lines)


def sweep_table(rows: Sequence[ResultRow]) -> TextTable:
    """The accuracy at every setting that was tried, with the seed of the sweep; one line per method and schedule."""
    settings = [Setting(activation, lr) for activation in ACTIVATIONS for lr in ALL_RATES]
    lines = []
    for epochs in sorted({row.epochs for row in rows}):
        results = Results(rows, epochs)
        for method in METHODS:
            sweep = results.sweep(method, results.seeds[0])
            if sweep:
                cells = [f"{sweep[setting]:.1f}" if setting in sweep else "-" for setting in settings]
                lines.append([method.about, str(epochs), *cells])
    return TextTable(["method", "epochs", *(f"{setting.activation}, {setting.lr}" for setting in settings)], lines)


def best_sizes_table(results: Sequence[ResultRow], sizes: Sequence[SizeRow]) -> TextTable:
    """The best setting of each method at other image sizes, the mean over its seeds."""
    best = {
        (method.run(ours.setting).name, epochs)
        for epochs in {row.epochs for row in results}
        for method in METHODS
        if (ours := Results(results, epochs).outcome(method)) is not None
    }
    return sizes_table([row for row in sizes if (row.name, row.epochs) in best])


def tables(results: Sequence[ResultRow], sizes: Sequence[SizeRow], curves: Sequence[CurveRow]) -> dict[str, TextTable]:
    """Title -> table."""
    found = {
        "Each method at its best setting": fair_table(results),
        "Top-1 at each setting of the sweep": sweep_table(results),
    }
    return found | ({"Top-1 at other image sizes": best_sizes_table(results, sizes)} if sizes else {})


def plot(results: Sequence[ResultRow], sizes: Sequence[SizeRow], curves: Sequence[CurveRow], path: Path) -> None:
    """The settings of each method as dots, the best one filled with a dot per seed, and the mean of these as a line.

    Methods whose baseline has no run are omitted: their place on the axis would compare them with other baselines.
    """
    epochs = max(row.epochs for row in results)
    found = Results(results, epochs)
    known = {method.name: ours for method in METHODS if (ours := found.outcome(method)) is not None}
    outcomes = [(method, known[method.name]) for method in METHODS if known.keys() >= {method.name, method.baseline}]
    with figure(path, figsize=(8, 0.5 * len(outcomes) + 1.2)) as (_, axes):
        for place, (method, ours) in enumerate(outcomes):
            others = [top1 for setting, top1 in found.sweep(method, found.seeds[0]).items() if setting != ours.setting]
            axes.scatter(others, [place] * len(others), facecolors="none", edgecolors="gray", zorder=2)
            axes.scatter(ours.top1, [place] * len(ours.top1), color="crimson", zorder=3)
            axes.plot([mean(ours.top1)] * 2, [place - 0.3, place + 0.3], color="crimson", zorder=3)
        axes.set_yticks(range(len(outcomes)), [method.about for method, _ in outcomes])
        axes.invert_yaxis()
        axes.set_xlabel(f"top-1 on val in percent, {epochs} epochs")
        axes.set_title("best setting: one dot per seed, and their mean; open: other settings", fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
