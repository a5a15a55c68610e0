"""A drop-in for torch.nn.MultiheadAttention: its parameters, its call, SimA inside.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, C = H * D.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.nn.attention import split_heads
from sima_attn.nn.leaf_module import LeafModule
from sima_attn.ops.api import check_options, sima_attention
from sima_attn.ops.reference import sima_matrix_reference

if TYPE_CHECKING:
    from sima_attn.ops.sequence_parallel import Group


class SimMultiheadAttention(LeafModule):
    """SimA with the constructor, state dict and call of `torch.nn.MultiheadAttention`.

    `key_padding_mask` is exact: in self-attention (query and key the same tensor, or equal views of one) it leaves
    the padding out of both norms; in cross attention it masks the keys. torch.compile does not see where views lie:
    inside it, pass one tensor as query and key. What SimA has no place for is refused. With a `group` of processes,
    queries and keys are split over them, see `sima_attention`.
    """

    # torch.nn.TransformerEncoderLayer reads these. The last one, False, keeps its fused softmax path off:
    # in eval mode it would take the weights from here and never call forward.
    batch_first: bool
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        order: str = "auto",
        token_ref: float | None = None,
        eps: float = 1e-12,
        group: "Group | None" = None,
    ) -> None:
        super().__init__()
        if dropout:
            raise ValueError(f"dropout must be 0, got {dropout}: SimA has no attention matrix to drop entries from")
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn must be False: an extra key would enter |K|_1")
        if kdim not in (None, embed_dim) or vdim not in (None, embed_dim):
            raise ValueError(
                f"kdim and vdim must be embed_dim={embed_dim}, got {kdim} and {vdim}; for another width use "
                "SimCrossAttention(context_dim=...)"
            )
        check_options(order=order, token_ref=token_ref, eps=eps)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = split_heads(embed_dim, num_heads)
        self.batch_first = batch_first
        self.order, self.token_ref, self.eps, self.group = order, token_ref, eps, group
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
        if bias:
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, **factory))
        else:
            self.register_parameter("in_proj_bias", None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Output like query, and the weights Q-hat K-hat^T (signed, not summing to 1) if `need_weights`.

        The weights are [B, N, M], or [B, H, N, M] without `average_attn_weights`. They are computed beside
        the output, at quadratic cost: pass need_weights=False where they are not looked at.
        """
        if attn_mask is not None or is_causal:
            raise ValueError(
                "attn_mask and is_causal are not supported: SimA cannot mask pairs of tokens; for padding, pass "
                "key_padding_mask"
            )
        if need_weights and self.group is not None:
            raise ValueError("need_weights must be False with a group: no process holds all queries and keys")
        same_tokens = _are_same_tokens(query, key)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)  # [B, N, C]

        q, k, v = self._project(query, key, value)  # [B, H, N, D], [B, H, M, D] twice
        key_mask = None if key_padding_mask is None else keep_mask(key_padding_mask)
        query_mask = key_mask if same_tokens else None
        masks: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask}
        o = sima_attention(
            q, k, v, order=self.order, token_ref=self.token_ref, eps=self.eps, group=self.group, **masks
        )  # [B, H, N, D]
        out = self.out_proj(o.transpose(1, 2).flatten(2))  # [B, N, C]

        weights = None
        if need_weights:
            weights = sima_matrix_reference(q, k, token_ref=self.token_ref, eps=self.eps, **masks)  # [B, H, N, M]
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(tokens, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for tokens, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _are_same_tokens(query: Tensor, key: Tensor) -> bool:
    """Whether two tensors are the same view of one tensor: x[1] creates a new object each time."""
    if query is key or torch.compiler.is_compiling():
        return query is key
    base, other = (x if x._base is None else x._base for x in (query, key))
    places = [(x.storage_offset(), x.shape, x.stride()) for x in (query, key)]
    return base is other and places[0] == places[1]


def keep_mask(key_padding_mask: Tensor) -> Tensor:
    """torch's padding mask (True or -inf where there is padding) -> ours (True where there is a token)."""
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    if not key_padding_mask.is_floating_point():
        raise ValueError(f"key_padding_mask must be bool, or float with 0 and -inf, got {key_padding_mask.dtype}")
    keep = key_padding_mask == 0
    if not torch.compiler.is_compiling() and not bool((keep | (key_padding_mask == float("-inf"))).all()):
        raise ValueError("a float key_padding_mask may only hold 0 (keep) and -inf (padding): SimA adds no bias")
    return keep
