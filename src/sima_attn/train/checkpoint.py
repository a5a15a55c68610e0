"""Checkpoints: written atomically, the last two kept, the newest readable one loaded."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sima_attn._files import atomic_write

KEPT = 2
_NAME = re.compile(r"step-(\d+)\.pt")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps, then remove all but the last two checkpoints."""
    path = folder / f"step-{step:08d}.pt"
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before the rename
    for old in [kept for kept in checkpoints(folder) if kept.is_file()][KEPT:]:
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Paths with the name of a checkpoint, the newest first."""
    found = [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: -int(_NAME.fullmatch(path.name)[1]))  # type: ignore[index]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint; only tensors and plain values are unpickled, never code."""
    check_readable(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"the checkpoint {path} is damaged, or not a checkpoint: {error}") from error


def check_readable(path: Path) -> None:
    """Raise unless `path` is a file with correct checksums."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if not path.is_file():  # opening a pipe would block
        kind = "a folder" if path.is_dir() else "a link to a missing file" if path.is_symlink() else "a pipe or device"
        raise ValueError(f"the checkpoint {path} is {kind}, not a file")
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()  # torch does not verify the checksums it writes
    except (OSError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise ValueError(f"the checkpoint {path} is damaged, or not a checkpoint: {error}") from error
    if wrong is not None:
        raise ValueError(f"the checkpoint {path} is damaged: the checksum of {wrong} is wrong")


def newest_readable(folder: Path, say: Callable[[str], None] = print) -> Path | None:
    """Path of the newest readable checkpoint, None if there is no checkpoint; reports those that are skipped."""
    found = checkpoints(folder)
    for path in found:
        try:
            check_readable(path)
        except ValueError as error:
            say(f"{error}; using the previous one")
        else:
            return path
    if found:
        raise ValueError(f"none of the {len(found)} checkpoints in {folder} can be read; start a new run")
    return None


def load_newest(folder: Path, say: Callable[[str], None] = print) -> dict[str, Any] | None:
    """Load the newest readable checkpoint, None if there is no checkpoint."""
    path = newest_readable(folder, say)
    return None if path is None else load_checkpoint(path)
