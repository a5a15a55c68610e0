"""Restarts by `torchrun --max-restarts`: when a process has died, all start again with the same command."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from sima_attn._files import atomic_write

_MARK = ".torchrun"  # in the folder of a run, the job that last trained it


def restarts() -> int:
    """How often torchrun has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def mark_job(folder: Path) -> None:
    """Record that this job trains the run in the folder."""
    if job := _job():
        with atomic_write(folder / _MARK) as temporary:
            temporary.write_text(job)


def continues_run(folder: Path) -> bool:
    """Whether this job was restarted after it had begun the run in the folder.

    A run that was there before the job is not continued, as it would not be without the restart.
    """
    mark = folder / _MARK
    return restarts() > 0 and mark.is_file() and mark.read_text() == _job()


class LostProcessError(ConnectionError):
    """Another process of the run has died, or does not answer."""


def is_lost_process(error: BaseException) -> bool:
    """Whether torch raised this error because a process does not answer; gloo raises a RuntimeError of its own."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


def _job() -> str | None:
    """What stays the same in the restarts of a job: its id or, without --rdzv-id, the torchrun process; else None."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{socket.gethostname()} {os.getppid()}" if name == "none" else name
