"""Checkpoints of several processes, each of which writes what it holds; read by any number of processes.

torch.distributed.checkpoint writes and reads them. All processes call these functions. The states of optimizers are
saved by the names of parameters: torch's `get_optimizer_state_dict` makes a step to initialize those that are missing,
such as that of DINO's last layer in the first epoch, and so changes the steps that follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint import load as load_distributed
from torch.distributed.checkpoint import save as save_distributed

from sima_attn._files import PREFIX
from sima_attn.models.sharded_files import CHECKSUM, FILES, STATE, checksum, read_values, shapes_in
from sima_attn.train.checkpoint import remove_old

_OPTIMIZER, _GROUP = "optimizer", "group"  # first parts of the names of tensors, beside those of modules


class _Writer(HuggingFaceStorageWriter):
    """Writes into a temporary folder, which the first process renames when all have written."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.final, self.values = path, values
        self.temporary = path.with_name(f"{PREFIX}{path.name}")
        super().__init__(str(self.temporary), save_distributed=True)

    def prepare_global_plan(self, plans: Any) -> Any:
        """In the first process, before any writes: remove what a killed run has left."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """In each process: its file, synchronized to the disk, and the checksum of the file."""
        written = super().write_data(plan, planner)
        for name in _files_of(written.wait()):
            _write(self.temporary / (name + CHECKSUM), checksum(self.temporary / name))
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """In the first process, after all have written."""
        files = sorted({name for written in results for name in _files_of(written)})
        _write(self.temporary / STATE, json.dumps({**self.values, FILES: files}, indent=1))
        shutil.rmtree(self.final, ignore_errors=True)  # a damaged one of the same step
        os.replace(self.temporary, self.final)
        remove_old(self.final.parent)


def _files_of(written: Any) -> set[str]:
    return {result.storage_data.relative_path for result in written}


def _write(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sharded_path(folder: Path, step: int) -> Path:
    """The checkpoint folder after `step` steps."""
    return folder / f"step-{step:08d}"


def save_sharded(
    path: Path, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, values: dict[str, Any]
) -> None:
    """Write a checkpoint folder, then remove all but the last two.

    Args:
        modules: By name; "model" is the one whose parameters the optimizer has.
        values: Plain values to save with the tensors.
    """
    names = _parameter_names(modules["model"], optimizer)
    state = optimizer.state_dict()
    tensors = _tensors_of(modules)
    plain: dict[str, Any] = {name: {} for name in names}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}/{names[index]}/{key}"] = value
            else:
                plain[names[index]][key] = value
    groups = []
    for index, group in enumerate(state["param_groups"]):  # LAMB of timm has a tensor in them, others plain values
        tensors |= {f"{_GROUP}/{index}/{key}": value for key, value in group.items() if isinstance(value, Tensor)}
        groups.append({key: value for key, value in group.items() if not isinstance(value, Tensor)})
    values = {**values, "groups": groups, "optimizer": plain}
    try:
        with _any_number_of_processes():
            save_distributed(tensors, storage_writer=_Writer(path, values))
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def load_sharded(path: Path, modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Load the tensors of a checkpoint into modules and optimizer; `read_values` returns its plain values."""
    values = read_values(path)
    names = _parameter_names(modules["model"], optimizer)
    parameters = dict(modules["model"].named_parameters())
    tensors, states, groups = _tensors_of(modules), values["optimizer"], values["groups"]
    for full_name, stored in shapes_in(path).items():
        kind, _, name = full_name.partition("/")
        if kind not in (_OPTIMIZER, _GROUP):
            continue
        name, _, key = name.rpartition("/")
        like, dtype = parameters.get(name), stored.properties.dtype
        # The states of a parameter are sharded as it is; counters are whole, and on the CPU until they are loaded.
        if like is not None and stored.size == like.shape:
            tensor = torch.empty_like(like, dtype=dtype)
        else:
            tensor = torch.empty(stored.size, dtype=dtype)
        tensors[full_name] = (states[name] if kind == _OPTIMIZER else groups[int(name)])[key] = tensor
    with _any_number_of_processes():
        load_distributed(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    by_index = {index: states[name] for index, name in enumerate(names) if states[name]}
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


@contextlib.contextmanager
def _any_number_of_processes() -> Iterator[None]:
    """Without torch's warning that there is no process group, which a run of one process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def remove_unfinished(folder: Path) -> None:
    """Remove the checkpoints that killed processes have begun; only for the process that holds the lock of the run."""
    for left in folder.glob(f"{PREFIX}step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _tensors_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The tensors of modules, which share their memory, under the names of module and tensor."""
    states = {part: module.state_dict() for part, module in modules.items()}
    return {f"{part}/{name}": tensor.detach() for part, state in states.items() for name, tensor in state.items()}


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the parameters of an optimizer, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
