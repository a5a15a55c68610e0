"""Sharded parameters by FSDP2: each process holds a part of each parameter, and of its gradient and optimizer state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from sima_attn.models.compiled import blocks_of


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters of a module in place, over the processes of a mesh, and move it to the device of each.

    Each block is a group, and what is outside of the blocks is one. Its parameters are gathered for its forward and
    its backward pass, and freed after each: also those of the outermost group, which torch would free after a backward
    pass only, and a teacher has none.

    There is no mixed-precision policy: parameters are gathered in float32, and autocast converts them where they are
    used. So norms, losses and BatchNorm compute in float32 as with DDP, and both give the same numbers. A policy of
    bf16 would gather half the bytes, but would round the tokens between blocks and the weights of norms, too.
    """
    for block in blocks_of(module):
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)


@contextlib.contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Hold whole parameters in each process, so that it may run the modules without the others; no-op if not sharded.

    An evaluation needs it: processes may have different numbers of batches, and parts of a model may be called alone.
    """
    groups = [group for module in modules for group in module.modules() if isinstance(group, FSDPModule)]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()
            group.set_reshard_after_forward(True, recurse=False)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of tensors that this process holds, which share their memory; tensors that are not sharded as such."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor over all of its parts. [n]"""
    parts = torch.stack(torch._foreach_norm(local_parts(tensors)))
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        squares = parts.square()
        torch.distributed.all_reduce(squares)
        return squares.sqrt()
    return parts


def whole_tensors(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The state dict of a module on the CPU with whole tensors, one gathered after the other; empty unless `keep`.

    All processes must call it.
    """
    found = {}
    for name, tensor in module.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole.detach().cpu().contiguous()
    return found
