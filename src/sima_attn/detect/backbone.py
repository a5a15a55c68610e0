"""Feature maps of chosen blocks of DeiT, XCiT and CvT; padding does not change the features of an image.

A batch contains images of several sizes, each at the top left of a common canvas. Each image keeps its own token grid:
position embeddings are those of its own size, attention masks the padding, and convolutions see zeros beyond the
border of the image. A map therefore equals that of the single image, with zeros in the padding.

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

from sima_attn._errors import check_known
from sima_attn.models.cvt import Cvt, to_map
from sima_attn.nn import Attention, Relu2Attention, SimAttention
from sima_attn.nn.baselines.softmax import SoftmaxAttention
from sima_attn.nn.baselines.xca import XCAttention
from sima_attn.nn.rotation import RotatedAttention

STRIDE = 32  # of the coarsest map of the pyramid; sides are padded to multiples of it
Grid = tuple[int, int]


@dataclass(frozen=True)
class BatchLayout:
    """The areas of the images in a padded batch.

    Attributes:
        sizes: (height, width) of each image, padded to multiples of STRIDE.
        canvas: (height, width) of the batch.
    """

    sizes: tuple[Grid, ...]
    canvas: Grid

    @classmethod
    def of(cls, image_sizes: Sequence[Grid], canvas: Grid) -> BatchLayout | None:
        """The layout of images of these sizes on a canvas; None if each image fills it, without padding."""
        own = tuple((round_up(height, STRIDE), round_up(width, STRIDE)) for height, width in image_sizes)
        return None if all(size == canvas for size in own) else cls(own, canvas)

    def grids(self, stride: int) -> list[Grid]:
        """The token grid of each image at a stride."""
        return [(-(-height // stride), -(-width // stride)) for height, width in self.sizes]

    def mask(self, stride: int, device: torch.device) -> Tensor:
        """True on the images, False in the padding: [B, 1, rows, columns]."""
        height, width = (-(-side // stride) for side in self.canvas)
        mask = torch.zeros(len(self.sizes), 1, height, width, dtype=torch.bool, device=device)
        for own, (rows, columns) in zip(mask, self.grids(stride), strict=True):
            own[:, :rows, :columns] = True  # filled on the device: a copy from the CPU would synchronize
        return mask


def round_up(side: int, unit: int) -> int:
    """The smallest multiple of unit that is at least side."""
    return -(-side // unit) * unit


def stack_padded(parts: Sequence[Tensor], canvas: Grid) -> Tensor:
    """Pad maps [C, rows, columns] of single images with zeros and stack them: [B, C, rows, columns]."""
    rows, columns = canvas
    return torch.stack([F.pad(part, (0, columns - part.shape[2], 0, rows - part.shape[1])) for part in parts])


def attend(attn: Attention, q: Tensor, k: Tensor, v: Tensor, is_image: Tensor, keys: Tensor) -> Tensor:
    """Attention that ignores padding; `is_image` [B, N] and `keys` [B, M] are True for image tokens."""
    _check_positions(attn)
    if isinstance(attn, SimAttention):
        return attn.join(attn.core(q, k, v, is_image, keys))
    if isinstance(attn, Relu2Attention):
        return attn.join(attn.core(q, k, v, is_image))
    if isinstance(attn, SoftmaxAttention):
        return attn.join(attn.core(q, k, v, attn_mask=keys[:, None, None]))
    if isinstance(attn, XCAttention):  # sums over tokens: zero tokens add nothing
        return attn.join(attn.core(*(t * keys[:, None, :, None] for t in (q, k, v))))
    raise ValueError(
        f"{type(attn).__name__} does not support padding, and this batch has images of several sizes; use the "
        "attention sima, sima_local, sima_rope, relu2, relu2_wide, relu2_rope, softmax or xca, or images of one size"
    )


def self_attend(attn: Attention, x: Tensor, is_image: Tensor) -> Tensor:
    """Self-attention of tokens [B, N, C] that ignores padding."""
    if isinstance(attn, SimAttention):
        _check_positions(attn)
        return attn(x, token_mask=is_image)  # the kernels take its packed projection directly
    return attend(attn, *attn.split(x), is_image, is_image)


def _check_positions(attn: Attention) -> None:
    if isinstance(attn, RotatedAttention) and attn.rotation.grid_ref is not None:
        raise ValueError(
            "grid_ref scales positions to the grid of an image, and this batch has images of several sizes; omit it, "
            "or use images of one size"
        )


class BlockMaps(nn.Module, ABC):
    """Images [B, 3, height, width] -> one map [B, C, rows, columns] per chosen block, with zeros in the padding.

    Attributes:
        body: The model, without the parts that no map needs: head, class attention, final norm.
        dims, strides: Channels and stride of each map.
    """

    def __init__(self, body: Any, dims: list[int], strides: list[int]) -> None:
        super().__init__()
        self.body, self.dims, self.strides = body, dims, strides

    def forward(self, images: Tensor, layout: BatchLayout | None = None) -> list[Tensor]:
        """The maps; layout=None means that there is no padding."""
        if layout is None:
            return self.plain(images)
        maps = self.masked(images, layout)
        return [x * layout.mask(stride, x.device) for x, stride in zip(maps, self.strides, strict=True)]

    @abstractmethod
    def plain(self, images: Tensor) -> list[Tensor]:
        """Maps of a batch without padding."""

    @abstractmethod
    def masked(self, images: Tensor, layout: BatchLayout) -> list[Tensor]:
        """Maps of a padded batch; their values in the padding do not matter."""

    def run(self, block: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Run one block, with gradient checkpointing if it is enabled."""
        if self.body.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False)
        return block(x)


