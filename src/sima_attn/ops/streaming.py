"""SimA over more tokens than fit into memory: add tiles, keep D x Dv + 2 D numbers per head.

K^T V, |K|_1 and |Q|_1 are plain sums over tokens, so tiles can have any order and size, and partial sums from several
machines are added. Softmax attention has no such state: it needs all keys for every query.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sima_attn.ops.api import check_eps, check_mask, check_qkv, check_token_ref
from sima_attn.ops.eager import compute_dtype, drop_padding, l1_over_tokens, without_autocast


class SimaAccumulator:
    """SimA attention in two passes over token tiles, equal to `sima_attention` on all tokens.

    First pass: `add_keys(k, v)` and `add_queries(q)` for every tile, in any order.
    Second pass: `attend(q)` for every query tile.

        acc = SimaAccumulator()
        for q, k, v in tiles():
            acc.add_keys(k, v)
            acc.add_queries(q)
        for q, _, _ in tiles():
            write(acc.attend(q))
    """

    def __init__(self, *, token_ref: float | None = None, eps: float = 1e-12) -> None:
        check_token_ref(token_ref)
        check_eps(eps)
        self.token_ref = token_ref
        self.eps = eps
        self.kv: Tensor | None = None  # [B, H, D, Dv], the sum of k v^T
        self.k_norm: Tensor | None = None  # [B, H, D], the sum of |k|
        self.q_norm: Tensor | None = None  # [B, H, D], the sum of |q|
        self.queries: Tensor | None = None  # [B], query tokens seen, for token_ref

    def add_keys(self, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> None:
        """Add a tile of keys [B, H, m, D] with its values [B, H, m, Dv]."""
        check_qkv(k, k, v)
        if key_mask is not None:
            check_mask("key_mask", key_mask, k)
        self._check_same_shape("k", k, v.shape[-1])
        _, k, v = drop_padding(k, k, v, key_mask=key_mask, query_mask=None)
        k, v = k.to(compute_dtype(k.dtype)), v.to(compute_dtype(v.dtype))
        with without_autocast(k):
            self.kv = _sum(self.kv, k.mT @ v)
        self.k_norm = _sum(self.k_norm, l1_over_tokens(k))

    def add_queries(self, q: Tensor, query_mask: Tensor | None = None) -> None:
        """Add a tile of queries [B, H, n, D] to |Q|_1."""
        q = self._checked_queries(q, query_mask)
        B, _, n, _ = q.shape
        count = q.new_full((B,), n, dtype=torch.long) if query_mask is None else query_mask.sum(-1)
        self.q_norm = _sum(self.q_norm, l1_over_tokens(q.to(compute_dtype(q.dtype))))
        self.queries = _sum(self.queries, count)

    def merge(self, other: SimaAccumulator) -> None:
        """Add the sums of another accumulator for the same images, e.g. from another machine."""
        if (self.eps, self.token_ref) != (other.eps, other.token_ref):
            raise ValueError(
                f"accumulators must have the same eps and token_ref to be merged, got {(self.eps, self.token_ref)} "
                f"and {(other.eps, other.token_ref)}"
            )
        for name in ("kv", "k_norm", "q_norm", "queries"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine.shape != theirs.shape:
                raise ValueError(
                    f"accumulators must have the same images and heads to be merged: {name} has shapes "
                    f"{tuple(mine.shape)} and {tuple(theirs.shape)}"
                )
            setattr(self, name, theirs if mine is None else mine if theirs is None else mine + theirs)

    def attend(self, q: Tensor, query_mask: Tensor | None = None) -> Tensor:
        """The output [B, H, n, Dv] for a tile of queries that was passed to `add_queries`."""
        if self.kv is None or self.k_norm is None:
            raise ValueError("there are no keys yet: call add_keys(k, v) for every tile first")
        if self.q_norm is None or self.queries is None:
            raise ValueError("there are no queries yet: call add_queries(q) for every tile of queries first")
        q = self._checked_queries(q, query_mask)
        state = self.kv / self.k_norm.clamp_min(self.eps)[..., None] / self.q_norm.clamp_min(self.eps)[..., None]
        if self.token_ref is not None:
            state = state * (self.queries.to(state.dtype) / self.token_ref)[:, None, None, None]
        with without_autocast(q):
            return (q.to(state.dtype) @ state).to(q.dtype)

    def _checked_queries(self, q: Tensor, query_mask: Tensor | None) -> Tensor:
        """The queries with zeros for padding."""
        check_qkv(q, q, q)
        if query_mask is not None:
            check_mask("query_mask", query_mask, q)
        self._check_same_shape("q", q)
        return drop_padding(q, q, q, key_mask=None, query_mask=query_mask)[0]

    def _check_same_shape(self, name: str, x: Tensor, Dv: int | None = None) -> None:
        B, H, _, D = x.shape
        for seen in (self.k_norm, self.q_norm):
            if seen is not None and seen.shape != (B, H, D):
                raise ValueError(
                    f"this tile of {name} has (batch, heads, channels) = {(B, H, D)}, the tiles before it "
                    f"had {tuple(seen.shape)}; all tiles must come from the same images"
                )
        if Dv is not None and self.kv is not None and self.kv.shape[-1] != Dv:
            raise ValueError(f"this tile of v has {Dv} channels, the tiles before it had {self.kv.shape[-1]}")


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
