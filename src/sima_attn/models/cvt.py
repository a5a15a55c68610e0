"""CvT (Wu et al., 2021) with any attention of the registry that takes fewer keys than queries, in timm's model API.

Shapes: B batch, N query tokens, M key tokens, H heads, D channels per head, C = H * D, K classes;
images [B, 3, height, width] -> logits [B, K]. A grid is (rows, columns) of tokens, without the class token.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, Mlp, calculate_drop_path_rates, global_pool_nlc
from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from sima_attn.models._build import build_model, register_family
from sima_attn.models.sizes import CVT
from sima_attn.nn.attention import Attention, check_tokens, normed
from sima_attn.nn.baselines.softmax import ExplicitSoftmaxAttention, SoftmaxAttention
from sima_attn.nn.baselines.xca import XCAttention
from sima_attn.nn.registry import ATTENTIONS, attention_class

Grid = tuple[int, int]
POOLS = ("token", "avg", "")


def to_map(x: Tensor, grid: Grid) -> Tensor:
    """Tokens [B, rows * columns, C] -> map [B, C, rows, columns], a view."""
    return x.transpose(1, 2).unflatten(2, grid)


class ConvProjections(Attention):
    """Mixin: q, k, v from depthwise convolutions over the token grid, k and v with a stride, then Linear layers.

    Class tokens are not on the grid and go directly to the Linear layers.
    """

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool, kv_stride: int, num_prefix_tokens: int, **kwargs):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, **kwargs)
        del self.qkv
        self.kv_stride, self.num_prefix_tokens = kv_stride, num_prefix_tokens
        self.conv_proj_q, self.proj_q = depthwise(dim, stride=1), nn.Linear(dim, dim, bias=qkv_bias)
        self.conv_proj_v, self.proj_v = depthwise(dim, kv_stride), nn.Linear(dim, dim, bias=qkv_bias)
        if not self.ties_qk:
            self.conv_proj_k, self.proj_k = depthwise(dim, kv_stride), nn.Linear(dim, dim, bias=qkv_bias)
        # CvT divides its scores by sqrt(C), our softmax by sqrt(D). The other attentions keep their own scale.
        softmax = isinstance(self, SoftmaxAttention | ExplicitSoftmaxAttention)
        self.q_factor = num_heads**-0.5 if softmax else 1.0

    def forward(self, x: Tensor, grid: Grid) -> Tensor:  # type: ignore[override]
        """Tokens [B, N, C] on a grid, class token first -> tokens [B, N, C]."""
        return self.join(self.core(*self.split(x, grid)))

    def split(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Tokens [B, N, C] -> q [B, H, N, D] and k, v [B, H, M, D]."""
        check_tokens(x, self.attn_dim)
        prefix, x = x.split([self.num_prefix_tokens, grid[0] * grid[1]], dim=1)
        image = to_map(x, grid)  # [B, C, rows, columns]
        q_map = self.conv_proj_q(image)
        q = normed(self.q_norm, self.heads(self.proj_q, prefix, q_map))
        if self.q_factor != 1:
            q = q * self.q_factor
        if self.ties_qk:
            # A strided convolution is the one without stride, sampled at every stride-th position.
            tied = self.heads(self.proj_q, prefix, q_map[..., :: self.kv_stride, :: self.kv_stride])
            k = normed(self.q_norm, tied)
        else:
            k = normed(self.k_norm, self.heads(self.proj_k, prefix, self.conv_proj_k(image)))
        return q, k, self.heads(self.proj_v, prefix, self.conv_proj_v(image))

    def heads(self, proj: nn.Module, prefix: Tensor, image: Tensor) -> Tensor:
        """Prefix tokens [B, P, C] and a map [B, C, rows, columns] -> [B, H, P + rows * columns, D]."""
        x = image.flatten(2).transpose(1, 2)  # [B, rows * columns, C]
        x = torch.cat([prefix, x], dim=1) if self.num_prefix_tokens else x
        return proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def depthwise(dim: int, stride: int) -> nn.Sequential:
    """A depthwise 3 x 3 convolution and its BatchNorm."""
    conv = nn.Conv2d(dim, dim, 3, stride=stride, padding=1, groups=dim, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(dim)))


