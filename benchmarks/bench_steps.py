"""A benchmark in steps that fit into short slots of a device.

Each step has a folder of its own. Finished steps are skipped, an interrupted run is resumed from its last checkpoint,
and a trained model whose measurement was cut off is measured from its weights.
"""

import argparse
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from sima_attn._files import atomic_write
from sima_attn._settings import with_overrides
from sima_attn.models.weight_files import CHECKPOINTS, checkpoints
from sima_attn.report.rows import write_rows
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.grid import training_speed
from sima_attn.train.logs import read_log
from sima_attn.train.run import RunFolder, refuse_changes

ROW = "row.json"  # in the folder of a step: it is finished
CHECKPOINTS_BY_TIME = "run.checkpoint_minutes=1"  # what a killed run loses at most


@dataclass(frozen=True)
class StepBench(ABC):
    """Data, folder and settings of a benchmark.

    Attributes:
        settings: Changes to all recipes, as for `--set`.
        steps: Their names, in the order of the table. The first one is for the others, and has no row.
        row_type: Of the rows of the others.
    """

    data: str
    folder: Path
    device: str
    settings: Sequence[str]

    steps: ClassVar[tuple[str, ...]]
    row_type: ClassVar[type]

    @abstractmethod
    def make(self, name: str, place: Path) -> Any:
        """Make a step in its folder and return its row, of the first one a dictionary."""

    @abstractmethod
    def table(self, rows: Sequence[Any]) -> TextTable:
        """One line per row."""

    def is_done(self, name: str) -> bool:
        """Whether a step is finished."""
        return (self.folder / name / ROW).exists()

    def run(self, name: str) -> None:
        """Make a step, unless it is finished."""
        if self.is_done(name):
            print(f"{name}: finished before")
            return
        row = self.make(name, self.folder / name)
        with atomic_write(self.folder / name / ROW) as temporary:
            temporary.write_text(json.dumps(row if isinstance(row, dict) else asdict(row)))
        for path in (self.folder / name).glob(f"*/{CHECKPOINTS}/step-*"):
            path.unlink()  # several times as large as the weights, which are kept
        print(f"{name}: {row}" if isinstance(row, dict) else self.table([row]).markdown())

    def rows(self) -> list[Any]:
        """The rows of all finished steps."""
        files = [self.folder / name / ROW for name in self.steps[1:] if self.is_done(name)]
        return [self.row_type(**json.loads(file.read_text())) for file in files]

    def run_all(self, only: Sequence[str] | None, out: Path | None) -> None:
        """Make steps, by default all, or none where a file for the rows is given; it is written after each step."""
        for name in only or ([] if out else self.steps):
            self.run(name)
            if out and (rows := self.rows()):
                write_rows(out, rows)
        if out:
            if not only:
                write_rows(out, self.rows())
            print(self.table(self.rows()).markdown())


def step_parser(about: str, data: str, folder: str, steps: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all benchmarks in steps have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help=f"{data}, as for `sima train`")
    parser.add_argument("--folder", type=Path, default=Path(folder), help="folder for the runs")
    parser.add_argument("--only", action="append", choices=steps, help="repeatable; by default all that are missing")
    parser.add_argument(
        "--rows", type=Path, help="CSV file for the rows of all finished steps; makes no steps without --only"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all recipes")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return parser


def train_once(folder: Path, kind: type, settings: Sequence[str], train: Callable[..., object]) -> None:
    """Train into the folder of a run, unless it has its weights.

    Args:
        kind: Of its recipe.
        settings: With which the run is to be made, or was made.
        train: Its argument `resume` says whether there is a checkpoint.
    """
    run = RunFolder(folder)
    if run.weights.exists():
        saved = run.read_recipe(kind)
        refuse_changes(f"the run in {folder}", saved, with_overrides(saved, settings))
        return
    resume = bool(checkpoints(run.checkpoints))
    if not resume:  # it was killed before its first step
        shutil.rmtree(folder, ignore_errors=True)
    train(resume=resume)


def steps_and_seconds(folder: Path, batch: int) -> tuple[int, float]:
    """Steps and seconds of training alone, of a run that may have been resumed."""
    steps, seconds, _ = training_speed(read_log(folder / "train.csv"), batch)
    return steps, seconds


def last_top1(folder: Path) -> float:
    """Top-1 of the last evaluation of a run, in percent."""
    return round(float(read_log(folder / "eval.csv")[-1]["top1"]), 2)
