"""relu2 with more features than channels, by a learned map of queries and keys.

Shapes: B batch, H heads, N tokens, D channels per head, F features per head.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.nn.baselines.feature_maps import feature_cost
from sima_attn.nn.relu2 import Relu2Attention
from sima_attn.ops.cost import AttentionShape, Cost


class FeatureMap(nn.Module):
    """x [B, H, N, D] -> x W + b [B, H, N, F], with W [D, F] and b [F] of each head.

    W starts with columns of [1, -1, R, -R, ...], R random rotations: with relu after it, every direction of x is seen
    from both sides. b starts at zero.

    Args:
        device, dtype: Of both.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_heads, 1, features, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initial values."""
        nn.init.zeros_(self.bias)
        D = self.weight.shape[1]
        for i, part in enumerate(self.weight.split(2 * D, dim=2)):
            for head in part:
                turn = head.new_empty(D, D, dtype=torch.float32)
                nn.init.orthogonal_(turn) if i else nn.init.eye_(turn)
                head.copy_(torch.cat([turn, -turn], dim=1)[:, : head.shape[1]])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype) + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        H, D, F = self.weight.shape
        return f"num_heads={H}, head_dim={D}, features={F}"


class Relu2WideAttention(Relu2Attention):
    """relu2 on q W_q + b_q and k W_k + b_k, with F = expansion * D features per head. No exp(), linear in the tokens.

    A linear attention has a matrix of weights of rank F at most. With F = D it cannot follow the softmax of a trained
    model as closely: of the exp-free attentions that were measured this one comes closest (docs/linearize.md). The
    state per head has F x D numbers, and the two maps add 2 F C weights.

    Args:
        args, kwargs: Arguments of `Relu2Attention`.
        expansion: Features per channel of a head.
    """

    def __init__(self, dim: int, num_heads: int = 8, *args, expansion: int = 4, **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        if not isinstance(expansion, int) or expansion < 1:
            raise ValueError(f"expansion must be a whole number from 1 on, got {expansion!r}")
        factory: dict[str, Any] = {"device": self.proj.weight.device, "dtype": self.proj.weight.dtype}
        self.expansion = expansion
        self.q_map = FeatureMap(num_heads, self.head_dim, expansion * self.head_dim, **factory)
        self.k_map = FeatureMap(num_heads, self.head_dim, expansion * self.head_dim, **factory)

    def cost(self, shape: AttentionShape) -> Cost:
        F = self.expansion * self.head_dim
        maps = shape.heads * (shape.N + shape.M) * shape.D * F
        return self.with_local_cost(feature_cost(shape, F, self.order, exps=0, macs=maps))
