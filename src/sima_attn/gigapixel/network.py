"""A model -> its parts, each of which runs on a tile of the token grid.

The forward passes are those of the model's own blocks. Only the attention inside is exchanged for one whose sums over
all tokens are given: with them, attention, MLP and class attention treat each token by itself. A convolution of v sees
one token around it, and the local patch interaction (LPI, two 3 x 3 convolutions) two.

Shapes: tiles of r x c tokens [1, r, c, C], tokens [1, n, C], P prefix tokens (class token, registers).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.xcit import PositionalEncodingFourier, XCABlock, Xcit
from torch import Tensor, nn

from sima_attn.gigapixel.attentions import Sums, tiled_attention
from sima_attn.gigapixel.positions import FourierPositions, Grid, LearnedPositions, Positions
from sima_attn.models.huggingface import users_model
from sima_attn.models.miniature import LocalBlock
from sima_attn.models.xcit import BlockWithoutLpi
from sima_attn.nn import SimClassAttention
from sima_attn.nn.rotation import GridPart, on_part
from sima_attn.ops.streaming import SimaAccumulator

LPI_HALO = 2  # tokens: one for each of its convolutions
STEM_HALO = 1  # tokens above and to the left: a chain of 3 x 3 convolutions of stride 2 sees no more than that
Kinds = dict[type, tuple[Callable[..., Tensor], int]]  # class of a block -> how it is called, and its halo
POOLINGS = ("token", "avg")  # the first token, and a sum over tokens


class Stage:
    """A block with self-attention.

    Args:
        path: Where it is in the model, for errors.
        block: Of timm or this package; it is copied without its parameters, and not changed.
        forward: How it is called: (block, tokens [1, n, C], rows, columns) -> tokens.
        halo: Tokens around a tile on which its output depends, apart from its attention.
    """

    def __init__(self, path: str, block: Any, forward: Callable[..., Tensor], halo: int = 0) -> None:
        self.tiled = tiled_attention(f"{path}.attn", block.attn)
        self.norm, self.halo = block.norm1, halo + self.tiled.halo
        self.block, self._forward = _with_attention(block, self.tiled), forward

    def new_sums(self) -> Sums:
        """Sums over no tokens."""
        return self.tiled.new_sums()

    def add(self, sums: Sums, x: Tensor, part: GridPart) -> None:
        """Add tokens [1, n, C] to the sums of the attention."""
        with on_part(self.tiled.attention, part):
            self.tiled.add(sums, self.norm(x))

    def normalized(self, sums: Sums, x: Tensor, part: GridPart) -> tuple[Tensor, Tensor]:
        """q and k [1, H, n, D] of tokens [1, n, C], as the attention normalizes them."""
        with on_part(self.tiled.attention, part):
            return self.tiled.normalized(sums, self.norm(x))

    def apply(self, sums: Sums, x: Tensor, part: GridPart) -> Tensor:
        """Tokens [1, n, C] -> those after the block; the outermost `halo` tokens of a tile in the image are wrong."""
        self.tiled.sums, self.tiled.part = sums, part
        with on_part(self.tiled.attention, part):
            return self._forward(self.block, x, part.layout.rows, part.layout.columns)


class ClassStage:
    """A block of class attention: its patch tokens change one by one, its class token by sums over all of them."""

    def __init__(self, path: str, block: Any) -> None:
        if not isinstance(block.attn, SimClassAttention):
            raise ValueError(
                f"{path}.attn is {type(block.attn).__name__}, which cannot run tile by tile: of class attentions only "
                "SimA's can; create the model with class_attention='sima', or convert it to the attention sima"
            )
        self.norm, self.attention = block.norm1, block.attn
        self.summed = _ClassAttention()
        self.block = _with_attention(block, self.summed)

    def new_sums(self) -> SimaAccumulator:
        """Sums over no tokens."""
        return SimaAccumulator(token_ref=self.attention.token_ref, eps=self.attention.eps)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Tokens [1, n, C] -> q, k, v [1, H, n, D]."""
        heads, x = self.attention.num_heads, self.norm(x)
        layers = (self.attention.q, self.attention.k, self.attention.v)
        return tuple(layer(x).unflatten(2, (heads, -1)).transpose(1, 2) for layer in layers)

    def pass_tokens(self, sums: Sums, x: Tensor) -> Tensor:
        """Add patch tokens [1, n, C] to the sums, and return them after the block."""
        self.add(sums, x)
        self.summed.output = torch.zeros_like(x[:, :1])
        return self.block(torch.cat([self.summed.output, x], dim=1))[:, 1:]

    def add(self, sums: Sums, x: Tensor) -> Tensor:
        """Add tokens [1, n, C] to the sums; their queries."""
        q, k, v = self.project(x)
        sums.add_queries(q)
        sums.add_keys(k, v)
        return q

    def class_token(self, sums: Sums, token: Tensor) -> Tensor:
        """The class token [1, 1, C] after the block, from the sums over all patch tokens."""
        q = self.add(sums, token)
        o = sums.attend(q).transpose(1, 2).flatten(2)  # [1, 1, C]
        self.summed.output = self.attention.proj(o)
        return self.block(token)


