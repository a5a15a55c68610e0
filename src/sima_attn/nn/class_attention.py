"""Class attention: the class token attends to all tokens, and only it is updated.

Shapes: B batch, H heads, N tokens (the class token first), D channels per head, C = H * D.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sima_attn.nn.attention import check_tokens, split_heads
from sima_attn.nn.leaf_module import LeafModule
from sima_attn.ops.api import check_eps, check_qkv, check_token_ref, is_split
from sima_attn.ops.eager import compute_dtype, inverse_norm, token_gain, without_autocast

if TYPE_CHECKING:
    from sima_attn.ops.sequence_parallel import Group


class SimClassAttention(LeafModule):
    """SimA class attention: tokens [B, N, C] -> class token [B, 1, C].

        o = (q_0 diag(s)) K^T V,    s_c = 1 / (|Q^c|_1 |K^c|_1)

    Both norms run over all N tokens, including the class token, so the query of every token is computed although only
    the first is used. eps is 1e-6 as in the authors' class attention (1e-12 elsewhere). `token_ref` is as in
    `sima_attention`. Parameters are named as in timm's ClassAttn.

    With a `group` of processes, each holds the class token and its own part of the other tokens, and gets the new class
    token. The loss is the sum of the losses of the processes.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        token_ref: float | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: "Group | None" = None,
    ) -> None:
        super().__init__()
        check_token_ref(token_ref)
        check_eps(eps)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = split_heads(dim, num_heads)
        self.token_ref, self.eps, self.group = token_ref, eps, group
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=qkv_bias, **factory) for _ in range(3))
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C], the class token first -> the new class token [B, 1, C]."""
        check_tokens(x, self.num_heads * self.head_dim)
        B, N, _ = x.shape
        q, k, v = (
            layer(x).view(B, N, self.num_heads, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )  # [B, H, N, D] each
        o = self.core(q, k, v)  # [B, H, 1, D]
        return self.proj_drop(self.proj(o.transpose(1, 2).flatten(2)))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [B, H, N, D] of all tokens -> o [B, H, 1, D] of the first."""
        check_qkv(q, k, v)
        dtype, work = q.dtype, compute_dtype(q.dtype)
        q, k, v = q.to(work), k.to(work), v.to(work)
        with without_autocast(q):
            if self.group is not None and is_split(self.group):
                return self._core_of_split_tokens(q, k, v, self.group).to(dtype)
            s_q, s_k = inverse_norm(q, eps=self.eps), inverse_norm(k, eps=self.eps)  # [B, H, D] each
            if self.token_ref is not None:
                s_q = s_q * token_gain(q, None, self.token_ref)
            row = (q[:, :, :1] * s_q[:, :, None] * s_k[:, :, None]) @ k.mT  # [B, H, 1, N]
            return (self.attn_drop(row) @ v).to(dtype)

    def _core_of_split_tokens(self, q: Tensor, k: Tensor, v: Tensor, group: "Group") -> Tensor:
        from sima_attn.ops.sequence_parallel import attention_state, process_group

        v = v * self.attn_drop(torch.ones_like(v[..., :1]))  # the same as dropping entries of the row
        # The class token is on every process, but counts once: on the first.
        first = 0 if process_group(group).rank() == 0 else 1
        tokens = (t[:, :, first:] for t in (q, k, v))
        return q[:, :, :1] @ attention_state(*tokens, group=group, token_ref=self.token_ref, eps=self.eps)

    def extra_repr(self) -> str:
        sizes = f"dim={self.num_heads * self.head_dim}, num_heads={self.num_heads}"
        return f"{sizes}, token_ref={self.token_ref}, eps={self.eps:g}"
