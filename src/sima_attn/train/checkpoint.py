"""Checkpoints: whole or not at all, the last two kept, the newest good one found again."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sima_attn._files import atomic_write

KEPT = 2
_NAME = re.compile(r"step-(\d+)\.pt")


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


def checkpoints(folder: Path) -> list[Path]:
    """Paths of all that has the name of a checkpoint, the newest first."""
    found = [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: -int(_NAME.fullmatch(path.name)[1]))  # type: ignore[index]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a file; only tensors and plain values are read, never code."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if not path.is_file():  # a pipe would be waited for
        kind = "a folder" if path.is_dir() else "a link to a missing file" if path.is_symlink() else "a pipe or device"
        raise ValueError(f"the checkpoint {path} is {kind}, not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()  # torch itself does not compare the checksums it writes
        if wrong is not None:
            raise ValueError(f"the checksum of {wrong} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"the checkpoint {path} is damaged, or is none: {error}") from error


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
