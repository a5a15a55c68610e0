"""The cost of an attention, computed from its shape: multiplications, exp() calls, memory.

`Cost` is used to choose the product order, in the audit and in every table. SimA's counts are in this module; the
other attentions have theirs in their own files.

    MACs     multiply-adds in matrix products (half of what torch.utils.flop_counter reports)
    exps     numbers that an exp-like function (exp, softmax, ELU, GELU ...) is evaluated on
    scratch  intermediate numbers between q, k, v and o that are stored, including norms and normalizers
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """The shape of q [B, H, N, D], k [B, H, M, D] and v [B, H, M, Dv]; M and Dv default to N and D."""

    B: int
    H: int
    N: int
    D: int
    M: int = 0
    Dv: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "M", self.M or self.N)
        object.__setattr__(self, "Dv", self.Dv or self.D)
        if min(self.B, self.H, self.N, self.M, self.D, self.Dv) < 1:
            raise ValueError(f"every size of an attention must be at least 1, got {self}")

    @property
    def heads(self) -> int:
        """Heads of the whole batch: B * H."""
        return self.B * self.H

    @property
    def inputs_and_output(self) -> int:
        """Numbers in q, k, v and o together."""
        return self.heads * (self.N * self.D + self.M * self.D + self.M * self.Dv + self.N * self.Dv)


@dataclass(frozen=True)
class Cost:
    """The counts of one attention core at one shape."""

    shape: AttentionShape
    macs: int
    exps: int
    scratch: int
    order: str | None = None  # of the products, where there is a choice


def product_macs(order: str, N: int, M: int, D: int, Dv: int) -> int:
    """MACs of (Q K^T) V ("qk") or Q (K^T V) ("kv") for one head."""
    return N * M * (D + Dv) if order == "qk" else D * Dv * (N + M)


def choose_order(N: int, M: int, D: int, Dv: int) -> str:
    """The cheaper order of Q K^T V: "qk" where N * M * (D + Dv) < D * Dv * (N + M), else "kv".

    For self-attention with Dv = D this is the paper's rule: "qk" where N < D.
    """
    return "qk" if N * M * (D + Dv) < D * Dv * (N + M) else "kv"


def resolve_order(order: str, N: int, M: int, D: int, Dv: int) -> str:
    return choose_order(N, M, D, Dv) if order == "auto" else order


def sima_cost(shape: AttentionShape, order: str = "auto") -> Cost:
    """SimA: two products, no exp(), and in "kv" order D * Dv + 2 D numbers of scratch per head."""
    N, M, D, Dv = shape.N, shape.M, shape.D, shape.Dv
    order = resolve_order(order, N, M, D, Dv)
    norms = 2 * D
    between = D * Dv if order == "kv" else N * M
    return Cost(
        shape,
        macs=shape.heads * product_macs(order, N, M, D, Dv),
        exps=0,
        scratch=shape.heads * (between + norms),
        order=order,
    )
