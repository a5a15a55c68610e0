"""Images -> the feature maps of chosen blocks, for DeiT, XCiT and CvT; padding inside a batch changes nothing.

A batch holds images of several sizes, each at the top left of a common canvas. Every image keeps its own grid of
tokens: positions are those of its own size, attention leaves the other tokens out, and convolutions find zeros
where the image alone would have had its border. So a map holds what the image alone gives, and zeros beside it.

Shapes: B batch, N tokens, C channels; a grid is (rows, columns).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sima_attn._errors import unknown_name
from sima_attn.models.cvt import Cvt, to_map
from sima_attn.nn.attention import Attention, SimAttention
from sima_attn.nn.baselines.softmax import SoftmaxAttention
from sima_attn.nn.baselines.xca import XCAttention

STRIDE = 32  # sides are padded to a multiple of the coarsest map of the pyramid
Grid = tuple[int, int]


@dataclass(frozen=True)
class Inside:
    """Where the images of a padded batch are.

    Attributes:
        sizes: (height, width) of each image, multiples of STRIDE: what it would be padded to alone.
        canvas: (height, width) of the batch.
    """

    sizes: tuple[Grid, ...]
    canvas: Grid

    @classmethod
    def of(cls, image_sizes: Sequence[Grid], canvas: Grid) -> Inside | None:
        """Of images of these sizes on a canvas; None where each image fills it, so that nothing is padding."""
        own = tuple((whole(height, STRIDE), whole(width, STRIDE)) for height, width in image_sizes)
        return None if all(size == canvas for size in own) else cls(own, canvas)

    def grids(self, stride: int) -> list[Grid]:
        """The grid of each image at a stride."""
        return [(-(-height // stride), -(-width // stride)) for height, width in self.sizes]

    def mask(self, stride: int, device: torch.device) -> Tensor:
        """True where there is an image: [B, 1, rows, columns] of the canvas."""
        height, width = (-(-side // stride) for side in self.canvas)
        mask = torch.zeros(len(self.sizes), 1, height, width, dtype=torch.bool, device=device)
        for own, (rows, columns) in zip(mask, self.grids(stride), strict=True):
            own[:, :rows, :columns] = True  # filled there: a copy from the CPU would wait for the device
        return mask


def whole(side: int, unit: int) -> int:
    """The least multiple of unit that is not below side."""
    return -(-side // unit) * unit


def on_canvas(parts: Sequence[Tensor], canvas: Grid) -> Tensor:
    """Maps [C, rows, columns] of single images -> [B, C, rows, columns] of the canvas, zeros beside them."""
    rows, columns = canvas
    return torch.stack([F.pad(part, (0, columns - part.shape[2], 0, rows - part.shape[1])) for part in parts])


def attend(attn: Attention, q: Tensor, k: Tensor, v: Tensor, real: Tensor, keys: Tensor) -> Tensor:
    """Attention that leaves padding out; `real` [B, N] and `keys` [B, M] are True for the tokens of images."""
    if isinstance(attn, SimAttention):
        return attn.join(attn.core(q, k, v, real, keys))
    if isinstance(attn, SoftmaxAttention):
        return attn.join(attn.core(q, k, v, attn_mask=keys[:, None, None]))
    if isinstance(attn, XCAttention):  # sums over tokens: a token of zeros adds nothing
        return attn.join(attn.core(*(t * keys[:, None, :, None] for t in (q, k, v))))
    raise ValueError(
        f"{type(attn).__name__} cannot leave padding out, and this batch holds images of several sizes; "
        "use the attention sima, softmax or xca, or images of one size at a time"
    )


def self_attend(attn: Attention, x: Tensor, real: Tensor) -> Tensor:
    """The same for tokens [B, N, C] that attend to each other."""
    if isinstance(attn, SimAttention):
        return attn(x, token_mask=real)  # its packed projection goes to the kernels as it is
    return attend(attn, *attn.split(x), real, real)


class BlockMaps(nn.Module, ABC):
    """Images [B, 3, height, width] -> one map [B, C, rows, columns] for each block asked for, zeros in the padding.

    Attributes:
        body: The model, without what no map needs: head, class attention, final norm.
        dims, strides: Channels and stride of each map.
    """

    def __init__(self, body: Any, dims: list[int], strides: list[int]) -> None:
        super().__init__()
        self.body, self.dims, self.strides = body, dims, strides

    def forward(self, images: Tensor, inside: Inside | None = None) -> list[Tensor]:
        """The maps; `inside` says where the images are, None that they fill the batch."""
        if inside is None:
            return self.plain(images)
        maps = self.masked(images, inside)
        return [x * inside.mask(stride, x.device) for x, stride in zip(maps, self.strides, strict=True)]

    @abstractmethod
    def plain(self, images: Tensor) -> list[Tensor]:
        """Maps of images that fill the batch."""

    @abstractmethod
    def masked(self, images: Tensor, inside: Inside) -> list[Tensor]:
        """Maps of a padded batch; what they hold in the padding does not matter."""

    def run(self, block: Callable[..., Tensor], x: Tensor) -> Tensor:
        """One block, recomputed in the backward pass where that was asked for."""
        if self.body.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False)
        return block(x)


class TransformerMaps(BlockMaps):
    """The maps of some blocks of a DeiT or XCiT, all of one grid."""

    def __init__(self, body: Any, indices: Sequence[int]) -> None:
        dims, stride = [body.embed_dim] * len(indices), body.feature_info[0]["reduction"]
        super().__init__(body, dims, [stride] * len(indices))
        self.indices = list(indices)  # a shallow model may feed several maps from one block
        body.prune_intermediate_layers(sorted(set(indices)), prune_norm=True)

    def plain(self, images: Tensor) -> list[Tensor]:
        """By timm's own way to the blocks' outputs."""
        taken = sorted(set(self.indices))
        maps = self.body.forward_intermediates(images, taken, intermediates_only=True)
        return [maps[taken.index(i)] for i in self.indices]

    def collect(self, x: Tensor, grid: Grid, block: Callable[..., Tensor], *arguments: Any) -> list[Tensor]:
        """Tokens [B, N, C], class tokens first, through `block(body's block, arguments, tokens)`, the maps taken."""
        maps = []
        for i, layer in enumerate(self.body.blocks):
            x = self.run(partial(block, layer, *arguments), x)
            maps += [to_map(x[:, -grid[0] * grid[1] :], grid)] * self.indices.count(i)
        return maps


class DeitMaps(TransformerMaps):
    """Of timm's VisionTransformer; the position embeddings are resampled to each image's own grid."""

    def masked(self, images: Tensor, inside: Inside) -> list[Tensor]:
        """Maps of a padded batch."""
        vit: Any = self.body
        if type(vit.blocks[0]) is not Block:
            raise ValueError(
                f"{type(vit.blocks[0]).__name__} has parts that see the padding of a batch; use images of one size"
            )
        patches = vit.patch_embed(images)  # [B, rows, columns, C]
        grid = patches.shape[1:3]
        # Each image alone, on its own grid: class token and positions as timm adds them.
        own = [
            vit._pos_embed(x[None, :rows, :columns].contiguous())[0]
            for x, (rows, columns) in zip(patches, inside.grids(self.strides[0]), strict=True)
        ]  # [P + rows * columns, C] each
        P = vit.num_prefix_tokens
        maps = [x[P:].mT.unflatten(1, g) for x, g in zip(own, inside.grids(self.strides[0]), strict=True)]
        prefix = torch.stack([x[:P] for x in own])  # [B, P, C]
        x = torch.cat([prefix, on_canvas(maps, grid).flatten(2).mT], dim=1)  # [B, N, C]
        real = F.pad(inside.mask(self.strides[0], x.device).flatten(1), (P, 0), value=True)  # [B, N]
        return self.collect(vit.norm_pre(x), grid, deit_block, real)


def deit_block(block: Any, real: Tensor, x: Tensor) -> Tensor:
    """timm's Block, its attention among real tokens."""
    x = x + block.drop_path1(block.ls1(self_attend(block.attn, block.norm1(x), real)))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


