"""How several processes train one model, as strategies of Fabric. It imports lightning, which only training needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from sima_attn.train.elastic import restarts


class ReplicatedStrategy(DDPStrategy):
    """DDP, in a job that torchrun may restart."""

    def release_group(self) -> None:
        """Drop all references to the process group that torch would keep; called before it is destroyed."""

    def _setup_distributed(self) -> None:
        if restarts():
            # torchrun keeps its store, in which a process would find the addresses of those that have died.
            timeout: Any = self._timeout
            store, rank, world = next(torch.distributed.rendezvous("env://", timeout=timeout))
            torch.distributed.init_process_group(
                self._get_process_group_backend(),
                store=torch.distributed.PrefixStore(f"restart_{restarts()}", store),
                rank=rank,
                world_size=world,
                timeout=timeout,
                device_id=None if self.root_device.type == "cpu" else self.root_device,
            )
        super()._setup_distributed()  # which keeps a group that there is


class ShardedStrategy(ReplicatedStrategy):
    """The same processes, for a module whose parameters `train.sharding.shard` has sharded.

    Fabric's ModelParallelStrategy has its own initialization and checkpoints, which would replace those of the loop.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = _GradientSync()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All processes, in one dimension."""
        return init_device_mesh(self.root_device.type, (self.world_size,))

    def release_group(self) -> None:
        """That of the mesh, which caches of DTensor keep until the process ends."""
        self.mesh._pg_registry.clear()

    def setup_module(self, module: nn.Module) -> Any:
        """The module itself: it averages its gradients without a wrapper."""
        return module

    def clip_gradients_norm(self, *arguments: Any, **options: Any) -> Tensor:
        """Clip by the norm of the whole gradient, and return it."""
        norm = super().clip_gradients_norm(*arguments, **options)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class _GradientSync(_BackwardSyncControl):
    """Gradients that are accumulated stay whole in each process, and are reduced once, in the last pass of a step."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """A context in which gradients are not reduced, if enabled."""
        return _without_reduction(module) if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def _without_reduction(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def strategy_of(name: str, timeout_minutes: float) -> DDPStrategy:
    """The strategy of a run of several processes, "ddp" or "fsdp".

    A process waits for the others at most as long as `timeout_minutes`: one that hangs ends the run.
    """
    kind = {"ddp": ReplicatedStrategy, "fsdp": ShardedStrategy}[name]
    return kind(timeout=timedelta(minutes=timeout_minutes))
