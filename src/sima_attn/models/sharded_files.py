"""Checkpoint folders of several processes -> tensors and plain values.

state.json            step, metrics, recipe and other plain values; the names of the other files
shard-*.safetensors   per process: its parts of the tensors, with their places, as torch.distributed.checkpoint writes
                      them; each with its checksum beside it, in *.crc32

Anyone may have written a folder, and there is no pickle in it. `train.sharded_checkpoint` writes them.
"""

import json
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

STATE = "state.json"
FILES = "files"  # in it, the names of the other files
CHECKSUM = ".crc32"
_CHUNK = 1 << 24


def is_sharded(path: Path) -> bool:
    """Whether a path is such a folder."""
    return (path / STATE).is_file()


def checksum(path: Path) -> str:
    """CRC-32 of a file."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def check_whole(folder: Path) -> None:
    """Raise unless all files of a checkpoint are there with their checksums."""
    for name in read_values(folder)[FILES]:
        path = folder / name
        try:
            if checksum(path) != path.with_name(name + CHECKSUM).read_text():
                raise ValueError(f"the checkpoint {folder} is damaged: the checksum of {name} is wrong")
        except OSError as error:
            raise ValueError(f"the checkpoint {folder} is damaged: {error}") from error


def read_values(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint."""
    try:
        values = json.loads((folder / STATE).read_text())
        names = values[FILES]
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise TypeError(f"{FILES} must be names of files in the folder")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the checkpoint {folder} is damaged: {STATE} cannot be read: {error}") from error
    return values


def shapes_in(folder: Path) -> "dict[str, TensorStorageMetadata]":
    """Size and dtype of the tensors of a checkpoint, by name."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata  # type: ignore[return-value]


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names begin with the prefix, which is removed; in this process alone."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    found = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in shapes_in(folder).items()
        if name.startswith(prefix)
    }
    if found:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as asked for
            load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def read_sharded(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint, as in one of a single file, but without that of the optimizer."""
    check_whole(folder)
    values = read_values(folder)
    try:
        parts = {name: read_tensors(folder, f"{name}/") for name in ("model", "ema")}
        tasks: dict[str, dict[str, Tensor]] = {}
        for name, tensor in read_tensors(folder, "task/").items():
            module, _, key = name.partition("/")
            tasks.setdefault(module, {})[key] = tensor
    except Exception as error:  # torch and safetensors raise anything on a file that is not theirs
        raise ValueError(f"the checkpoint {folder} is damaged, or not a checkpoint: {error}") from error
    return {**values, "model": parts["model"], "ema": parts["ema"] or None, "task": tasks}