class _ClassAttention(nn.Module):
    """In the place of a class attention: its output, computed elsewhere."""

    output: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.output


class Network(ABC):
    """A model as tiles go through it: `embed`, then `add` and `apply` of each stage, then `finish`.

    Attributes:
        patch: Side of a patch in pixels.
        stages: Its blocks with self-attention.
        class_stages: Its blocks with class attention.
        stem_halo: Tokens above and to the left of a tile whose pixels `embed` needs.
    """

    patch: int
    stem_halo = 0

    def __init__(self, model: Any, stages: list[Stage], class_stages: list[ClassStage]) -> None:
        self.model, self.stages, self.class_stages = model, stages, class_stages
        like = next(model.parameters())
        self.device, self.dtype, self.width = like.device, like.dtype, int(model.embed_dim)

    def grid(self, height: int, width: int) -> Grid:
        """Rows and columns of the tokens: a patch that the image fills in part counts."""
        return -(-height // self.patch), -(-width // self.patch)

    @abstractmethod
    def positions(self, grid: Grid) -> Positions | None:
        """The position embeddings of a grid."""

    @abstractmethod
    def embed(self, pixels: Tensor) -> Tensor:
        """Normalized pixels [1, 3, height, width], whose first one begins a patch -> tokens [1, r, c, C]."""

    @abstractmethod
    def prefix(self) -> Tensor:
        """The tokens [1, P, C] that are not on the grid, before the first block."""

    @abstractmethod
    def settle(self, tokens: Tensor) -> Tensor:
        """What follows the position embedding: tokens -> tokens."""

    def finish(self, sums: list[Sums], x: Tensor) -> Tensor:
        """A tile [1, r, c, C] after the last block -> final features; adds it to the sums of the class stages."""
        grid, x = x.shape[1:3], x.flatten(1, 2)
        for stage, of_stage in zip(self.class_stages, sums, strict=True):
            x = stage.pass_tokens(of_stage, x)
        return self.model.norm(x).unflatten(1, tuple(grid))

    def finish_prefix(self, sums: list[Sums], prefix: Tensor) -> Tensor:
        """The prefix tokens of the output, from those after the last block and the sums of the class stages."""
        return self.model.norm(prefix)

    def logits(self, prefix: Tensor, mean: Tensor) -> Tensor | None:
        """The logits [K] from the final prefix tokens and the mean of the final features [C].

        None without a classifier, or where the model pools its tokens in a way that is no sum over them.
        """
        model = self.model
        if not model.num_classes or model.global_pool not in POOLINGS or getattr(model, "pool_include_prefix", False):
            return None
        # Pooled over this one token, the mean is what it is over all.
        return model.forward_head(torch.cat([prefix, mean[None, None].to(prefix.dtype)], dim=1))[0]


class VitNetwork(Network):
    """A vision transformer of timm or this package."""

    def __init__(self, model: Any) -> None:
        kinds: Kinds = {Block: (_call_block, 0), LocalBlock: (_call_local_block, LPI_HALO)}
        super().__init__(model, _stages(model, kinds), [])
        side, other = model.patch_embed.patch_size
        if side != other:
            raise ValueError(f"patches must be square, got {side} x {other} pixels")
        self.patch = side

    def positions(self, grid: Grid) -> Positions | None:
        """Resampled as by a model with dynamic_img_size=True, whether or not this one has it."""
        embedding = self.model.pos_embed
        if embedding is None:
            return None
        on_grid = embedding[0, -self._trained_tokens() :]
        return LearnedPositions(on_grid.unflatten(0, self.model.patch_embed.grid_size), grid)

    def _trained_tokens(self) -> int:
        rows, columns = self.model.patch_embed.grid_size
        return rows * columns

    def embed(self, pixels: Tensor) -> Tensor:
        """Sides that are no multiple of the patch are padded with zeros, as by dynamic_img_pad=True."""
        bottom, right = (-side % self.patch for side in pixels.shape[2:])
        x = self.model.patch_embed.proj(F.pad(pixels, (0, right, 0, bottom)))  # [1, C, r, c]
        return self.model.patch_embed.norm(x.permute(0, 2, 3, 1))

    def prefix(self) -> Tensor:
        """Class token, then registers."""
        model = self.model
        tokens = [token for token in (model.cls_token, model.reg_token) if token is not None]
        if not tokens:
            return torch.zeros(1, 0, self.width, device=self.device, dtype=self.dtype)
        prefix = torch.cat(tokens, dim=1)  # [1, P, C]
        if model.pos_embed is not None and not model.no_embed_class:
            prefix = prefix + model.pos_embed[:, : -self._trained_tokens()]
        return self.settle(prefix)

    def settle(self, tokens: Tensor) -> Tensor:
        """A norm before the first block."""
        return self.model.norm_pre(tokens)


class XcitNetwork(Network):
    """An XCiT of timm or this package."""

    stem_halo = STEM_HALO

    def __init__(self, model: Any) -> None:
        kinds: Kinds = {XCABlock: (_call_xcit_block, LPI_HALO), BlockWithoutLpi: (_call_xcit_block, 0)}
        stages = _stages(model, kinds)
        last = [ClassStage(f"cls_attn_blocks.{i}", block) for i, block in enumerate(model.cls_attn_blocks)]
        super().__init__(model, stages, last)
        self.patch = int(model.patch_embed.patch_size)

    def positions(self, grid: Grid) -> Positions | None:
        """The Fourier encoding."""
        encoding = self.model.pos_embed
        if encoding is None:
            return None
        assert type(encoding) is PositionalEncodingFourier
        return FourierPositions(encoding, grid)

    def embed(self, pixels: Tensor) -> Tensor:
        """The stem pads by itself: a patch that the image fills in part is a token."""
        x, grid = self.model.patch_embed(pixels)
        return x.unflatten(1, grid)

    def prefix(self) -> Tensor:
        """None: the class token joins in class attention."""
        return self.model.cls_token[:, :0]

    def settle(self, tokens: Tensor) -> Tensor:
        """Nothing."""
        return tokens

    def finish_prefix(self, sums: list[Sums], prefix: Tensor) -> Tensor:
        """The class token."""
        token = self.model.cls_token
        for stage, of_stage in zip(self.class_stages, sums, strict=True):
            token = stage.class_token(of_stage, token)
        return self.model.norm(token)


def network_of(model: Any) -> Network:
    """The parts of a model; raises for one that cannot run tile by tile."""
    model = getattr(model, "_orig_mod", model)  # the module inside torch.compile
    if isinstance(model, Xcit):
        return XcitNetwork(model)
    own = (VisionTransformer.forward_features, VisionTransformer._pos_embed)
    if isinstance(model, VisionTransformer) and own == (type(model).forward_features, type(model)._pos_embed):
        return VitNetwork(model)
    raise ValueError(
        f"{type(users_model(model)).__name__} cannot run tile by tile: supported are SimA models of the DeiT and XCiT "
        "families, and timm's VisionTransformer and Xcit converted with `sima_attn.convert` or `sima linearize`"
    )


def _stages(model: Any, kinds: Kinds) -> list[Stage]:
    stages = []
    for i, block in enumerate(model.blocks):
        if type(block) not in kinds:
            known = ", ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"blocks.{i} is a {type(block).__name__}, which cannot run tile by tile; known: {known}")
        stages.append(Stage(f"blocks.{i}", block, *kinds[type(block)]))
    return stages


def _call_block(block: nn.Module, x: Tensor, rows: int, columns: int) -> Tensor:
    return block(x)


def _call_local_block(block: nn.Module, x: Tensor, rows: int, columns: int) -> Tensor:
    return block(x, grid=(rows, columns))


def _call_xcit_block(block: nn.Module, x: Tensor, rows: int, columns: int) -> Tensor:
    return block(x, rows, columns)


def _with_attention(block: Any, attention: nn.Module) -> Any:
    """A copy of the block with the same parameters and another attention."""
    copied = copy.copy(block)
    copied._modules = {**block._modules, "attn": attention}
    return copied