class TransformerMaps(BlockMaps):
    """Maps of blocks of a DeiT or XCiT, all with the same stride."""

    def __init__(self, body: Any, indices: Sequence[int]) -> None:
        dims, stride = [body.embed_dim] * len(indices), body.feature_info[0]["reduction"]
        super().__init__(body, dims, [stride] * len(indices))
        self.indices = list(indices)  # a shallow model can use one block for several maps
        body.prune_intermediate_layers(sorted(set(indices)), prune_norm=True)

    def plain(self, images: Tensor) -> list[Tensor]:
        taken = sorted(set(self.indices))
        maps = self.body.forward_intermediates(images, taken, intermediates_only=True)
        return [maps[taken.index(i)] for i in self.indices]

    def collect(self, x: Tensor, grid: Grid, block: Callable[..., Tensor], *arguments: Any) -> list[Tensor]:
        """Apply `block(layer, *arguments, tokens)` for each layer to tokens [B, N, C], class tokens first; the maps."""
        maps = []
        for i, layer in enumerate(self.body.blocks):
            x = self.run(partial(block, layer, *arguments), x)
            maps += [to_map(x[:, -grid[0] * grid[1] :], grid)] * self.indices.count(i)
        return maps


class DeitMaps(TransformerMaps):
    """Maps of timm's VisionTransformer; position embeddings are resampled to the grid of each image."""

    def masked(self, images: Tensor, layout: BatchLayout) -> list[Tensor]:
        vit: Any = self.body
        if type(vit.blocks[0]) is not Block:
            raise ValueError(f"{type(vit.blocks[0]).__name__} does not support padding; use images of one size")
        patches = vit.patch_embed(images)  # [B, rows, columns, C]
        grid = patches.shape[1:3]
        # Per image, on its own grid: timm adds class token and position embeddings.
        own = [
            vit._pos_embed(x[None, :rows, :columns].contiguous())[0]
            for x, (rows, columns) in zip(patches, layout.grids(self.strides[0]), strict=True)
        ]  # [P + rows * columns, C] each
        P = vit.num_prefix_tokens
        maps = [x[P:].mT.unflatten(1, g) for x, g in zip(own, layout.grids(self.strides[0]), strict=True)]
        prefix = torch.stack([x[:P] for x in own])  # [B, P, C]
        x = torch.cat([prefix, stack_padded(maps, grid).flatten(2).mT], dim=1)  # [B, N, C]
        is_image = F.pad(layout.mask(self.strides[0], x.device).flatten(1), (P, 0), value=True)  # [B, N]
        return self.collect(vit.norm_pre(x), grid, deit_block, is_image)


def deit_block(block: Any, is_image: Tensor, x: Tensor) -> Tensor:
    """timm's Block, with attention that ignores padding."""
    x = x + block.drop_path1(block.ls1(self_attend(block.attn, block.norm1(x), is_image)))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


class XcitMaps(TransformerMaps):
    """Maps of timm's Xcit and ours; Fourier position embeddings are computed for the grid of each image.

    In evaluation, BatchNorm in the stem and in LPI uses running statistics, so single images and batches agree. In
    training its statistics include the padding.
    """

    def __init__(self, body: Any, indices: Sequence[int]) -> None:
        super().__init__(body, indices)
        body.cls_token = None  # it is used only after the blocks, and would have no gradient

    def masked(self, images: Tensor, layout: BatchLayout) -> list[Tensor]:
        xcit: Any = self.body
        x, stride = images, 1
        for layer in xcit.patch_embed.proj:  # convolution with stride 2 and norm, activation, ...
            x = layer(x)
            stride = images.shape[3] // x.shape[3]
            if isinstance(layer, nn.Sequential):
                x = x * layout.mask(stride, x.device)  # zeros stay zeros in the activation
        grid = (x.shape[2], x.shape[3])
        if xcit.pos_embed is not None:
            x = x + stack_padded([xcit.pos_embed(1, *own)[0] for own in layout.grids(stride)], grid)
        is_image = layout.mask(stride, x.device)  # [B, 1, rows, columns]
        return self.collect(xcit.pos_drop(x.flatten(2).mT), grid, xcit_block, is_image)


