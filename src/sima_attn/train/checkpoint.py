"""Checkpoints: written atomically, the last two kept, the newest readable one loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sima_attn._files import atomic_write
from sima_attn.models.sharded_files import is_sharded
from sima_attn.models.weight_files import checkpoints, load_checkpoint, newest_readable

KEPT = 2


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps, then remove all but the last two checkpoints."""
    path = folder / f"step-{step:08d}.pt"
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before the rename
    remove_old(folder)
    return path


def remove_old(folder: Path) -> None:
    """Remove all but the last two checkpoints, files or folders; what only has the name of one is not counted."""
    found = checkpoints(folder)
    for old in [path for path in found if path.is_file()][KEPT:]:
        old.unlink()
    for old in [path for path in found if is_sharded(path)][KEPT:]:
        shutil.rmtree(old)


def load_newest(folder: Path, say: Callable[[str], None] = print) -> dict[str, Any] | None:
    """Load the newest readable checkpoint, None if there is no checkpoint."""
    path = newest_readable(folder, say)
    return None if path is None else load_checkpoint(path)
