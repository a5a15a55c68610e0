"""Data loader workers that work under a long TMPDIR and keep running until a stopped run has finished its step."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, Dataset

# characters; a worker opens TEMP_DIR/pymp-12345678/listener-12345678, and a socket path can have 104
LONGEST_TEMP_DIR = 70


class Loader(DataLoader):
    """DataLoader whose workers work under a long TMPDIR and ignore signals to the whole process group.

    The step in progress still needs their batches.
    """

    def __init__(self, samples: Dataset, *, num_workers: int, **options: Any) -> None:
        num_workers = min(num_workers, os.cpu_count() or 1)
        super().__init__(samples, num_workers=num_workers, worker_init_fn=_start_worker, **options)

    def __iter__(self) -> Any:
        with termination_blocked():
            return super().__iter__()


def _start_worker(worker: int) -> None:
    # Workers send batches through a socket in the temporary folder. A thread opens it: if its path is too long, the
    # main process gets neither a batch nor an error and waits forever.
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMP_DIR:
        tempfile.tempdir = "/tmp"
    leave_signals_to_parent()


@contextmanager
def termination_blocked() -> Iterator[None]:
    """Context for starting processes that call `leave_signals_to_parent`: SIGTERM is blocked in all their threads.

    Libraries start threads in a forked process before our code runs in it, so the mask must be inherited.
    """
    if not hasattr(signal, "sigwaitinfo"):  # on macOS the sender of a signal is unknown
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Make a data worker ignore signals that are sent to its whole process group.

    It still stops when its parent terminates it, and shortly after its parent has exited.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