def xcit_block(block: Any, is_image: Tensor, x: Tensor) -> Tensor:
    """timm's XCABlock, or ours without LPI, with attention and convolutions that ignore padding."""
    x = x + block.drop_path1(block.gamma1 * self_attend(block.attn, block.norm1(x), is_image.flatten(1)))
    if hasattr(block, "local_mp"):
        x = x + block.drop_path3(block.gamma3 * local_patches(block.local_mp, block.norm3(x), is_image))
    return x + block.drop_path2(block.gamma2 * block.mlp(block.norm2(x)))


def local_patches(lpi: Any, x: Tensor, is_image: Tensor) -> Tensor:
    """LPI on tokens [B, N, C], with the padding set to zero before each convolution."""
    x = lpi.conv1(to_map(x, (is_image.shape[2], is_image.shape[3])) * is_image)  # [B, C, rows, columns]
    x = lpi.conv2(lpi.bn(lpi.act(x)) * is_image)
    return x.flatten(2).mT  # [B, N, C]


class CvtMaps(BlockMaps):
    """Maps of CvT's stages, with strides 4, 8 and 16. For BatchNorm see `XcitMaps`."""

    def __init__(self, body: Cvt) -> None:
        super().__init__(
            body, [info["num_chs"] for info in body.feature_info], [info["reduction"] for info in body.feature_info]
        )
        body.prune_intermediate_layers(len(body.stages), prune_norm=True)

    def plain(self, images: Tensor) -> list[Tensor]:
        return self.body.forward_intermediates(images, intermediates_only=True)

    def masked(self, images: Tensor, layout: BatchLayout) -> list[Tensor]:
        maps: list[Tensor] = []
        x = images
        for stage, stride in zip(self.body.stages, self.strides, strict=True):
            tokens, grid = stage.patch_embed(x)
            if stage.cls_token is not None:
                tokens = torch.cat([stage.cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
            is_image = layout.mask(stride, x.device)
            for block in stage.blocks:
                keys = layout.mask(stride * block.attn.kv_stride, x.device)
                tokens = self.run(partial(cvt_block, block, is_image, keys), tokens)
            x = to_map(tokens[:, -grid[0] * grid[1] :], grid) * is_image  # [B, C, rows, columns]
            maps.append(x)
        return maps


def cvt_block(block: Any, is_image: Tensor, keys: Tensor, x: Tensor) -> Tensor:
    """CvT's block, with attention and convolutions that ignore padding; `keys` is the mask at the keys' stride."""
    attn, grid = block.attn, is_image.shape[2:]
    P = attn.num_prefix_tokens
    is_image, keys = (F.pad(mask.flatten(1), (P, 0), value=True) for mask in (is_image, keys))  # [B, N], [B, M]
    q, k, v = attn.split(block.norm1(x) * is_image[..., None], grid)
    x = x + block.drop_path1(attend(attn, q, k, v, is_image, keys))
    return x + block.drop_path2(block.mlp(block.norm2(x)))


def spread_blocks(depth: int) -> tuple[int, ...]:
    """The blocks, counted from 1, whose maps feed the pyramid: 4, 6, 8 and 12 of 12; other depths in proportion."""
    return tuple(-(-depth * share // 6) for share in (2, 3, 4, 6))


def block_maps(
    name: str,
    *,
    blocks: Sequence[int] | None = None,
    drop_path: float = 0.0,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **kwargs: Any,
) -> BlockMaps:
    """Build the feature maps of a model of the zoo.

    Args:
        name: A DeiT, XCiT or CvT, e.g. "sima_xcit_small_12_p16_224".
        blocks: Four blocks of a DeiT or XCiT, counted from 1; default: `spread_blocks`.
        drop_path: Stochastic depth rate.
        prepare: Called with the model before unused parts are removed, e.g. to load its weights.
        kwargs: Arguments of the model: attention="softmax", token_ref="train", relu=True, pretrained=True, ...
    """
    check_known("model of this package", name, timm.list_models("sima_*"))
    try:
        model: Any = timm.create_model(name, drop_path_rate=drop_path, **kwargs)
    except TypeError as error:
        raise ValueError(f"{name} cannot be built with {kwargs}: {error}") from error
    prepare(model)
    if isinstance(model, Cvt):
        if blocks is not None:
            raise ValueError(f"CvT feeds the pyramid from its stages: omit blocks, got {tuple(blocks)}")
        return CvtMaps(model)
    depth = len(model.blocks)
    blocks = spread_blocks(depth) if blocks is None else tuple(blocks)
    if len(blocks) != 4 or list(blocks) != sorted(blocks) or blocks[0] < 1 or blocks[-1] > depth:
        raise ValueError(f"blocks must be four numbers from 1 to {depth}, in ascending order, got {blocks}")
    kind = {VisionTransformer: DeitMaps, Xcit: XcitMaps}
    maps = next(maps for family, maps in kind.items() if isinstance(model, family))
    return maps(model, [block - 1 for block in blocks])
