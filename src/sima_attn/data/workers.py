"""Processes that decode images: they run under a long TMPDIR, and finish the step in progress when a run is stopped."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, Dataset

# characters; a worker opens TEMP_DIR/pymp-12345678/listener-12345678, and a socket's path has 104
LONGEST_TEMP_DIR = 70


def useful_workers(workers: int) -> int:
    """As many processes as were asked for, at most one a core; batches do not depend on their number."""
    return min(workers, os.cpu_count() or 1)


def shorten_temp_dir() -> None:
    """Move the temporary folder of a worker process to /tmp where its path is too long for a socket.

    Batches reach the main process through a socket in that folder. A thread of the worker opens it: when that
    fails, the main process gets neither a batch nor an error and waits forever.
    """
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMP_DIR:
        tempfile.tempdir = "/tmp"


class Loader(DataLoader):
    """A loader whose workers run under a long TMPDIR, and go on when the whole process group is signalled.

    The step in progress needs them.
    """

    def __init__(self, samples: Dataset, **options: Any) -> None:
        super().__init__(samples, worker_init_fn=_start_worker, **options)

    def __iter__(self) -> Any:
        with termination_blocked():
            return super().__iter__()


def _start_worker(worker: int) -> None:
    shorten_temp_dir()
    leave_signals_to_parent()


@contextmanager
def termination_blocked() -> Iterator[None]:
    """Start within it the processes that call `leave_signals_to_parent`: all their threads have SIGTERM blocked.

    Libraries start threads in a forked process before any code of ours runs in it.
    """
    if not hasattr(signal, "sigwaitinfo"):  # macOS does not say who sent a signal
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent(worker: int = 0) -> None:
    """Let a data worker go on when its whole process group is signalled: the step in progress needs it.

    It still ends when its parent terminates it, and soon after its parent has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
