"""What a linearization reached: report.md, CSV files of rows and a picture in the run folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sima_attn._files import atomic_write
from sima_attn.distill.features import draw_features
from sima_attn.distill.keeping import Metrics, keep_blocks
from sima_attn.distill.networks import build_student, run
from sima_attn.distill.recipes import LinearizeRecipe
from sima_attn.distill.result import Linearized
from sima_attn.distill.speed import TEACHER, Autocast, SpeedRow, measure_speed, sizes_for
from sima_attn.models.huggingface import users_path
from sima_attn.report.rows import write_rows
from sima_attn.report.tables import TextTable

SHOWN_KEPT = (0, 1, 2, 4)  # numbers of kept attentions in the table of the trade
STUDENT = "student"
METRICS = {
    "cosine": ("cosine of final tokens", "{:.3f}"),
    "knn_agreement": ("same nearest neighbor as the teacher", "{:.1f} %"),
    "agreement": ("same class as the teacher", "{:.1f} %"),
    "top1": ("top-1", "{:.1f} %"),
    "teacher_top1": ("teacher", "{:.1f} %"),
}


@dataclass(frozen=True)
class BlockRow:
    """Relative squared error of one attention, given the teacher's input, on held-out images."""

    block: str
    attention: str
    error_before: float
    error_after: float


@dataclass(frozen=True)
class MetricsRow:
    """Metrics on held-out images: of a stage, or of a student that keeps attentions; nan where there is none.

    `block` is the attention that is kept in addition to those of the row before.
    """

    stage: str
    kept: int
    block: str
    cosine: float
    agreement: float
    top1: float
    teacher_top1: float


def block_table(done: Linearized) -> TextTable:
    """One line per attention."""
    lines = [
        [block.path, f"{block.error_before:.3f}", "kept" if block.kept else f"{block.error_after:.3f}"]
        for block in done.blocks
    ]
    return TextTable(["attention", "error before", "error after"], lines, set())


def summary_of(done: Linearized) -> str:
    """The metrics in one line."""
    words = [f"{METRICS[name][0]} {METRICS[name][1].format(value)}" for name, value in done.metrics.items()]
    kept = [block.path for block in done.blocks if block.kept]
    return ", ".join(words + ([f"attentions kept: {', '.join(kept)}"] if kept else []))


def stage_table(done: Linearized) -> TextTable:
    """Metrics after the conversion, after each stage, and of the result."""
    lines = [*done.record.stages, ("result", done.metrics)]
    names = [name for name in METRICS if name in done.metrics and name != "knn_agreement"]
    header = ["after", *(METRICS[name][0] for name in names)]
    return TextTable(header, [[stage, *_cells(metrics, names)] for stage, metrics in lines], {len(lines) - 1})


def trade_table(done: Linearized, speed: list[SpeedRow]) -> TextTable:
    """What keeping more attentions gains and costs, measured after the first stage."""
    ranking = done.record.ranking
    names = [name for name in METRICS if name in ranking[0].metrics and name != "teacher_top1"]
    times = [row for row in speed if row.model not in (TEACHER, STUDENT)]  # measured side by side
    sizes = sorted({row.pixels for row in times})
    header = ["kept", "attention", *(METRICS[name][0] for name in names), *(f"speedup at {px} px" for px in sizes)]
    lines = []
    for K in _shown_counts(done):
        found = [[row for row in times if (row.kept, row.pixels) == (K, px)] for px in sizes]
        cells = [f"{rows[0].speedup:.2f}" if rows else "" for rows in found]
        added = [users_path(done.model, each.path) for each in ranking[1 : K + 1]]
        lines.append([str(K), ", ".join(added), *_cells(ranking[K].metrics, names), *cells])
    return TextTable(header, lines)


def speed_table(rows: list[SpeedRow]) -> TextTable:
    """Teacher and student at each size."""
    header = ["size", "model", "ms", "speedup", "memory, MiB"]
    shown = [row for row in rows if row.model in (TEACHER, STUDENT)]
    lines = [
        [f"{row.pixels} px", row.model, f"{row.p50_ms:.1f}", f"{row.speedup:.2f}", f"{row.peak_mib:.1f}"]
        for row in shown
    ]
    return TextTable(header, lines)


