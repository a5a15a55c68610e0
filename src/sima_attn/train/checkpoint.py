"""Checkpoints: whole or not at all, the last two kept, the newest good one found again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sima_attn._files import atomic_write
from sima_attn.models.weight_files import checkpoints, load_checkpoint

KEPT = 2


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps, then drop what is older than the one before."""
    path = folder / f"step-{step:08d}.pt"
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it takes its name
    for old in [kept for kept in checkpoints(folder) if kept.is_file()][KEPT:]:
        old.unlink()
    return path


def load_newest(folder: Path, say: Callable[[str], None] = print) -> dict[str, Any] | None:
    """The newest state that can be read, None if there is none yet; damaged ones are named."""
    found = checkpoints(folder)
    for path in found:
        try:
            return load_checkpoint(path)
        except ValueError as error:
            say(f"{error}; going on from the one before")
    if found:
        raise ValueError(f"none of the {len(found)} checkpoints in {folder} can be read; start again in another folder")
    return None
