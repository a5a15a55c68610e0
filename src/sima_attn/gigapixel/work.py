"""The folder of a run beside its output: tokens, features so far, and the record with which an interrupted run goes on.

The output appears under its name when it is whole; then the folder is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sima_attn._files import DiskFullError, atomic_write, disk_full_reason, lock
from sima_attn._version import __version__
from sima_attn.gigapixel.sweeps import Progress
from sima_attn.models.preprocessing import Preprocessing

LOCK = "lock"


class WorkFolder:
    """The folder of a run, in use by this process.

    Args:
        path: The folder.
        target: The output; None where there is none, so that nothing is resumed.
    """

    def __init__(self, path: Path, target: Path | None) -> None:
        self.path, self.target = path, target
        self._record = path / "progress.pt"
        self._identity: dict[str, str] = {}

    def open(self, identity: dict[str, str]) -> dict[str, Any] | None:
        """The record of an interrupted run of the same identity; else None, and whatever is there is removed."""
        self._identity = identity
        if self._record.exists():
            saved = torch.load(self._record, weights_only=True)
            if saved["identity"] == identity:
                return saved
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        return None

    def save(self, progress: Progress) -> None:
        """Write the record."""
        with atomic_write(self._record) as temporary:
            torch.save({"identity": self._identity, **progress.to_dict()}, temporary)

    def put_in_place(self, made: Path) -> None:
        """Rename what was made to the output; an earlier zarr array of that name is removed."""
        assert self.target is not None
        if self.target.is_dir():
            self.target.rename(self.path / "before")
        made.rename(self.target)

    @property
    def is_resumable(self) -> bool:
        """Whether a run has been recorded here."""
        return self._record.exists()


@contextmanager
def work_folder(target: Path | None) -> Iterator[WorkFolder]:
    """The folder of a run, locked. It is removed, unless the run is interrupted and can go on."""
    if target is None:
        with tempfile.TemporaryDirectory(prefix="sima-features-") as temporary:
            yield WorkFolder(Path(temporary), None)
        return
    folder = WorkFolder(target.with_name(f"{target.name}.work"), target)
    folder.path.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.path / LOCK, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        if not lock(handle, wait=False):
            raise ValueError(f"another process is writing {target}; wait for it, or use another name")
        try:
            yield folder
        except Exception as error:
            _clean_up(folder, error)
            raise
        shutil.rmtree(folder.path)
    finally:
        os.close(handle)


def _clean_up(folder: WorkFolder, error: Exception) -> None:
    """Remove a folder with which no run can go on; raise for a full disk, with what to do."""
    if not folder.is_resumable:
        shutil.rmtree(folder.path)
    reason = disk_full_reason(error)
    if reason is not None and not isinstance(error, DiskFullError):
        then = ", which goes on where this one stopped" if folder.is_resumable else ""
        raise DiskFullError(
            f"{folder.target} cannot be written: {reason}; free some space and run the same command again{then}"
        ) from error


def identity_of(model: nn.Module, image: str | Path | np.ndarray, how: Preprocessing, **options: Any) -> dict[str, str]:
    """What two runs must have in common for one to go on with the other."""
    weights = hashlib.sha256(repr(model).encode())
    for name, tensor in model.state_dict().items():
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return {
        "version": __version__,
        "weights": weights.hexdigest(),
        "image": _image_identity(image),
        "preprocessing": how.to_json(),
        "options": json.dumps(options),
        # What the system has not yet written of a file is lost when the machine stops, though not with a process.
        "started": _boot_id(),
    }


def _image_identity(image: str | Path | np.ndarray) -> str:
    if isinstance(image, np.ndarray):
        return str(uuid.uuid4())  # an array has no name by which another process could know it
    path = Path(image)
    if not path.exists():
        return str(path)
    about = path.stat()
    return json.dumps([str(path.resolve()), about.st_size, about.st_mtime_ns])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
