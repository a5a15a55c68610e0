"""A grid of runs: a table of named runs, each trained in its own folder and turned into rows.

A run is an ordinary run of `sima train` or `sima dino`. Finished runs are skipped, interrupted ones are resumed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np

from sima_attn._errors import check_known
from sima_attn.dino.task import CollapseError
from sima_attn.report.rows import provenance_columns, read_rows, write_rows
from sima_attn.reproduce.processes import in_processes
from sima_attn.train.checkpoint import checkpoints
from sima_attn.train.logs import read_log
from sima_attn.train.non_finite import NonFiniteError
from sima_attn.train.run import RunFolder

RESULTS = "results.csv"  # one row per run; the last file of a run, so that a run that has it is finished
FINISHED = "finished"


@dataclass(frozen=True)
class Run:
    """One line of a grid.

    Attributes:
        about: What it is, in words.
        settings: Changes of the recipe, as for `--set`.
    """

    name: str
    about: str
    settings: tuple[str, ...] = field(default=(), kw_only=True)
    epochs: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Job:
    """A run in progress: its recipe, its folder, and how it runs.

    Attributes:
        jobs: Number of runs that share the device.
    """

    run: Any
    recipe: Any
    folder: RunFolder
    device: str
    quiet: bool
    jobs: int

    @property
    def train_options(self) -> dict[str, Any]:
        """Arguments of the training functions."""
        return {"resume": self.folder.recipe_file.exists(), "device": self.device, "quiet": self.quiet}

    def log(self, name: str) -> list[dict[str, str]]:
        """The rows of one of its logs."""
        path = self.folder.path / name
        return read_log(path) if path.exists() else []

    def columns(self, status: str) -> dict[str, Any]:
        """The columns that the results of all grids have."""
        batch = self.folder.read_recipe(type(self.recipe)).run.batch  # with few images smaller than in the grid
        steps, seconds, rate = training_speed(self.log("train.csv"), batch)
        return {
            "name": self.run.name,
            "model": self.recipe.model.name,
            "attention": str(self.recipe.model.attention),
            "seed": self.recipe.run.seed,
            "epochs": self.run.epochs,
            "status": status,
            "steps": steps,
            "seconds": seconds,
            "images_per_second": rate,
            **provenance_columns(self.device),
        }


@dataclass(frozen=True)
class Grid:
    """A table of runs, and how a run becomes rows.

    Attributes:
        runs: The table.
        row_files: The files of rows of a run and their types; RESULTS is one of them.
        recipe: (run, data, on_gpu) -> its recipe.
        train: Trains a run and returns its metrics.
        rows: (job, status, metrics) -> file -> rows. The status is FINISHED, or says at which step training failed.
        sort_by: Columns by which collected rows are sorted; "name" is the position in the table.
    """

    runs: tuple[Any, ...]
    row_files: Mapping[str, type]
    recipe: Callable[[Any, str, bool], Any]
    train: Callable[[Job], dict[str, float]]
    rows: Callable[[Job, str, dict[str, float]], dict[str, list[Any]]]
    sort_by: tuple[str, ...]

    def select(self, only: Sequence[str]) -> list[Any]:
        """The runs with these names, by default all."""
        known = {run.name: run for run in self.runs}
        for name in only:
            check_known("run", name, known)
        return [known[name] for name in dict.fromkeys(only)] or list(self.runs)

    def make_run(
        self,
        run: Any,
        out: Path,
        data: str,
        *,
        device: str = "cuda",
        quiet: bool = False,
        jobs: int = 1,
    ) -> Any:
        """Train or resume a run, write its rows to its folder and return its result; a finished one is only read."""
        folder = RunFolder(out / run.folder)
        recipe = self.recipe(run, data, device == "cuda")
        if (folder.path / RESULTS).exists():
            folder.check_finished(recipe)  # it may have been trained on other images
            return read_rows(folder.path / RESULTS, self.row_files[RESULTS])[0]
        job = Job(run, recipe, folder, device, quiet, jobs)
        status, metrics = FINISHED, {}
        try:
            metrics = self.train(job)
        except NonFiniteError as error:
            status = f"diverged at step {error.step}"
        except CollapseError as error:
            status = f"collapsed at step {error.step}"
        rows = self.rows(job, status, metrics)
        for name in sorted(rows, key=lambda name: name == RESULTS):
            if rows[name]:
                write_rows(folder.path / name, rows[name])
        for path in checkpoints(folder.checkpoints):
            path.unlink()  # those of all runs would fill gigabytes; the weights are kept
        return rows[RESULTS][0]

    def make_runs(
        self,
        wanted: Callable[[], Sequence[Any]],
        out: Path,
        data: str,
        *,
        device: str = "cuda",
        jobs: int = 1,
        on_start: Callable[[Any], None] = lambda run: None,
    ) -> Iterator[tuple[Any, Any]]:
        """Make the runs, `jobs` at a time on one device; yields (run, result) once the result is collected.

        Args:
            wanted: Returns the runs to make. It is called before each run, and may read the collected results.
            on_start: Called with each run where they are made one after the other.
        """
        make = partial(self.make_run, out=out, data=data, device=device, jobs=jobs)

        def one_by_one() -> Iterator[tuple[Any, Any]]:
            done: list[Any] = []
            while (run := next((run for run in wanted() if run not in done), None)) is not None:
                done.append(run)
                on_start(run)
                yield run, make(run)

        for made in one_by_one() if jobs == 1 else in_processes(partial(make, quiet=True), wanted, jobs):
            self.collect(out)
            yield made

    def collect(self, out: Path) -> None:
        """Gather the rows of all finished runs under `out` into files of the same names in `out`."""
        position = {run.name: i for i, run in enumerate(self.runs)}

        def key(row: Any) -> list[Any]:
            return [position[row.name] if column == "name" else getattr(row, column) for column in self.sort_by]

        finished = [path.parent for path in out.glob(f"*/{RESULTS}")]
        for name, row_type in self.row_files.items():
            files = [folder / name for folder in finished if (folder / name).exists()]
            rows: list[Any] = list(itertools.chain(*(read_rows(file, row_type) for file in files)))
            rows = [row for row in rows if row.name in position]  # runs may have been removed from the table
            if rows:
                write_rows(out / name, sorted(rows, key=key))

    def read_collected(self, out: Path) -> list[list[Any]]:
        """The rows of each file that `collect` wrote; an empty list where there is no file."""
        files = ((out / name, row_type) for name, row_type in self.row_files.items())
        return [read_rows(path, row_type) if path.exists() else [] for path, row_type in files]


def training_speed(log: Sequence[dict[str, str]], batch: int) -> tuple[int, float, float]:
    """(steps, seconds, median images per second) of training, from its log: correct for resumed runs too."""
    if not log:
        return 0, 0.0, math.nan
    steps, rates = [int(row["step"]) for row in log], [float(row["images_per_second"]) for row in log]
    seconds = sum(batch * made / rate for made, rate in zip(np.diff([0, *steps]), rates, strict=True))
    return steps[-1], round(float(seconds), 1), round(median_high(rates), 1)
