"""CvT on the rows of one process.

Shapes: B batch, N tokens of this process, C channels.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sima_attn.models.cvt import Cvt, Stage
from sima_attn.parallel.exchange import is_first
from sima_attn.parallel.layers import become
from sima_attn.parallel.model import SplitModel


class SplitStage(Stage):
    """A stage whose class token is on the first process."""

    group: DeviceMesh

    def with_class_token(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C] -> the same, behind the class token on the first process."""
        if self.cls_token is None or is_first(self.group):
            return super().with_class_token(x)
        # An empty part: the gradient of the class token is zero here, not missing, as DDP requires.
        return torch.cat([self.cls_token[:, :0].expand(len(x), -1, -1), x], 1)


class SplitCvt(SplitModel, Cvt):
    """A CvT whose first process holds the class token."""

    unit: int  # rows of pixels that stay together

    def split(self) -> None:
        """Split the layers, once the group is set."""
        super().split()
        stages: Any = self.stages
        for stage in stages:
            become(stage, SplitStage, self.group)
        self._hold_class_token(is_first(self.group))
        # Strided convolutions stay aligned where every stage, and its keys, have whole rows.
        stride = math.prod(stage.patch_embed.proj.stride[0] for stage in stages)
        self.unit = stride * max(block.attn.kv_stride for stage in stages for block in stage.blocks)

    def unsplit(self) -> None:
        """Make the model and its layers those of one process again."""
        self._hold_class_token(True)
        super().unsplit()

    def _hold_class_token(self, held: bool) -> None:
        last: Any = self.stages[-1]
        for block in last.blocks:
            block.attn.num_prefix_tokens = self.num_prefix_tokens if held else 0

    def forward_features(self, x: Tensor) -> Tensor:
        """Images [B, in_chans, height, width] -> the normalized tokens of this process in the last stage [B, N, C]."""
        return super().forward_features(x[:, :, self.own_rows(x, self.unit)])

    def pool(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C] of this process -> features [B, C] of the image."""
        return self.pool_tokens(x, self.global_pool, self.num_prefix_tokens)