def unsupported_reason(cls: type[Attention]) -> str | None:
    """Why CvT, with N queries and M < N keys at any image size, does not support an attention; None if it does."""
    if cls.needs_num_tokens:
        return "it is built for one number of tokens, which in CvT depends on the stage and the image size"
    if cls.needs_grid:
        return "it needs queries and keys on the same grid, and CvT has fewer keys and a class token"
    if cls.has_local_branch:
        return "it adds a convolution of v to its output, so it needs as many keys as queries, and CvT has fewer keys"
    if issubclass(cls, XCAttention):
        return "it compares channels over the tokens, so it needs as many keys as queries, and CvT has fewer keys"
    return None


CVT_ATTENTIONS: dict[str, type[ConvProjections]] = {
    name: type(f"Cvt{cls.__name__}", (ConvProjections, cls), {"__doc__": cls.__doc__, "__module__": __name__})
    for name, cls in ATTENTIONS.items()
    if not unsupported_reason(cls)
}


globals().update({cls.__name__: cls for cls in CVT_ATTENTIONS.values()})  # pickle finds a class by module and name


def cvt_attention_class(name: str) -> type[ConvProjections]:
    """The attention of that name, fed by convolutional projections."""
    base = attention_class(name)
    if name not in CVT_ATTENTIONS:
        supported = ", ".join(CVT_ATTENTIONS)
        raise ValueError(f"CvT does not support attention={name!r}: {unsupported_reason(base)}; supported: {supported}")
    return CVT_ATTENTIONS[name]