def write_report(
    done: Linearized,
    recipe: LinearizeRecipe,
    folder: Path,
    *,
    teacher: nn.Module,
    photos: Tensor | None,
    autocast: Autocast,
) -> None:
    """Measure what is left to measure; write rows, a picture and a page.

    Args:
        photos: A few held-out images [n, 3, S, S] for the picture; None omits it.
        autocast: Context of a forward pass, in the precision of the run.
    """
    attention = str(recipe.model.attention)
    theirs = recipe.transfer.teacher_attention or "the teacher's"
    blocks = [
        BlockRow(
            block.path,
            theirs if block.kept else attention,
            round(block.error_before, 5),
            round(block.error_after, 5),
        )
        for block in done.blocks
    ]
    write_rows(folder / "blocks.csv", blocks)
    stages = [*done.record.stages, ("result", done.metrics)]
    write_rows(folder / "stages.csv", [_metrics_row(name, len(done.record.kept), "", m) for name, m in stages])
    parts = [f"# {recipe.model.name} with {attention}", summary_of(done)]
    parts += ["## Stages", f"On held-out images. {_selection(recipe)}", stage_table(done).markdown()]
    parts += [
        "## Attentions",
        "Relative squared error of each attention, given the teacher's input, after conversion and at the end.",
        block_table(done).markdown(),
    ]
    speed, notes = _speed(done, recipe, teacher, autocast) if recipe.report.speed else ([], [])
    if done.record.ranking:
        ranked = [
            _metrics_row("blocks", K, users_path(done.model, kept.path), kept.metrics)
            for K, kept in enumerate(done.record.ranking)
        ]
        write_rows(folder / "keep.csv", ranked)
        parts += [
            "## Kept attentions",
            "Students that keep some attentions of the teacher, after the first stage"
            f"{'; speedup against the teacher' * bool(speed)}.",
            trade_table(done, speed).markdown(),
        ]
    if speed:
        write_rows(folder / "speed.csv", speed)
        of = f"{speed[0].device}, {speed[0].precision}, batch {speed[0].batch}"
        fewest = min(row.samples for row in speed)
        times = f"One forward pass ({of}), median of at least {fewest} samples; memory beside the weights."
        parts += ["## Time and memory", times, *notes]
        parts += [speed_table(speed).markdown()]
    if photos is not None:
        parts += ["## Features", _draw(done, recipe, folder / "features.png", teacher, photos, autocast)]
    with atomic_write(folder / "report.md") as temporary:
        temporary.write_text("\n\n".join(parts) + "\n")


def _shown_counts(done: Linearized) -> list[int]:
    """Numbers of kept attentions in the table of the trade: the usual ones and that of the run, as far as ranked."""
    return sorted({K for K in (*SHOWN_KEPT, len(done.record.kept)) if len(done.record.ranking) > K})


def _selection(recipe: LinearizeRecipe) -> str:
    by = "accuracy, since the run has a supervised stage" if recipe.schedule.finetune_epochs else "cosine"
    return f"The result has the weights with the best {by}."


def _cells(metrics: Metrics, names: list[str]) -> list[str]:
    return [METRICS[name][1].format(metrics[name]) for name in names]


def _metrics_row(stage: str, kept: int, block: str, metrics: Metrics) -> MetricsRow:
    values = {name: round(metrics.get(name, math.nan), 5) for name in ("cosine", "agreement", "top1", "teacher_top1")}
    return MetricsRow(stage, kept, block, **values)


def _speed(
    done: Linearized, recipe: LinearizeRecipe, teacher: nn.Module, autocast: Autocast
) -> tuple[list[SpeedRow], list[str]]:
    """Teacher and student at all sizes; for the trade, students with other numbers of kept attentions at one size."""
    sizes = sizes_for(teacher, recipe.data.size)
    models = {TEACHER: (teacher, 0), STUDENT: (done.model, len(done.record.kept))}
    rows, notes = measure_speed(models, sizes, precision=recipe.run.precision, autocast=autocast)
    measured = [row.pixels for row in rows]
    order = [each.path for each in done.record.ranking[1:]]
    if not order or not measured:
        return rows, notes
    others = {TEACHER: (teacher, 0)}
    for K in _shown_counts(done):
        other = build_student(teacher, recipe.model, str(recipe.model.attention)).to(next(teacher.parameters()).device)
        keep_blocks(other, teacher, order[:K])
        others[f"{K} kept"] = (other.eval(), K)
    # The second size: at the first one all are about as fast, and the last one takes long on a CPU.
    size = sorted(set(measured))[:2][-1]
    trade, _ = measure_speed(others, [size], precision=recipe.run.precision, autocast=autocast)
    rows += [row for row in trade if row.model != TEACHER]
    return rows, notes


@torch.no_grad()
def _draw(
    done: Linearized, recipe: LinearizeRecipe, path: Path, teacher: nn.Module, photos: Tensor, autocast: Autocast
) -> str:
    """Draw the features; the text for the page."""
    with autocast():
        theirs, ours = (run(model, photos).tokens for model in (teacher, done.model))
    try:
        draw_features(path, photos, theirs, ours, recipe.data, str(recipe.model.attention))
    except ValueError as error:
        return f"There is no picture of the features: {error}"
    return f"![Photos, and the final tokens of teacher and student as colors]({path.name})"
