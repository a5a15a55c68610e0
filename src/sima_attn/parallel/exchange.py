"""What the processes of a group send each other: sums, one process's numbers, and the rows next to their own.

Everything here is differentiable. The loss is the sum of the losses of the processes, as in `ops.sequence_parallel`, so
a gradient travels back to the process whose numbers were read.

Shapes: B batch, C channels, W columns; N tokens of this process.
"""

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sima_attn.ops.eager import compute_dtype
from sima_attn.ops.sequence_parallel import SumOverProcesses


def is_first(group: DeviceMesh) -> bool:
    """Whether this process has the first rows."""
    return group.get_local_rank() == 0


def sum_over_processes(x: Tensor, group: DeviceMesh) -> Tensor:
    """The sum of a tensor over the processes of the group."""
    return SumOverProcesses.apply(x, group.get_group())


def of_first_process(x: Tensor, group: DeviceMesh) -> Tensor:
    """The tensor of the first process, on every process."""
    return sum_over_processes(x * is_first(group), group)


def mean_of_tokens(x: Tensor, group: DeviceMesh) -> Tensor:
    """Tokens [B, N, C], of which each process has its own -> their mean [B, C] over all processes."""
    work = x.to(compute_dtype(x.dtype))
    counts = work.new_full((x.shape[0], 1), x.shape[1])
    total = sum_over_processes(torch.cat([work.sum(1), counts], 1), group)  # [B, C + 1]
    return (total[:, :-1] / total[:, -1:]).to(x.dtype)


def with_halo(x: Tensor, group: DeviceMesh, *, above: int, below: int, padding: int) -> Tensor:
    """Map [B, C, rows, W] -> [B, C, above + rows + below, W]: with the next rows of the neighboring processes.

    Beyond the image there are zeros: `above` rows on the first process, `padding` rows on the last.
    """
    rank, last = group.get_local_rank(), group.size() - 1
    sent, received = [0] * group.size(), [0] * group.size()  # rows, by process
    if rank > 0:
        sent[rank - 1], received[rank - 1] = below, above
    if rank < last:
        sent[rank + 1], received[rank + 1] = above, below
    if x.shape[2] < max(sent):
        raise ValueError(f"a neighboring process reads {max(sent)} rows, and this one has {x.shape[2]}")
    rows = x.permute(2, 0, 1, 3)  # [rows, B, C, W]
    to_previous, to_next = rows[: sent[rank - 1] if rank else 0], rows[len(rows) - (above if rank < last else 0) :]
    message = torch.cat([to_previous, to_next])
    halo = collectives.wait_tensor(
        collectives.all_to_all_single_autograd(message, received, sent, group.get_group())
    ).permute(1, 2, 0, 3)  # [B, C, rows of both neighbors, W]
    # A part of the halo may be empty, but it must be in the graph: the backward pass is an exchange of all processes.
    before, after = halo.split([above if rank else 0, below if rank < last else 0], 2)
    B, C, _, W = x.shape
    top = x.new_zeros(B, C, 0 if rank else above, W)
    bottom = x.new_zeros(B, C, 0 if rank < last else padding, W)
    return torch.cat([top, before, x, after, bottom], 2)