class ConvEmbedding(nn.Module):
    """Overlapping patches: map [B, C', height, width] -> tokens [B, N, C] and their grid."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, stride: int, padding: int, norm_layer: Callable):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=stride, padding=padding)
        self.norm = norm_layer(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Map [B, C', height, width] -> tokens [B, N, C], (rows, columns)."""
        x = self.proj(x)  # [B, C, rows, columns]
        return self.norm(x.flatten(2).transpose(1, 2)), (x.shape[2], x.shape[3])


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attn: ConvProjections, mlp: nn.Module, drop_path: float, norm_layer: Callable):
        super().__init__()
        self.norm1, self.attn, self.drop_path1 = norm_layer(attn.attn_dim), attn, DropPath(drop_path)
        self.norm2, self.mlp, self.drop_path2 = norm_layer(attn.attn_dim), mlp, DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens [B, N, C] on a grid -> tokens [B, N, C]."""
        x = x + self.drop_path1(self.attn(self.norm1(x), grid))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class Stage(nn.Module):
    """One resolution: map -> tokens on a coarser grid, with the class token first if the stage has one."""

    def __init__(self, patch_embed: ConvEmbedding, blocks: Sequence[Block], class_token_dim: int):
        super().__init__()
        self.patch_embed = patch_embed
        self.cls_token = nn.Parameter(torch.zeros(1, 1, class_token_dim)) if class_token_dim else None
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, checkpointing: bool = False) -> tuple[Tensor, Grid]:
        """Map [B, C', height, width] -> tokens [B, N, C], (rows, columns)."""
        x, grid = self.patch_embed(x)
        x = self.with_class_token(x)
        blocks = [partial(block, grid=grid) for block in self.blocks]
        if checkpointing:
            return checkpoint_seq(blocks, x), grid
        for block in blocks:
            x = block(x)
        return x, grid

    def with_class_token(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C] -> the same, behind the class token if the stage has one."""
        if self.cls_token is None:
            return x
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)  # [B, 1 + N, C]


class Cvt(nn.Module):
    """Images of any size -> logits: stages of convolutional token embeddings and attention with strided keys.

    The last stage has a class token. There are no position embeddings: the convolutions encode positions.

    Args:
        global_pool: "token" reads the class token, "avg" the mean of the others, "" classifies every token.
        embed_dims, depths, num_heads, patch_sizes, strides, paddings: One number per stage.
        kv_stride: Stride of the projections to keys and values; 2 keeps a quarter of the tokens.
        drop_rate, proj_drop_rate, drop_path_rate: Dropout before the head, after the projections, and of whole
            branches, growing from 0 at the first block to the rate given at the last.
        attention: Name of a registered attention; "softmax" is CvT itself.
        attention_options: Options of that attention for all stages, or a sequence with one mapping per stage (SimA's
            `token_ref` differs between stages).
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dims: Sequence[int] = (64, 192, 384),
        depths: Sequence[int] = (1, 2, 10),
        num_heads: Sequence[int] = (1, 3, 6),
        patch_sizes: Sequence[int] = (7, 3, 3),
        strides: Sequence[int] = (4, 2, 2),
        paddings: Sequence[int] = (2, 1, 1),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        kv_stride: int = 2,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: Callable[..., nn.Module] = nn.LayerNorm,
        act_layer: type[nn.Module] = nn.GELU,
        attention: str = "sima",
        attention_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        count = len(embed_dims)
        if attention_options is None or isinstance(attention_options, Mapping):
            attention_options = [attention_options or {}] * count
        per_stage = {"depths": depths, "num_heads": num_heads, "attention_options": attention_options}
        per_stage |= {"patch_sizes": patch_sizes, "strides": strides, "paddings": paddings}
        for name, values in per_stage.items():
            if len(values) != count:
                raise ValueError(f"{name} must have one entry for each of the {count} embed_dims, got {values}")
        attn_layer = cvt_attention_class(attention)
        rates: Iterator[Any] = iter(calculate_drop_path_rates(drop_path_rate, sum(depths)))
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.num_prefix_tokens = 1
        self.grad_checkpointing = False
        self.stages = nn.ModuleList()
        self.feature_info: list[dict[str, Any]] = []
        width, reduction = in_chans, 1
        for i, dim in enumerate(embed_dims):
            prefix = self.num_prefix_tokens if i == count - 1 else 0
            embed = ConvEmbedding(width, dim, patch_sizes[i], strides[i], paddings[i], norm_layer)
            blocks = []
            for _ in range(depths[i]):
                attn = attn_layer(
                    dim,
                    num_heads[i],
                    qkv_bias=qkv_bias,
                    kv_stride=kv_stride,
                    num_prefix_tokens=prefix,
                    proj_drop=proj_drop_rate,
                    **attention_options[i],
                )
                mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop_rate)
                blocks.append(Block(attn, mlp, next(rates), norm_layer))
            self.stages.append(Stage(embed, blocks, class_token_dim=dim if prefix else 0))
            width, reduction = dim, reduction * strides[i]
            self.feature_info.append({"num_chs": dim, "reduction": reduction, "module": f"stages.{i}"})
        self.norm = norm_layer(self.num_features)
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)
        self.apply(init_weights)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, in_chans, height, width] -> logits [B, K]."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Images [B, in_chans, height, width] -> normalized tokens of the last stage [B, N, C], class token first."""
        return self.norm(self.run_stages(x, len(self.stages))[-1][0])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens [B, N, C] -> logits [B, K], or the features [B, C] that the classifier reads."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def pool(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C] -> features [B, C], or the tokens themselves without pooling."""
        return global_pool_nlc(x, self.global_pool, self.num_prefix_tokens)

    def run_stages(self, x: Tensor, count: int) -> list[tuple[Tensor, Grid]]:
        """Images -> tokens [B, N, C] and grid of each of the first stages."""
        outputs = []
        for stage in self.stages[:count]:
            tokens, grid = stage(x, self.grad_checkpointing)
            outputs.append((tokens, grid))
            x = to_map(tokens[:, -grid[0] * grid[1] :], grid)  # [B, C, rows, columns]
        return outputs

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Images -> (the output of `forward_features`, maps [B, C, rows, columns] of the stages in `indices`).

        Args:
            x: Images [B, in_chans, height, width].
            indices: The last n stages if an int, all if None.
            norm: Apply the final norm to the last stage's map, the only one it fits.
            stop_early: Skip the stages after the last one in `indices`. If any is skipped, the tokens returned are
                those of the last stage that ran, without the final norm.
            output_fmt: "NCHW", or "NLC" for tokens [B, rows * columns, C]; both without the class token.
            intermediates_only: Return only the list of maps.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        wanted, last = feature_take_indices(len(self.stages), indices)
        outputs = self.run_stages(x, last + 1 if stop_early else len(self.stages))
        end = outputs[-1][0]
        final = self.norm(end) if len(outputs) == len(self.stages) else end
        intermediates = []
        for i, (tokens, grid) in enumerate(outputs):
            if i in wanted:
                tokens = final if norm and i == len(self.stages) - 1 else tokens
                tokens = tokens[:, -grid[0] * grid[1] :]
                intermediates.append(to_map(tokens, grid).contiguous() if output_fmt == "NCHW" else tokens)
        return intermediates if intermediates_only else (final, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last one in `indices`; returns the indices as a list."""
        wanted, last = feature_take_indices(len(self.stages), indices)
        if prune_norm or last + 1 < len(self.stages):  # the norm fits only the last stage
            self.norm = nn.Identity()
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0, "")
        return wanted

    def get_classifier(self) -> nn.Module:
        """The classification layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by one for `num_classes` classes (0: no head) and, if given, the pooling."""
        if global_pool is not None:
            if global_pool not in POOLS:
                raise ValueError(f"global_pool must be one of {', '.join(map(repr, POOLS))}, got {global_pool!r}")
            self.global_pool = global_pool
        self.num_classes = num_classes
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head = head.to(next(self.parameters()))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass, to save memory.

        The BatchNorms then see every batch twice, so their running statistics move faster.
        """
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers must not decay."""
        return {name for name, _ in self.named_parameters() if name.endswith("cls_token")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's patterns that order the parameters by depth, for layer-wise learning rates."""
        by_block = [
            (r"^stages\.(\d+)\.(?:patch_embed|cls_token)", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        return {"stem": r"^stages\.0\.patch_embed", "blocks": r"^stages\.(\d+)" if coarse else by_block}


def init_weights(module: nn.Module) -> None:
    """CvT's initial values: Linear layers and class token normal with deviation 0.02, convolutions as in torch."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Stage) and module.cls_token is not None:
        nn.init.trunc_normal_(module.cls_token, std=0.02)


# Modules of transformers' CvT -> ours; {} stands for the number of a stage, then of a block.
_STAGE, _BLOCK = "cvt.encoder.stages.{}", "cvt.encoder.stages.{}.layers.{}"
_FROM_TRANSFORMERS = {
    "layernorm": "norm",
    "classifier": "head",
    _STAGE: "stages.{}",  # its cls_token
    f"{_STAGE}.embedding.convolution_embeddings.projection": "stages.{}.patch_embed.proj",
    f"{_STAGE}.embedding.convolution_embeddings.normalization": "stages.{}.patch_embed.norm",
    f"{_BLOCK}.layernorm_before": "stages.{}.blocks.{}.norm1",
    f"{_BLOCK}.layernorm_after": "stages.{}.blocks.{}.norm2",
    f"{_BLOCK}.attention.output.dense": "stages.{}.blocks.{}.attn.proj",
    f"{_BLOCK}.intermediate.dense": "stages.{}.blocks.{}.mlp.fc1",
    f"{_BLOCK}.output.dense": "stages.{}.blocks.{}.mlp.fc2",
}
for _name in ("query", "key", "value"):
    _theirs, _ours = f"{_BLOCK}.attention.attention", "stages.{}.blocks.{}.attn"
    _conv = f"{_theirs}.convolution_projection_{_name}.convolution_projection"
    _FROM_TRANSFORMERS[f"{_conv}.convolution"] = f"{_ours}.conv_proj_{_name[0]}.conv"
    _FROM_TRANSFORMERS[f"{_conv}.normalization"] = f"{_ours}.conv_proj_{_name[0]}.bn"
    _FROM_TRANSFORMERS[f"{_theirs}.projection_{_name}"] = f"{_ours}.proj_{_name[0]}"


def from_transformers_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of transformers' CvtForImageClassification under our names; raises if a key is unknown."""
    ours, unknown = {}, []
    for key, value in state_dict.items():
        module, _, leaf = key.rpartition(".")
        name = _FROM_TRANSFORMERS.get(re.sub(r"\d+", "{}", module))
        if name is None:
            unknown.append(key)
        else:
            ours[f"{name.format(*re.findall(r'[0-9]+', module))}.{leaf}"] = value
    if unknown:
        raise ValueError(f"not the weights of CvtForImageClassification; unknown keys: {', '.join(unknown)}")
    return ours


TRAINED_TOKENS = (56 * 56, 28 * 28, 14 * 14 + 1)  # per stage at 224 px, with the class token


def build_cvt(name: str, *, token_ref: str | None = None, **kwargs) -> Cvt:
    """A CvT of any input size.

    `token_ref` None is the paper; "train" compensates for image sizes other than the training size. Other arguments
    are those of `build_model` and Cvt.
    """
    if token_ref is not None:
        if token_ref != "train" or kwargs.get("attention", "sima") != "sima" or kwargs.get("attention_options"):
            raise ValueError(
                f"token_ref must be None or 'train', with SimA attention and no attention_options, got {token_ref!r}; "
                "otherwise use attention_options=[{'token_ref': ...}, ...] with one entry per stage"
            )
        kwargs["attention_options"] = [{"token_ref": tokens} for tokens in TRAINED_TOKENS]
    return build_model(Cvt, name, **kwargs)


register_family(__name__, CVT, build_cvt, first_conv="stages.0.patch_embed.proj")