class XcitMaps(TransformerMaps):
    """Of timm's Xcit and ours; the Fourier positions are those of each image's own grid.

    BatchNorm of the stem and of LPI has running statistics in evaluation, where single images and batches agree;
    in training its statistics are those of the batch, padding among it.
    """

    def __init__(self, body: Any, indices: Sequence[int]) -> None:
        super().__init__(body, indices)
        body.cls_token = None  # it joins after the blocks, so here it would have no gradient

    def masked(self, images: Tensor, inside: Inside) -> list[Tensor]:
        """Maps of a padded batch."""
        xcit: Any = self.body
        x, stride = images, 1
        for layer in xcit.patch_embed.proj:  # a convolution with stride 2 and its norm, an activation, ...
            x = layer(x)
            stride = images.shape[3] // x.shape[3]
            if isinstance(layer, nn.Sequential):
                x = x * inside.mask(stride, x.device)  # the activation keeps zeros
        grid = (x.shape[2], x.shape[3])
        if xcit.pos_embed is not None:
            x = x + on_canvas([xcit.pos_embed(1, *own)[0] for own in inside.grids(stride)], grid)
        real = inside.mask(stride, x.device)  # [B, 1, rows, columns]
        return self.collect(xcit.pos_drop(x.flatten(2).mT), grid, xcit_block, real)


