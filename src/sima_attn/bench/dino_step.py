"""A step of DINO in the recipe `miniature`: what torch.compile and a recorded pass make of it.

The images are scikit-learn's digits at 64 pixels: how long a step takes does not depend on what they show.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sima_attn._errors import unknown_name
from sima_attn._settings import with_overrides
from sima_attn.dino.task import train_dino
from sima_attn.report.rows import processor_name, today
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.dino import DINO, GRID, dino_recipe
from sima_attn.train.logs import read_log
from sima_attn.train.recorded import PLAIN_STEPS

RUNS = ("sima", "xca", "vit_softmax")  # of the grid
WAYS = {"plain": (False, False), "recorded": (False, True), "compiled": (True, False), "both": (True, True)}
LOGGED = 4  # steps that a row of the log is the mean of


def ways_on(device: str) -> dict[str, tuple[bool, bool]]:
    """Way -> (compiled, recorded), those that a device has: only a CUDA device records."""
    return {way: flags for way, flags in WAYS.items() if device == "cuda" or not flags[1]}


@dataclass(frozen=True)
class DinoStepRow:
    """The median step of a run. `compiled`: run.compile; `recorded`: run.cuda_graph."""

    name: str
    model: str
    attention: str
    compiled: bool
    recorded: bool
    batch: int
    views: int
    steps: int
    ms: float
    images_per_second: float
    device: str
    torch: str
    date: str


def bench_dino_step(
    *,
    device: str,
    names: Sequence[str] = RUNS,
    epochs: int = 6,
    settings: Sequence[str] = (),
    on_start: Callable[[str], None] = lambda what: None,
) -> Iterator[DinoStepRow]:
    """A row for each run of the grid and each way that the device has.

    Args:
        epochs: Of the digits, 11 steps each at a batch of 128.
        settings: Changes of the recipe, as `--set` takes them.
    """
    known = {run.name: run for run in GRID if run.weights == DINO}
    for name in names:
        if name not in known:
            raise unknown_name("run", name, known)
    for name in names:
        torch.compiler.reset()  # blocks of another model are other code under the same name
        base = dino_recipe(replace(known[name], epochs=epochs), "digits", on_gpu=device == "cuda")
        base = with_overrides(base, ("probe.bank=0", f"run.log_steps={LOGGED}", *settings))
        for way, (compiled, recorded) in ways_on(device).items():
            on_start(f"{name}, {way}")
            recipe = replace(base, run=replace(base.run, compile=compiled, cuda_graph=recorded))
            with tempfile.TemporaryDirectory() as folder:
                finished = train_dino(recipe, Path(folder) / "run", device=device, quiet=True)
                log = read_log(Path(folder) / "run" / "train.csv")
            rates = sorted(float(row["images_per_second"]) for row in log if int(row["step"]) > LOGGED + PLAIN_STEPS)
            if not rates:
                raise ValueError(f"{finished.steps} steps are too few to time: more epochs, or a smaller run.batch")
            rate = rates[len(rates) // 2]
            yield DinoStepRow(
                name=name,
                model=recipe.model.name,
                attention=str(recipe.model.attention),
                compiled=compiled,
                recorded=recorded,
                batch=recipe.run.batch,
                views=recipe.crops.global_count + recipe.crops.local_count,
                steps=finished.steps,
                ms=round(1e3 * recipe.run.batch / rate, 2),
                images_per_second=rate,
                device=processor_name(device),
                torch=torch.__version__,
                date=today(),
            )


def dino_step_table(rows: Sequence[DinoStepRow]) -> TextTable:
    """Milliseconds a step: a line a model, a column a way."""
    ways = {flags: way for way, flags in WAYS.items()}
    seen = [way for way in WAYS if any(ways[row.compiled, row.recorded] == way for row in rows)]
    times = {(row.name, ways[row.compiled, row.recorded]): f"{row.ms:.1f}" for row in rows}
    about = {run.name: run.about for run in GRID}
    lines = [
        [name, about[name], *(times.get((name, way), "-") for way in seen)]
        for name in dict.fromkeys(row.name for row in rows)
    ]
    bold = {i for i, line in enumerate(lines) if line[0] == "sima"}
    return TextTable(["run", "what it is", *(f"{way}, ms" for way in seen)], lines, bold)
