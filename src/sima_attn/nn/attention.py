"""Attention modules, tokens -> tokens: the base class of all, and SimA.

Shapes: B batch, H heads, N tokens, D channels per head, C = H * D.
"""

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from sima_attn._errors import unknown_name
from sima_attn.nn.leaf_module import LeafModule
from sima_attn.ops.api import check_mask, check_options, plan, sima_attention, sima_attention_qkv
from sima_attn.ops.cost import AttentionShape, Cost, sima_cost
from sima_attn.ops.eager import NORMS, compute_dtype, sima_eager, without_autocast
from sima_attn.ops.reference import sima_matrix_reference

if TYPE_CHECKING:
    from sima_attn.ops.sequence_parallel import Group


class Attention(LeafModule, ABC):
    """Self-attention qkv -> core(q, k, v) -> proj, on tokens [B, N, C].

    A subclass defines `core`, the equivalent `matrix` and the `cost`; with one line in the registry this is a new
    attention. Constructor, parameter names and forward are those of timm's Attention, so that
    `timm.create_model(..., attn_layer=...)` takes the class and checkpoints of other libraries load.
    """

    exps_in_paper: ClassVar[str | None] = None  # exp() count in the paper's tables, if they have one
    equivariant: ClassVar[bool] = True  # permuting the tokens permutes the output
    needs_num_tokens: ClassVar[bool] = False  # the constructor takes num_tokens, and forward only that many
    needs_grid: ClassVar[bool] = False  # the tokens must form a grid, so no class token
    has_local_branch: ClassVar[bool] = False  # o = A v + local(v), so the keys must be the tokens of the queries
    ties_qk: ClassVar[bool] = False  # q and k share one projection
    can_drop_attention: ClassVar[bool] = False  # attn_drop has entries of an attention matrix to drop

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        head_dim = split_heads(dim, num_heads)
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("qk_norm and scale_norm need a norm_layer, e.g. norm_layer=torch.nn.LayerNorm")
        if attn_drop and not self.can_drop_attention:
            raise ValueError(
                f"{type(self).__name__} has no attention matrix to drop entries from: attn_drop must be 0, "
                f"got {attn_drop}; use proj_drop or drop_path instead"
            )
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.attn_dim = dim
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def norm(width: int, wanted: bool) -> nn.Module:
            return norm_layer(width, **factory) if wanted and norm_layer is not None else nn.Identity()

        self.qkv = nn.Linear(dim, (2 if self.ties_qk else 3) * dim, bias=qkv_bias, **factory)
        self.q_norm, self.k_norm = norm(head_dim, qk_norm), norm(head_dim, qk_norm)
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm(dim, scale_norm)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [B, N, C] -> tokens [B, N, C]."""
        self.refuse_pair_masks(attn_mask, is_causal)
        q, k, v = self.split(x)  # [B, H, N, D] each
        return self.join(self.core(q, k, v))

    def project(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C] -> packed q, k, v [B, N, 3, H, D], or [B, N, 2, H, D] where q and k share one projection."""
        check_tokens(x, self.attn_dim)
        B, N, _ = x.shape
        return self.qkv(x).view(B, N, 2 if self.ties_qk else 3, self.num_heads, self.head_dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, N, C] -> q, k, v [B, H, N, D], views of one packed tensor."""
        parts = self.project(x).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D] each
        if self.ties_qk:
            q = normed(self.q_norm, parts[0])
            return q, q, parts[1]
        q, k, v = parts
        return normed(self.q_norm, q), normed(self.k_norm, k), v

    def join(self, o: Tensor) -> Tensor:
        """Heads [B, H, N, D] -> tokens [B, N, C]."""
        return self.project_out(o.transpose(1, 2))

    def project_out(self, o: Tensor) -> Tensor:
        """[B, N, H, D] -> tokens [B, N, C]."""
        return self.proj_drop(self.proj(self.norm(o.flatten(2))))

    @abstractmethod
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [B, H, N, D] -> o [B, H, N, D], computed efficiently."""

    @abstractmethod
    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        """The weights A [B, H, N, M] with o = A v, by definition: slow, for tests and visualization."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output that `core` must equal."""
        return self.matrix(q, k) @ v

    @abstractmethod
    def cost(self, shape: AttentionShape) -> Cost:
        """MACs, exp() calls and scratch memory of `core` at a shape."""

    def refuse_pair_masks(self, attn_mask: Tensor | None, is_causal: bool) -> None:
        if attn_mask is not None or is_causal:
            given = "is_causal=True" if is_causal else "an attn_mask"
            raise ValueError(
                f"{type(self).__name__} does not support {given}: masks of token pairs need a softmax per row; "
                "use the attention 'softmax' for them"
            )

    def extra_repr(self) -> str:
        return f"dim={self.attn_dim}, num_heads={self.num_heads}"