def xcit_block(block: Any, real: Tensor, x: Tensor) -> Tensor:
    """timm's XCABlock, or ours without LPI, its attention and convolutions among real tokens."""
    x = x + block.drop_path1(block.gamma1 * self_attend(block.attn, block.norm1(x), real.flatten(1)))
    if hasattr(block, "local_mp"):
        x = x + block.drop_path3(block.gamma3 * local_patches(block.local_mp, block.norm3(x), real))
    return x + block.drop_path2(block.gamma2 * block.mlp(block.norm2(x)))


def local_patches(lpi: Any, x: Tensor, real: Tensor) -> Tensor:
    """LPI on tokens [B, N, C], zeros in the padding before each of its convolutions."""
    x = lpi.conv1(to_map(x, (real.shape[2], real.shape[3])) * real)  # [B, C, rows, columns]
    x = lpi.conv2(lpi.bn(lpi.act(x)) * real)
    return x.flatten(2).mT  # [B, N, C]


class CvtMaps(BlockMaps):
    """The maps of CvT's stages: strides 4, 8 and 16. BatchNorm as in XcitMaps."""

    def __init__(self, body: Cvt) -> None:
        super().__init__(
            body, [info["num_chs"] for info in body.feature_info], [info["reduction"] for info in body.feature_info]
        )
        body.prune_intermediate_layers(len(body.stages), prune_norm=True)

    def plain(self, images: Tensor) -> list[Tensor]:
        """Maps of images that fill the batch."""
        return self.body.forward_intermediates(images, intermediates_only=True)

    def masked(self, images: Tensor, inside: Inside) -> list[Tensor]:
        """Maps of a padded batch."""
        maps: list[Tensor] = []
        x = images
        for stage, stride in zip(self.body.stages, self.strides, strict=True):
            tokens, grid = stage.patch_embed(x)
            if stage.cls_token is not None:
                tokens = torch.cat([stage.cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
            real = inside.mask(stride, x.device)
            for block in stage.blocks:
                keys = inside.mask(stride * block.attn.kv_stride, x.device)
                tokens = self.run(partial(cvt_block, block, real, keys), tokens)
            x = to_map(tokens[:, -grid[0] * grid[1] :], grid) * real  # [B, C, rows, columns]
            maps.append(x)
        return maps


def cvt_block(block: Any, real: Tensor, keys: Tensor, x: Tensor) -> Tensor:
    """CvT's block, its attention and convolutions among real tokens; `keys` is the mask at the keys' stride."""
    attn, grid = block.attn, real.shape[2:]
    P = attn.num_prefix_tokens
    real, keys = (F.pad(mask.flatten(1), (P, 0), value=True) for mask in (real, keys))  # [B, N], [B, M]
    q, k, v = attn.split(block.norm1(x) * real[..., None], grid)
    x = x + block.drop_path1(attend(attn, q, k, v, real, keys))
    return x + block.drop_path2(block.mlp(block.norm2(x)))


def spread_blocks(depth: int) -> tuple[int, ...]:
    """Blocks, counted from 1, whose maps feed the pyramid: 4, 6, 8 and 12 of 12, and the same shares of others."""
    return tuple(-(-depth * share // 6) for share in (2, 3, 4, 6))


def block_maps(
    name: str,
    *,
    blocks: Sequence[int] | None = None,
    drop_path: float = 0.0,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **kwargs: Any,
) -> BlockMaps:
    """The maps of a model of the zoo.

    Args:
        name: A DeiT, XCiT or CvT, e.g. "sima_xcit_small_12_p16_224".
        blocks: Four blocks of a DeiT or XCiT, counted from 1; without it those of `spread_blocks`.
        drop_path: Rate of stochastic depth, as the family spreads it over its blocks.
        prepare: Called with the whole model before anything is taken off it, e.g. to load its weights.
        kwargs: Arguments of the model: attention="softmax", token_ref="train", relu=True, pretrained=True, ...
    """
    known = timm.list_models("sima_*")
    if name not in known:
        raise unknown_name("model of this package", name, known)
    try:
        model: Any = timm.create_model(name, drop_path_rate=drop_path, **kwargs)
    except TypeError as error:
        raise ValueError(f"{name} cannot be built with {kwargs}: {error}") from error
    prepare(model)
    if isinstance(model, Cvt):
        if blocks is not None:
            raise ValueError(f"CvT feeds the pyramid by its stages: blocks must be left out, got {tuple(blocks)}")
        return CvtMaps(model)
    depth = len(model.blocks)
    blocks = spread_blocks(depth) if blocks is None else tuple(blocks)
    if len(blocks) != 4 or list(blocks) != sorted(blocks) or blocks[0] < 1 or blocks[-1] > depth:
        raise ValueError(f"blocks must be four numbers from 1 to {depth}, in order, got {blocks}")
    kind = {VisionTransformer: DeitMaps, Xcit: XcitMaps}
    maps = next(maps for family, maps in kind.items() if isinstance(model, family))
    return maps(model, [block - 1 for block in blocks])
