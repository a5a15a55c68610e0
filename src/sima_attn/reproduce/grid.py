"""What grids of runs share: runs side by side on one device, their rows gathered, what a log says of their speed."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from sima_attn.report.rows import read_rows, write_rows
from sima_attn.train.stopping import RunInterrupted, StopSignals

Run = TypeVar("Run")
Row = TypeVar("Row")


def in_processes(make: Callable[[Run], Row], runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Row]]:
    """What `make` gives for each run, `jobs` of them at a time, each yielded when it is done.

    Every run has a process of its own: nothing that it compiled or allocated stays on the device. An error of one
    run is raised when all the others are done. SIGINT and SIGTERM are passed on to the runs, and no more are started.
    """
    errors = []

    def make_unless_stopped(run: Run) -> Row:
        if signals.received is not None:
            raise RunInterrupted(128 + signals.received)
        return _in_a_process(make, run, jobs)

    with StopSignals(_stop_processes) as signals, ThreadPoolExecutor(jobs) as threads:
        waiting = {threads.submit(make_unless_stopped, run): run for run in runs}
        try:
            for done in as_completed(waiting):
                error = done.exception()
                if error is None:
                    yield waiting[done], done.result()
                else:
                    errors.append(error)
        finally:
            threads.shutdown(cancel_futures=True)
    if signals.received is not None:
        raise RunInterrupted(128 + signals.received)
    if errors:
        raise errors[0]


def _stop_processes() -> None:
    for process in multiprocessing.active_children():
        process.terminate()


def _in_a_process(make: Callable[[Run], Row], run: Run, jobs: int) -> Row:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_process, initargs=(jobs,)) as process:
        return process.submit(make, run).result()


def _prepare_process(jobs: int) -> None:
    """Share the cores: threads that wait in a loop for one another slow all down. Leave Ctrl-C to the parent."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent passes it on as SIGTERM
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


def collect_rows(out: Path, files: Mapping[str, type], key: Callable[[Any], Any]) -> None:
    """Gather the rows of all done runs, folders under `out`, into files of the same names in `out`.

    A run is done once it has the first of the files. The rows are sorted by the key; within a run their order stays.
    """
    done = [path.parent for path in out.glob(f"*/{next(iter(files))}")]
    for name, kind in files.items():
        rows: list[Any] = []
        for folder in done:
            rows += read_rows(folder / name, kind) if (folder / name).exists() else []
        if rows:
            write_rows(out / name, sorted(rows, key=key))


def read_collected_rows(out: Path, files: Mapping[str, type]) -> list[list[Any]]:
    """The rows of each file, none where there is no file."""
    return [read_rows(out / name, kind) if (out / name).exists() else [] for name, kind in files.items()]


def training_speed(log: Sequence[dict[str, str]], batch: int) -> tuple[int, float, float]:
    """(steps, seconds, median images a second) of training alone, from its log: also right after an interruption."""
    steps, seconds, rates = 0, 0.0, []
    for row in log:
        rate = float(row["images_per_second"])
        seconds += (int(row["step"]) - steps) * batch / rate
        steps = int(row["step"])
        rates.append(rate)
    return steps, round(seconds, 1), round(sorted(rates)[len(rates) // 2], 1) if rates else math.nan
