"""DeiT, the miniature ViT and timm's VisionTransformer on the rows of one process.

Shapes: B batch, N tokens of this process, C channels, P prefix tokens (class token, registers); a grid is
(rows, columns) of patch tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sima_attn.parallel.exchange import is_first
from sima_attn.parallel.model import SplitModel


class SplitVit(SplitModel, VisionTransformer):
    """A ViT whose first process holds the class token and the registers."""

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Images [B, 3, height, width] -> the normalized tokens of this process [B, N, C]."""
        if attn_mask is not None or is_causal:
            raise ValueError("a parallelized model supports no attention masks, because SimA does not: omit them")
        images = whole_patches(self.patch_embed, x)
        height, width = self.patch_embed.patch_size
        grid = (images.shape[2] // height, images.shape[3] // width)  # of the whole image
        own = self.own_rows(images, height)
        x = self.patch_embed.proj(images[:, :, own]).flatten(2).transpose(1, 2)  # [B, rows * columns, C]
        self.set_row_offset(grid, own.start // height)
        x = self.with_positions(self.patch_embed.norm(x), grid, first_row=own.start // height)
        x = self.norm_pre(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.grad_checkpointing else block(x)
        return self.norm(x)

    def with_positions(self, x: Tensor, grid: tuple[int, int], first_row: int) -> Tensor:
        """Patch tokens -> tokens [B, N, C] with their position embeddings; the prefix tokens on the first process."""
        tokens = (self.cls_token, self.reg_token)
        prefix: list[Tensor] = [token for token in tokens if token is not None]  # [1, P, C] together
        if self.pos_embed is not None:
            embedded = 0 if self.no_embed_class else self.num_prefix_tokens  # prefix tokens that have a position
            positions = self.pos_embed
            if self.dynamic_img_size:
                positions = resample_abs_pos_embed(
                    positions, new_size=grid, old_size=self.patch_embed.grid_size, num_prefix_tokens=embedded
                )
            x = x + positions[:, embedded:].narrow(1, first_row * grid[1], x.shape[1])
            if embedded:
                prefix = [torch.cat(prefix, 1) + positions[:, :embedded]]
        if prefix:
            # An empty part on the others: their gradients of the prefix are zero, not missing, as DDP requires.
            held = self.num_prefix_tokens if is_first(self.group) else 0
            x = torch.cat([torch.cat(prefix, 1).expand(len(x), -1, -1)[:, :held], x], 1)  # [B, N, C]
        return x if self.pos_embed is None else self.pos_drop(x)

    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Tokens [B, N, C] of this process -> features [B, C] of the image."""
        pool = self.global_pool if pool_type is None else pool_type
        return self.pool_tokens(x, pool, self.num_prefix_tokens, with_prefix=self.pool_include_prefix)


def whole_patches(patch_embed: Any, images: Tensor) -> Tensor:
    """Images whose sides are whole patches: padded where the model pads, else an error."""
    (height, width), (p, q) = images.shape[2:], patch_embed.patch_size
    if patch_embed.dynamic_img_pad:
        return F.pad(images, (0, -width % q, 0, -height % p))
    if patch_embed.strict_img_size and patch_embed.img_size not in (None, (height, width)):
        rows, columns = patch_embed.img_size
        raise ValueError(
            f"the model takes images of {rows} x {columns} pixels, got {height} x {width}; build it with "
            "dynamic_img_size=True for other sizes"
        )
    if height % p or width % q:
        raise ValueError(f"the sides of the images must be multiples of the patches, {p} x {q}, got {height} x {width}")
    return images
