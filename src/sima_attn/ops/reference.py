"""The equations of the paper, as printed: every faster form is tested against them.

    Q-hat^c = Q^c / |Q^c|_1        K-hat^c = K^c / |K^c|_1        O = Q-hat K-hat^T V

The norm of a channel c runs over the tokens. Nothing here is fast: the normalized tensors and the N x M matrix are
all stored. Run it in float64 to get a reference of full precision.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_ORDERS = {"l1": 1.0, "l2": 2.0}


def normalize_tokens(x: Tensor, norm: str = "l1", eps: float = 1e-12) -> Tensor:
    """Each channel of x [B, H, N, D] divided by its norm over the tokens; "none" leaves x as it is."""
    if norm == "none":
        return x
    return F.normalize(x, p=NORM_ORDERS[norm], dim=-2, eps=eps)


def sima_matrix_reference(
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    norm: str = "l1",
    token_ref: float | None = None,
    eps: float = 1e-12,
) -> Tensor:
    """The attention matrix Q-hat K-hat^T [B, H, N, M]: signed, its entries in [-D, D].

    A masked token is set to zero before the norms. Half precision is computed in float32 and rounded once, at the end.
    `token_ref` multiplies by N / token_ref, where N is the number of query tokens that are not padding.
    """
    B, _, N, _ = q.shape
    if query_mask is not None:
        q = q.masked_fill(~query_mask[:, None, :, None], 0)
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    dtype, work = q.dtype, torch.promote_types(q.dtype, torch.float32)  # eps is 0 in float16
    q, k = q.to(work), k.to(work)
    attention = normalize_tokens(q, norm, eps) @ normalize_tokens(k, norm, eps).mT  # [B, H, N, M]
    if token_ref is not None:
        tokens = q.new_full((B,), N) if query_mask is None else query_mask.sum(-1, dtype=work)
        attention = attention * (tokens / token_ref)[:, None, None, None]
    return attention.to(dtype)


def sima_reference(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """O = Q-hat K-hat^T V [B, H, N, Dv]; options as in `sima_matrix_reference`."""
    return sima_matrix_reference(q, k, **options) @ v


def algorithm_1(q: Tensor, k: Tensor, v: Tensor, *, order: str | None = None) -> Tensor:
    """Algorithm 1 of the paper as its authors run it: normalize, then multiply in the cheaper order.

    This is the "paper" row of the benchmarks. The order depends on the head dimension, as in the authors' code;
    `order` fixes it, as their timing protocols do.
    """
    q, k = normalize_tokens(q), normalize_tokens(k)
    if order == "qk" or (order is None and q.shape[-2] < q.shape[-1]):
        return (q @ k.mT) @ v
    return q @ (k.mT @ v)
