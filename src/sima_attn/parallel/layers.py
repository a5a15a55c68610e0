"""Layers for the rows of one process: convolutions, BatchNorm, and drops that all processes of a group must agree on.

`parallelize` changes the class of a layer in place, so that parameters, buffers, their names and hooks stay. A layer
then has the attribute `group`, the mesh of the processes that share an image.

Shapes: B batch, C channels; rows and columns of the map of this process.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sima_attn.nn.grid import Grid, TokenLayout
from sima_attn.nn.local_values import LocalValues
from sima_attn.nn.rotation import GridPart, Rotation
from sima_attn.ops.eager import compute_dtype, without_autocast
from sima_attn.ops.token_convolution import patch_map, values_of_map
from sima_attn.parallel.exchange import of_first_process, sum_over_processes, with_halo


class SplitConv2d(nn.Conv2d):
    """A convolution of maps whose rows are split over processes; the stride divides the rows of all but the last."""

    group: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, rows, columns] -> [B, C', rows', columns'], the rows of this process."""
        above, below = halo_of(self)
        padding, across = _padding(self)
        x = with_halo(x, self.group, above=above, below=below, padding=padding)
        return F.conv2d(x, self.weight, self.bias, self.stride, (0, across), self.dilation, self.groups)


def halo_of(conv: nn.Conv2d) -> tuple[int, int]:
    """The rows that a convolution reads above and below a part whose rows its stride divides."""
    reach = conv.dilation[0] * (conv.kernel_size[0] - 1) + 1  # from the first row that an output reads to the last
    padding, _ = _padding(conv)
    return padding, max(0, reach - conv.stride[0] - padding)


def conv_reason(conv: nn.Conv2d) -> str | None:
    """Why a convolution cannot be split; None if it can."""
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return f"it has padding={conv.padding!r}, padding_mode={conv.padding_mode!r}; use zeros and a number"
    if conv.padding[0] > conv.dilation[0] * (conv.kernel_size[0] - 1):
        return f"its padding of {conv.padding[0]} rows is larger than what its kernel reads beside a row"
    return None


def _padding(conv: nn.Conv2d) -> tuple[int, int]:
    padding: Any = conv.padding
    return padding[0], padding[1]


class SplitLocalValues(LocalValues):
    """The convolution of v where the tokens of a process are some rows of the grid, behind those of the prefix."""

    group: DeviceMesh

    def forward(self, v: Tensor) -> Tensor:
        """v [B, H, N, D] -> [B, H, N, D], of the tokens of this process."""
        image_grid: Any = self.image_grid  # `check_model` has found it
        rows, columns = image_grid.shape  # of the patch embedding, which has the rows of this process
        prefix = v.shape[2] - rows * columns
        x = with_halo(patch_map(v, prefix, rows, columns), self.group, above=1, below=1, padding=1)
        with without_autocast(v):
            x = F.conv2d(x, self.weight.to(v.dtype), padding=(0, 1), groups=x.shape[1])
        return values_of_map(x, prefix, v.shape[1])


class SplitRotation(Rotation):
    """The rotation where the tokens of a process are some rows of the grid, behind those of the prefix.

    Attributes:
        offset: The grid of the whole image, and the first row of this process; set by the model at each call.
    """

    group: DeviceMesh
    offset: tuple[Grid, int]

    def part_of(self, N: int) -> GridPart:
        """The rows of this process, of which N tokens are given."""
        image_grid: Any = self.image_grid  # `check_model` has found it
        rows, columns = image_grid.shape  # of the patch embedding, which has the rows of this process
        grid, top = self.offset
        return GridPart(TokenLayout(N - rows * columns, rows, columns), grid, top)


class SplitBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm whose statistics in training are those of all rows of all processes.

    torch's SyncBatchNorm does the same on CUDA devices only.
    """

    group: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, rows, columns] -> [B, C, rows, columns]."""
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        work = x.to(compute_dtype(x.dtype))
        count = work.new_full((1,), x.numel() // x.shape[1])
        # The deviations are summed in a second message: a difference of sums of squares would lose digits.
        total = sum_over_processes(torch.cat([work.sum((0, 2, 3)), count]), self.group)  # [C + 1]
        mean, count = total[:-1] / total[-1], total[-1].detach()
        work = work - mean[:, None, None]
        variance = sum_over_processes(work.square().sum((0, 2, 3)), self.group) / count  # [C]
        if self.training and self.track_running_stats:
            self._follow(mean.detach(), variance.detach() * count / (count - 1))
        scale = torch.rsqrt(variance + self.eps)
        if not self.affine:
            return (work * scale[:, None, None]).to(x.dtype)
        return (work * (scale * self.weight)[:, None, None] + self.bias[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, as any BatchNorm does."""
        assert self.num_batches_tracked is not None  # for mypy: the module tracks statistics
        self.num_batches_tracked.add_(1)
        weight: Any = 1 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(new.to(running.dtype), weight)


class SplitDropPath(DropPath):
    """Stochastic depth that drops the same samples on all processes: the first one draws."""

    group: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        """The branch, zero for the dropped samples of the batch."""
        if not self.drop_prob or not self.training:
            return x
        ones = x.new_ones(x.shape[0], *[1] * (x.dim() - 1))
        return x * of_first_process(super().forward(ones), self.group)


class SharedDropout(nn.Dropout):
    """Dropout of numbers that every process has: it drops the same on all processes. The first one draws."""

    group: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        """x with dropped entries."""
        if not self.p or not self.training:
            return x
        return x * of_first_process(F.dropout(torch.ones_like(x), self.p), self.group)


def split_layers(model: nn.Module, group: DeviceMesh) -> None:
    """Change the layers of a model that read the rows of other processes, or have to agree with them."""
    for module in model.modules():
        if type(module) is nn.Conv2d and (any(halo_of(module)) or _padding(module)[0]):
            become(module, SplitConv2d, group)
        elif type(module) is nn.BatchNorm2d:
            become(module, SplitBatchNorm2d, group)
        elif type(module) is DropPath:
            become(module, SplitDropPath, group)
        elif type(module) is LocalValues:
            become(module, SplitLocalValues, group)
        elif type(module) is Rotation:
            become(module, SplitRotation, group)


def share_dropout(module: nn.Module, group: DeviceMesh) -> None:
    """Let the dropouts in a module drop the same on all processes."""
    for inner in module.modules():
        if type(inner) is nn.Dropout:
            become(inner, SharedDropout, group)


def become(module: nn.Module, cls: type[nn.Module], group: DeviceMesh) -> None:
    """Make a module one of a subclass, with the processes that share its input."""
    module.__class__ = cls
    vars(module)["group"] = group
