"""Cross attention: tokens attend to another set of tokens, for decoders and multi-scale models.

Shapes: B batch, H heads, N query tokens, M context tokens, D channels per head, C = H * D.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sima_attn.nn.attention import check_tokens, split_heads
from sima_attn.nn.leaf_module import LeafModule
from sima_attn.ops.api import check_options, sima_attention

if TYPE_CHECKING:
    from sima_attn.ops.sequence_parallel import Group


class SimCrossAttention(LeafModule):
    """SimA cross attention: tokens [B, N, C] and context [B, M, context_dim] -> tokens [B, N, C].

    |Q|_1 runs over the N query tokens, |K|_1 over the M context tokens. The output of one query therefore depends on
    the other queries of the same call; `query_mask` keeps padding out of that sum. With a `group` of processes, tokens
    and context are both split over them, see `sima_attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        context_dim: int | None = None,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        order: str = "auto",
        token_ref: float | None = None,
        eps: float = 1e-12,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: "Group | None" = None,
    ) -> None:
        super().__init__()
        check_options(order=order, token_ref=token_ref, eps=eps)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = split_heads(dim, num_heads)
        self.order, self.token_ref, self.eps, self.group = order, token_ref, eps, group
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.kv = nn.Linear(context_dim or dim, 2 * dim, bias=qkv_bias, **factory)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        *,
        query_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Tokens [B, N, C], context [B, M, context_dim] -> tokens [B, N, C]; masks are True for real tokens."""
        check_tokens(x, self.q.in_features)
        check_tokens(context, self.kv.in_features)
        q = self.q(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # [B, H, N, D]
        kv = self.kv(context).unflatten(-1, (2, self.num_heads, self.head_dim))  # [B, M, 2, H, D]
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, M, D] each
        masks: dict[str, Any] = {"query_mask": query_mask, "key_mask": context_mask}
        o = sima_attention(
            q, k, v, order=self.order, token_ref=self.token_ref, eps=self.eps, group=self.group, **masks
        )  # [B, H, N, D]
        return self.proj_drop(self.proj(o.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        return f"dim={self.num_heads * self.head_dim}, num_heads={self.num_heads}, order={self.order!r}"
