"""Self-attentions on a tile of the token grid, from given sums over all tokens.

An attention that is linear in the tokens needs the other tokens only for its sums. A convolution of v needs one token
more on each side of a tile.

To add an attention: a subclass of `TiledAttention`, and one line in `TILED`.

Shapes: H heads, n tokens of a tile and its halo, D channels per head, F features, C = H * D.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.nn import Relu2Attention, SimAttention, SimLocalAttention, SimRopeAttention
from sima_attn.nn.attention import normed
from sima_attn.nn.baselines.feature_maps import FeatureMapAttention
from sima_attn.nn.grid import TokenLayout
from sima_attn.nn.rotation import GridPart
from sima_attn.ops.eager import compute_dtype, without_autocast
from sima_attn.ops.streaming import SimaAccumulator

LOCAL_HALO = 1  # tokens that the convolution of v sees on each side
Q, V = 0, 2  # places in the packed projection


class Sums(Protocol):
    """Sums over tokens; those of `SimaAccumulator` and of `FeatureSums`. Attributes that are tensors are saved."""

    def add_keys(self, k: Tensor, v: Tensor) -> None:
        """Add keys and their values [1, H, n, D]."""

    def add_queries(self, q: Tensor) -> None:
        """Add queries [1, H, n, D]."""

    def attend(self, q: Tensor) -> Tensor:
        """The output [1, H, n, D] for queries, once the sums are complete."""


class FeatureSums:
    """The sums S and z of an attention with a feature map, of all keys."""

    def __init__(self, attention: FeatureMapAttention) -> None:
        self.attention = attention
        self.values = torch.zeros(())  # S, the sum of phi(k) v^T [1, H, F, D]
        self.weights = torch.zeros(())  # z, the sum of phi(k) [1, H, F]

    def add_keys(self, k: Tensor, v: Tensor) -> None:
        """Add keys and their values [1, H, n, D]."""
        work = compute_dtype(k.dtype)
        with without_autocast(k):
            phi = self.attention.key_features(k.to(work))  # [1, H, n, F]
            self.values = self.values + phi.mT @ v.to(work)
            self.weights = self.weights + phi.sum(2)

    def add_queries(self, q: Tensor) -> None:
        """Nothing: the output for a query does not depend on the other queries."""

    def attend(self, q: Tensor) -> Tensor:
        """The output [1, H, n, D] for queries, once all keys are added."""
        with without_autocast(q):
            phi = self.attention.query_features(q.to(self.values.dtype))
            weights = phi @ self.weights[..., None]  # [1, H, n, 1]
            return (phi @ self.values / self.attention.divisor(weights)).to(q.dtype)


class TiledAttention(nn.Module, ABC):
    """In the place of an attention in a block: its output on a tile.

    Attributes:
        halo: Tokens around a tile on which its output depends, apart from the sums.
        sums: Over all tokens, complete. Set before each call.
        part: The tokens of the call: a tile with its halo, or prefix tokens. Set before each call.
    """

    halo = 0
    sums: Sums
    part: GridPart

    def __init__(self, path: str, attention: Any) -> None:
        super().__init__()
        self.attention = attention

    @abstractmethod
    def new_sums(self) -> Sums:
        """Sums over no tokens."""

    def add(self, sums: Sums, x: Tensor) -> None:
        """Add tokens [1, n, C] to sums."""
        q, k, v = self.split(x)
        sums.add_queries(q)
        sums.add_keys(k, v)

    def normalized(self, sums: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [1, H, n, D] of tokens [1, n, C], as the attention normalizes them with complete sums."""
        q, k, _ = self.split(x)
        return q, k

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [1, n, C] -> the q, k and v [1, H, n, D] that the sums take."""
        return self.attention.split(x)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [1, n, C] -> tokens [1, n, C]; a block of timm passes the masks, which are None and False."""
        return self.attention.join(self.core(x))

    def core(self, x: Tensor) -> Tensor:
        """Tokens [1, n, C] -> o [1, H, n, D]."""
        return self.sums.attend(self.queries(x))

    def queries(self, x: Tensor) -> Tensor:
        """Tokens [1, n, C] -> the q [1, H, n, D] of `split` alone."""
        return normed(self.attention.q_norm, self.project(x, Q))

    def project(self, x: Tensor, part: int) -> Tensor:
        """q or v [1, H, n, D], before a norm: a third of the packed projection."""
        attention, qkv, C = self.attention, self.attention.qkv, self.attention.attn_dim
        if type(qkv) is not nn.Linear:  # such as a quantized one
            return attention.project(x)[:, :, part].transpose(1, 2)
        rows = slice(part * C, (part + 1) * C)
        bias = None if qkv.bias is None else qkv.bias[rows]
        return F.linear(x, qkv.weight[rows], bias).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)

    def local_values(self, x: Tensor) -> Tensor:
        """The convolution of v [1, H, n, D], for attentions that have one; zero for prefix tokens."""
        v = self.project(x, V)
        layout: TokenLayout = self.part.layout
        return self.attention.local.convolve(v, layout) if layout.rows else torch.zeros_like(v)


