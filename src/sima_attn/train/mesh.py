"""`run.mesh`: processes that share the images of a batch, and processes that share each image.

With `data=2,sequence=2` the first two of four processes share one half of every batch, the others the other half. The
two that share images draw the same augmentation and compute half of the rows of each (`parallelize`). The gradients are
averaged over all four, as without a mesh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # settings are checked before torch is imported
    from lightning.fabric import Fabric
    from torch import nn

    from sima_attn.train.recipes import Run

DIMENSIONS = ("data", "sequence")
EXAMPLE = "data=2,sequence=2"
COMMANDS = ("train", "finetune")  # whose runs can have a mesh


def mesh_sizes(mesh: str | None) -> tuple[int, int]:
    """The processes that share a batch, and those that share an image: (2, 3) of "data=2,sequence=3"."""
    sizes = dict.fromkeys(DIMENSIONS, 1)
    for part in mesh.split(",") if mesh else ():
        name, _, size = part.strip().partition("=")
        if name not in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"run.mesh has the sizes {' and '.join(DIMENSIONS)}, e.g. {EXAMPLE}, which are at least 1, got {mesh!r}"
            )
        sizes[name] = int(size)
    return sizes["data"], sizes["sequence"]


def check_supports_mesh(run: Run, command: str) -> None:
    """Raise if a run has a mesh, and its command does not support that."""
    if run.mesh is not None and command not in COMMANDS:
        supported = " and ".join(f"`sima {name}`" for name in COMMANDS)
        raise ValueError(f"run.mesh is for {supported}; `sima {command}` does not support it: omit it")


def batch_share(run: Run, rank: int, world: int) -> tuple[int, int]:
    """Which part of each batch a process takes, and of how many parts; raises unless the mesh has `world` processes."""
    if run.mesh is None:
        return rank, world
    data, sequence = mesh_sizes(run.mesh)
    needed = data * sequence
    if needed != world:
        raise ValueError(
            f"run.mesh={run.mesh} needs {needed} processes, and there {'is' if world == 1 else 'are'} {world}: start "
            f"torchrun with --nproc-per-node={needed}, or change the mesh"
        )
    return rank // sequence, data


def split_over_mesh(model: nn.Module, run: Run, fabric: Fabric) -> nn.Module:
    """The model, parallelized over the processes that share an image."""
    if mesh_sizes(run.mesh)[1] == 1:
        return model
    from torch.distributed.device_mesh import init_device_mesh

    from sima_attn.parallel import parallelize

    mesh = init_device_mesh(fabric.device.type, mesh_sizes(run.mesh), mesh_dim_names=DIMENSIONS)
    return parallelize(model, mesh)


def seed_dropout(run: Run, fabric: Fabric) -> None:
    """Let processes that share images drop other tokens, once they have drawn the same augmentation."""
    place = fabric.global_rank % mesh_sizes(run.mesh)[1]
    if place:  # the first one draws what all have to agree on, as a single process does
        import torch

        torch.manual_seed(torch.initial_seed() + place)


def leave_mesh(*models: nn.Module) -> None:
    """Make models, and those in them, models of one process again: parallelized ones hold process groups."""
    from sima_attn.parallel import unparallelize

    for model in models:
        for module in list(model.modules()):
            unparallelize(module)


def synchronize_batch_norm(model: nn.Module, fabric: Fabric) -> nn.Module:
    """The model with the BatchNorm statistics of all processes, as in the authors' code, on CUDA devices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn import SyncBatchNorm

    from sima_attn.parallel.layers import SplitBatchNorm2d

    split: list[Any] = [module for module in model.modules() if isinstance(module, SplitBatchNorm2d)]
    if not split:
        return SyncBatchNorm.convert_sync_batchnorm(model)
    everyone = init_device_mesh(fabric.device.type, (fabric.world_size,))
    for module in split:
        module.group = everyone
    return model
