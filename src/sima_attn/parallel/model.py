"""What the split models of all families have in common: which rows of an image a process takes."""

from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sima_attn.nn import Relu2Attention, SimAttention, SimClassAttention
from sima_attn.nn.grid import Grid
from sima_attn.ops.sequence_parallel import check_same_call
from sima_attn.parallel.exchange import is_first, mean_of_tokens, sum_over_processes
from sima_attn.parallel.layers import SplitRotation, share_dropout, split_layers

POOLS = ("token", "avg")
GROUPED = (SimAttention, SimClassAttention, Relu2Attention)  # attentions that add up their sums over a group


class SplitModel(nn.Module):
    """Images [B, 3, height, width] -> logits [B, K], the same on all processes of `group`."""

    group: DeviceMesh

    def split(self) -> None:
        """Split the layers, once the group is set."""
        split_layers(self, self.group)
        head_drop: Any = self.head_drop
        share_dropout(head_drop, self.group)
        for module in self.modules():
            if isinstance(module, GROUPED):
                module.group = self.group

    def unsplit(self) -> None:
        """Make the model and its layers those of one process again."""
        for module in self.modules():
            if isinstance(module, GROUPED):
                module.group = None
            elif "group" in vars(module):
                del vars(module)["group"]
                vars(module).pop("offset", None)
                module.__class__ = type(module).__bases__[-1]

    def own_rows(self, images: Tensor, unit: int) -> slice:
        """The rows of the images that this process takes, whole units but for the last process."""
        call, rule = f"{list(images.shape)} in {images.dtype}", "the processes of a group must pass the same images"
        check_same_call(self.group.get_group(), call, rule, images.device)
        return rows_of(self.group.get_local_rank(), self.group.size(), images.shape[2], unit)

    def set_row_offset(self, grid: Grid, first_row: int) -> None:
        """Tell the rotations the grid of the whole image, and the first row of this process."""
        for module in self.modules():
            if isinstance(module, SplitRotation):
                module.offset = grid, first_row

    def pool_tokens(self, x: Tensor, pool: str, prefix: int, *, with_prefix: bool = False) -> Tensor:
        """Tokens [B, N, C] of which the first process alone holds the prefix tokens -> features [B, C]."""
        held = prefix if is_first(self.group) else 0
        if pool == "token":
            return sum_over_processes(x[:, : min(held, 1)].sum(1), self.group)
        return mean_of_tokens(x if with_prefix else x[:, held:], self.group)

    def forward_intermediates(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported."""
        raise ValueError(
            "a parallelized model does not return feature maps, which are split over the processes; call "
            "forward_intermediates of a model that was not parallelized, with the same weights"
        )


def rows_of(rank: int, processes: int, height: int, unit: int) -> slice:
    """The rows of an image for one process: about as many units as the others; the rest goes to the last."""
    units = height // unit
    if units < processes:
        raise ValueError(
            f"images of {height} rows have {units} units of {unit} rows, fewer than the {processes} processes that "
            f"share them: use images of at least {processes * unit} rows or fewer processes"
        )
    start, stop = (units * part // processes * unit for part in (rank, rank + 1))
    return slice(start, height if rank == processes - 1 else stop)
