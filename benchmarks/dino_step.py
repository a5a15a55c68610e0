"""Time of a DINO training step in the recipe `miniature`: eager, as a CUDA graph, with torch.compile, and both.

    python benchmarks/dino_step.py --only sima --out dino_step.csv

It is meant for a GPU: on a CPU, which has no CUDA graphs, it takes an hour. The images are scikit-learn's digits at 64
pixels: the time of a step does not depend on what they show.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sima_attn._devices import resolve_device
from sima_attn._settings import with_overrides
from sima_attn.dino.task import train_dino
from sima_attn.report.rows import provenance_columns, write_rows
from sima_attn.report.tables import TextTable
from sima_attn.reproduce import dino
from sima_attn.train.logs import read_log
from sima_attn.train.recorded import PLAIN_STEPS

RUNS = ("sima", "xca", "vit_softmax")  # of the grid
# Mode -> (run.compile, run.cuda_graph)
MODES = {"plain": (False, False), "recorded": (False, True), "compiled": (True, False), "both": (True, True)}
LOG_STEPS = 4  # steps per row of the log


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
    *, device: str, names: Sequence[str] = RUNS, epochs: int = 6, settings: Sequence[str] = ()
) -> Iterator[DinoStepRow]:
    """One row for each run of the grid and each mode that the device supports.

    Args:
        epochs: Epochs of the digits, 11 steps each at a batch of 128.
        settings: Changes to the recipe, as for `--set`.
    """
    runs = {run.name: run for run in dino.RUNS if run.weights == dino.DINO}
    for name in names:
        torch.compiler.reset()  # blocks of different models are different code under the same name
        base = dino.dino_recipe(replace(runs[name], epochs=epochs), "digits", on_gpu=device == "cuda")
        base = with_overrides(base, ("probe.bank=0", f"run.log_steps={LOG_STEPS}", *settings))
        for compiled, recorded in MODES.values():
            if recorded and device != "cuda":
                continue
            recipe = replace(base, run=replace(base.run, compile=compiled, cuda_graph=recorded))
            with tempfile.TemporaryDirectory() as folder:
                finished = train_dino(recipe, Path(folder) / "run", device=device, quiet=True)
                log = read_log(Path(folder) / "run" / "train.csv")
            rates = sorted(float(row["images_per_second"]) for row in log if int(row["step"]) > LOG_STEPS + PLAIN_STEPS)
            if not rates:
                raise ValueError(f"{finished.steps} steps are too few to time: use more epochs or a smaller run.batch")
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
                **provenance_columns(device),
            )


def dino_step_table(rows: Sequence[DinoStepRow]) -> TextTable:
    """Milliseconds per step: one line per model, one column per mode."""
    modes = {flags: mode for mode, flags in MODES.items()}
    times = {(row.name, modes[row.compiled, row.recorded]): f"{row.ms:.1f}" for row in rows}
    measured = [mode for mode in MODES if any(key[1] == mode for key in times)]
    about = {run.name: run.about for run in dino.RUNS}
    names = list(dict.fromkeys(row.name for row in rows))
    lines = [[name, about[name], *(times.get((name, mode), "-") for mode in measured)] for name in names]
    bold = {i for i, name in enumerate(names) if name == "sima"}
    return TextTable(["run", "what it is", *(f"{mode}, ms" for mode in measured)], lines, bold)


def main(arguments: list[str] | None = None) -> None:
    """Measure, write rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/dino_step.csv"), help="CSV file for the rows")
    choices = [run.name for run in dino.RUNS if run.weights == dino.DINO]
    parser.add_argument("--only", action="append", choices=choices, help=f"repeatable (default: {', '.join(RUNS)})")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of the digits, 11 steps each")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the recipe")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    given = parser.parse_args(arguments)
    rows: list[DinoStepRow] = []
    names = given.only or RUNS
    for row in bench_dino_step(
        device=resolve_device(given.device), names=names, epochs=given.epochs, settings=given.set
    ):
        rows.append(row)
        write_rows(given.out, rows)  # after each measurement: an interruption keeps the rows so far
    print(f"DINO step, batch {rows[0].batch}, {rows[0].device}\n\n{dino_step_table(rows).markdown()}")
    print(f"\nRows: {given.out}")


if __name__ == "__main__":
    main()
