"""XCiT, the miniature XCiT and timm's Xcit on the rows of one process.

Shapes: B batch, N tokens of this process, C channels.
"""

from typing import Any

import torch
from timm.models.xcit import Xcit
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sima_attn.parallel.layers import share_dropout
from sima_attn.parallel.model import SplitModel


class SplitXcit(SplitModel, Xcit):
    """An XCiT; every process holds the class token."""

    def split(self) -> None:
        """Split the layers, once the group is set."""
        super().split()
        blocks: Any = self.cls_attn_blocks
        for block in blocks:  # these drop numbers of the class token, but for attn_drop
            share_dropout(block.mlp, self.group)
            share_dropout(block.attn.proj_drop, self.group)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images [B, 3, height, width] -> normalized tokens [B, 1 + N, C], the class token first."""
        patch = self.patch_embed.patch_size
        height, own = x.shape[2], self.own_rows(x, patch)
        x, (rows, columns) = self.patch_embed(x[:, :, own])  # [B, N, C]
        all_rows, first_row = -(-height // patch), own.start // patch
        self.set_row_offset((all_rows, columns), first_row)
        if self.pos_embed is not None:
            positions = self.pos_embed(1, all_rows, columns)  # [1, C, all rows, columns]
            x = x + positions.narrow(2, first_row, rows).flatten(2).transpose(1, 2)
        x = self.pos_drop(x)
        for block in self.blocks:
            x = self.run_block(block, x, rows, columns)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)  # [B, 1 + N, C]
        for block in self.cls_attn_blocks:  # forward_cls of timm is newer than 1.0.29
            x = self.run_block(block, x)
        return self.norm(x)

    def run_block(self, block: Any, x: Tensor, *grid: int) -> Tensor:
        """A block, whose activations are computed again in the backward pass if the model is to save memory."""
        return checkpoint(block, x, *grid, use_reentrant=False) if self.grad_checkpointing else block(x, *grid)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens [B, 1 + N, C] -> logits [B, K], or the features [B, C] that the classifier reads."""
        x = x[:, 0] if self.global_pool == "token" else self.pool_tokens(x[:, 1:], "avg", 0)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)