def computed_in_float32(core):
    """Decorator of a `core`: computes half precision in float32 and rounds the result."""

    @functools.wraps(core)
    def wrapped(self: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype, work = q.dtype, compute_dtype(q.dtype)
        if dtype == work:
            return core(self, q, k, v)
        up = q.to(work)
        with without_autocast(q):
            return core(self, up, up if k is q else k.to(work), v.to(work)).to(dtype)

    return wrapped


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x) in the dtype of x. Under autocast a LayerNorm returns float32, but q and k need the dtype of v."""
    return norm(x).to(x.dtype)


def check_tokens(x: Tensor, dim: int) -> None:
    """Raise unless x is [B, N, dim]."""
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f"tokens must have shape [batch, tokens, {dim}], got {tuple(x.shape)}")


def split_heads(dim: int, num_heads: int) -> int:
    """Channels per head; the error lists the possible head counts."""
    if dim < 1 or num_heads < 1 or dim % num_heads:
        possible = [h for h in range(1, max(dim, 0) + 1) if dim % h == 0]
        raise ValueError(f"num_heads must divide dim={dim}, got {num_heads}; possible: {possible}")
    return dim // num_heads


class SimAttention(Attention):
    """SimA self-attention: no softmax, no exp(), linear in the tokens where that is cheaper.

        Q-hat^c = Q^c / |Q^c|_1,  K-hat^c = K^c / |K^c|_1 over the tokens,  O = Q-hat K-hat^T V

    Args:
        args, kwargs: Arguments of timm's attention.
        norm: "l1" is the paper; "l2" and "none" are its ablations.
        order: "auto" | "kv" | "qk", see `sima_attention`.
        token_ref: Number of tokens of the training size, see `sima_attention`. None is the paper.
        eps: Smallest value of a norm.
        group: The processes over which the tokens are split, see `sima_attention`. Only for norm="l1".
    """

    exps_in_paper: ClassVar[str | None] = "0"

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *args,
        norm: str = "l1",
        order: str = "auto",
        token_ref: float | None = None,
        eps: float = 1e-12,
        group: "Group | None" = None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        if norm not in NORMS:
            raise unknown_name("norm", norm, NORMS)
        check_options(order=order, token_ref=token_ref, eps=eps)
        self.norm_over_tokens = norm
        self.order = order
        self.token_ref = token_ref
        self.eps = eps
        self.group = group

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, token_mask: Tensor | None = None
    ) -> Tensor:
        """Tokens [B, N, C] -> tokens [B, N, C].

        `token_mask` [B, N] is True for real tokens; padding does not change their outputs.
        """
        self.refuse_pair_masks(attn_mask, is_causal)
        if self.can_stay_packed:
            qkv = self.project(x)  # [B, N, 3, H, D]
            o = sima_attention_qkv(
                qkv,
                token_mask=token_mask,
                order=self.order,
                token_ref=self.token_ref,
                eps=self.eps,
                group=self.group,
            )  # [B, N, H, D]
            return self.project_out(o)
        q, k, v = self.split(x)  # [B, H, N, D] each
        if token_mask is not None:
            check_mask("token_mask", token_mask, q)
        return self.join(self.core(q, k, v, token_mask))

    @property
    def can_stay_packed(self) -> bool:
        """True where q and k are not changed between the projection and the attention."""
        is_l1 = self.norm_over_tokens == "l1"
        return is_l1 and isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)

    def core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_mask: Tensor | None = None,
        key_mask: Tensor | None = None,  # for keys of other tokens than the queries, as in CvT
    ) -> Tensor:
        options: dict[str, Any] = {
            "key_mask": token_mask if key_mask is None else key_mask,
            "query_mask": token_mask,
            "token_ref": self.token_ref,
            "eps": self.eps,
        }
        if self.norm_over_tokens == "l1":
            return sima_attention(q, k, v, order=self.order, group=self.group, **options)
        if self.group is not None:
            raise ValueError(f"group supports norm='l1' only, got norm={self.norm_over_tokens!r}; omit group")
        order = plan(q, k, v, order=self.order).order
        return sima_eager(q, k, v, order=order, norm=self.norm_over_tokens, **options)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        return sima_matrix_reference(q, k, norm=self.norm_over_tokens, token_ref=self.token_ref, eps=self.eps)

    def cost(self, shape: AttentionShape) -> Cost:
        return sima_cost(shape, self.order)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, norm={self.norm_over_tokens!r}, order={self.order!r}, token_ref={self.token_ref}"
        )
