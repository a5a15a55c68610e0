"""Calls of a function in new processes, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from typing import TypeVar

from sima_attn.train.stopping import RunInterrupted, StopSignals

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(
    make: Callable[[Item], Result], wanted: Callable[[], Sequence[Item]], jobs: int
) -> Iterator[tuple[Item, Result]]:
    """Call `make` for each item, `jobs` at a time, each in a new process; yields (item, result) as they finish.

    `wanted` returns the items to make. It is called whenever a process is free, so that what it returns may depend on
    the results so far; items that were started before are skipped.

    A new process per item: nothing that a run compiled or allocated stays on the device. An error of one run is raised
    when all the others are done. SIGINT and SIGTERM are passed on to the runs, and no more are started.
    """
    errors: list[BaseException] = []
    started: list[Item] = []
    running: dict[Future[Result], Item] = {}

    def make_unless_stopped(item: Item) -> Result:
        if signals.received is not None:
            raise RunInterrupted(128 + signals.received)
        return _in_new_process(make, item, jobs)

    with StopSignals(_stop_processes) as signals, ThreadPoolExecutor(jobs) as threads:
        try:
            while True:
                new = [item for item in wanted() if item not in started] if signals.received is None else []
                for item in new[: jobs - len(running)]:
                    started.append(item)
                    running[threads.submit(make_unless_stopped, item)] = item
                if not running:
                    break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    item, error = running.pop(done), done.exception()
                    if error is None:
                        yield item, done.result()
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


def _in_new_process(make: Callable[[Item], Result], item: Item, jobs: int) -> Result:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare_process, initargs=(jobs,)) as process:
        return process.submit(make, item).result()


def _prepare_process(jobs: int) -> None:
    """Share the cores, since more threads than cores slow all runs down. Leave Ctrl-C to the parent process."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent passes it on as SIGTERM
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