class TiledSima(TiledAttention):
    """SimA with l1 norms over the tokens of this process."""

    def __init__(self, path: str, attention: SimAttention) -> None:
        super().__init__(path, attention)
        if attention.norm_over_tokens != "l1":
            raise ValueError(
                f"{path} has norm={attention.norm_over_tokens!r}: only norm='l1' runs tile by tile; train the model "
                "with it"
            )
        if attention.group is not None:
            raise ValueError(f"{path} has its tokens split over a group of processes; set its `group` to None")

    def new_sums(self) -> SimaAccumulator:
        """Sums over no tokens."""
        return SimaAccumulator(token_ref=self.attention.token_ref, eps=self.attention.eps)

    def normalized(self, sums: SimaAccumulator, x: Tensor) -> tuple[Tensor, Tensor]:
        """q-hat and k-hat [1, H, n, D]."""
        assert sums.q_norm is not None
        assert sums.k_norm is not None
        q, k = super().normalized(sums, x)
        q_norm, k_norm = (norm.clamp_min(sums.eps)[:, :, None] for norm in (sums.q_norm, sums.k_norm))
        return q.to(q_norm.dtype) / q_norm, k.to(k_norm.dtype) / k_norm


class TiledSimaLocal(TiledSima):
    """SimA with a gain per head and a convolution of v."""

    halo = LOCAL_HALO

    def core(self, x: Tensor) -> Tensor:
        """Tokens [1, n, C] -> o [1, H, n, D]."""
        o = super().core(x)
        return torch.addcmul(self.local_values(x), o, self.attention.gain.to(o.dtype)[:, None, None])


class TiledSimaRope(TiledSima):
    """SimA of rotated queries and keys, and a convolution of v."""

    halo = LOCAL_HALO

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [1, n, C] -> rotated q and k, and v [1, H, n, D]."""
        q, k, v = super().split(x)
        return self.attention.rotation(q), self.attention.rotation(k), v

    def queries(self, x: Tensor) -> Tensor:
        """Tokens [1, n, C] -> rotated q [1, H, n, D]."""
        return self.attention.rotation(super().queries(x))

    def core(self, x: Tensor) -> Tensor:
        """Tokens [1, n, C] -> o [1, H, n, D]."""
        return super().core(x) + self.local_values(x)


class TiledRelu2(TiledAttention):
    """Squared relu features, which may rotate queries and keys first, and a convolution of v."""

    halo = LOCAL_HALO

    def new_sums(self) -> FeatureSums:
        """Sums over no tokens."""
        return FeatureSums(self.attention)

    def core(self, x: Tensor) -> Tensor:
        """Tokens [1, n, C] -> o [1, H, n, D]."""
        return super().core(x) + self.local_values(x)


# By what they compute: subclasses with other defaults share it, and those that compute something else do not.
TILED: dict[Any, type[TiledAttention]] = {
    SimAttention.core: TiledSima,
    SimLocalAttention.core: TiledSimaLocal,
    SimRopeAttention.core: TiledSimaRope,
    Relu2Attention.core: TiledRelu2,
}


def tiled_attention(path: str, attention: nn.Module) -> TiledAttention:
    """An attention on tiles; raises for one that cannot run tile by tile. `path` is its place in the model."""
    kind = TILED.get(getattr(type(attention), "core", None))
    if kind is None:
        raise ValueError(
            f"{path} is {type(attention).__name__}, which cannot run tile by tile: supported are sima, sima_local, "
            "sima_rope, relu2, relu2_wide and relu2_rope; `sima linearize` makes such a model of a pretrained one, and "
            "`sima_attn.convert` one that is to be trained"
        )
    return kind(path, attention)
