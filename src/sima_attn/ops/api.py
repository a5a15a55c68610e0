"""sima_attention: checks its arguments, chooses the order and the backend, and computes the output.

`sima_attention_qkv` is the same for the packed projection of self-attention, which the fused kernels read and
differentiate without a copy.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sima_attn._errors import unknown_name
from sima_attn.ops.cost import resolve_order
from sima_attn.ops.eager import sima_eager, sima_eager_qkv, trains_packed
from sima_attn.ops.prepared_calls import call_key, keep_call, prepared_call
from sima_attn.ops.triton_support import unsupported_reason
from sima_attn.ops.triton_tiles import order_on_gpu

if TYPE_CHECKING:
    from sima_attn.ops.sequence_parallel import Group

ORDERS = ("auto", "kv", "qk")
BACKENDS = ("auto", "eager", "triton")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# s = 1 / (|Q|_1 |K|_1) must stay finite in float32 when both norms are eps.
SMALLEST_EPS = 1e-18
LARGE = 2**31


class Plan(NamedTuple):
    """How a call of `sima_attention` is computed: the order of the products and the backend."""

    order: str
    backend: str


_plan_callback: ContextVar[Callable[[Plan], object] | None] = ContextVar("plan_callback", default=None)


@contextmanager
def plan_callback(callback: Callable[[Plan], object]) -> Iterator[None]:
    """Call `callback` with each plan that this thread makes within the context, e.g. to report the orders of a model.

    Plans that torch.compile or torch.export makes while it traces are not reported, and those of the kernels only the
    first time that they see a description.
    """
    token = _plan_callback.set(callback)
    try:
        yield
    finally:
        _plan_callback.reset(token)


def plan(
    q: Tensor, k: Tensor, v: Tensor, *, order: str = "auto", backend: str = "auto", group: "Group | None" = None
) -> Plan:
    """The order and backend that `sima_attention` uses for these tensors. A named backend is never replaced."""
    check_order(order)
    if is_split(group):
        if order == "qk":
            raise ValueError(
                "order 'qk' needs all keys on one process, but group splits them; use order='kv' or 'auto'"
            )
        order = "kv"
    backend = choose_backend(q, backend, lambda: unsupported_reason(q, k, v, order))
    N, M, D, Dv = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    if order == "auto" and backend == "triton":
        order = order_on_gpu(N, M, D, Dv, q.element_size())
    elif order == "auto" and _is_exporting():
        N, M, D, Dv = _example_size(N), _example_size(M), _example_size(D), _example_size(Dv)
    chosen = Plan(order=resolve_order(order, N, M, D, Dv), backend=backend)
    if not torch.compiler.is_compiling() and (callback := _plan_callback.get()) is not None:
        callback(chosen)
    return chosen


def choose_backend(q: Tensor, backend: str, unsupported: Callable[[], str | None]) -> str:
    """ "eager" or "triton", for `unsupported`, which says why the kernels do not support a call."""
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if backend == "auto":
        # An exported program must run without this package, and may become an ONNX file.
        return "triton" if q.is_cuda and not _is_exporting() and unsupported() is None else "eager"
    if backend == "triton" and (reason := unsupported()) is not None:
        raise ValueError(
            f"backend 'triton' does not support this call: {reason}; backend='auto' falls back to plain torch"
        )
    return backend


def is_split(group: "Group | None") -> bool:
    """True where this process holds a part of the tokens only: in a group of more than one process."""
    if group is None:
        return False
    from sima_attn.ops.sequence_parallel import process_group  # imports torch.distributed, which others do not need

    return process_group(group).size() > 1


def _is_exporting() -> bool:
    # In torch 2.11 is_exporting() is also True under torch.compile; the flag that it reads is not.
    return torch.compiler._is_exporting_flag


def _example_size(size: int | torch.SymInt) -> int:
    """The size in the example input of an export.

    Comparing a dynamic size would add a condition to the exported program, which then fails for token counts on the
    other side of it. Either order is right for every count, so the example decides. A size without an example counts
    as large, which gives the order that is linear in the tokens.
    """
    return size if isinstance(size, int) else int(size.node.hint or LARGE)


def sima_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    order: str = "auto",
    token_ref: float | None = None,
    eps: float = 1e-12,
    backend: str = "auto",
    group: "Group | None" = None,
) -> Tensor:
    """SimA attention [B, H, N, Dv]: every channel of q and k divided by its l1 norm over the tokens.

        O = Q diag(s) K^T V,    s_c = 1 / (|Q^c|_1 |K^c|_1)

    Sums run in float32 (float64 for float64 inputs) and the result has the dtype of the inputs. Strided views are read
    in place. NaN and infinity propagate from tokens that are not masked, as in torch.matmul.

    Args:
        q: [B, H, N, D].
        k: [B, H, M, D].
        v: [B, H, M, Dv].
        key_mask: bool [B, M], True for a real token. A masked key and its value have no influence at all.
        query_mask: bool [B, N], True for a real token. A masked query is omitted from |Q|_1 and its output is 0. For
            exact padding in self-attention, pass both masks.
        order: "kv" computes Q (K^T V), linear in the tokens; "qk" computes (Q K^T) V; "auto" uses the cheaper one, see
            `choose_order`.
        token_ref: The number of tokens the model was trained with. The output is multiplied by N / token_ref, because
            it shrinks as 1/N at other image sizes. None is the paper.
        eps: Smallest value of a norm, so that a channel of zeros gives zeros.
        backend: "eager" is plain torch on any device, "triton" the fused kernels for CUDA; "auto" uses the kernels
            where they are supported, see `plan`. A named backend runs or raises.
        group: The processes over which the tokens are split: a DeviceMesh with one dimension, or a ProcessGroup. Each
            process passes its own queries and keys, any number of them, and gets the output for its queries. The
            loss is the sum of the losses of the processes.
    """
    split = is_split(group)
    key = None if split else call_key((q, k, v, key_mask, query_mask), (order, token_ref, eps, backend))
    if (call := prepared_call(key)) is not None:
        return call(q, k, v, query_mask=query_mask, key_mask=key_mask).transpose(1, 2)
    check_qkv(q, k, v, fewest_tokens=0 if split else 1)
    if key_mask is not None:
        check_mask("key_mask", key_mask, k)
    if query_mask is not None:
        check_mask("query_mask", query_mask, q)
    check_token_ref(token_ref)
    check_eps(eps)
    chosen = plan(q, k, v, order=order, backend=backend, group=group)
    if group is not None and split:
        options: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask, "token_ref": token_ref, "eps": eps}
        return _split_attention(chosen.backend)(q, k, v, group=group, **options).transpose(1, 2)
    if chosen.backend == "eager":
        return sima_eager(
            q, k, v, order=chosen.order, key_mask=key_mask, query_mask=query_mask, token_ref=token_ref, eps=eps
        )
    call = _triton_call(key, chosen.order, token_ref, eps)
    return call(q, k, v, query_mask=query_mask, key_mask=key_mask).transpose(1, 2)


def _split_attention(backend: str) -> Callable[..., Tensor]:
    """The function for tokens that are split over processes."""
    if backend == "triton":
        from sima_attn.ops.triton_sequence_parallel import sima_split_triton

        return sima_split_triton
    from sima_attn.ops.sequence_parallel import sima_split

    return sima_split


def _triton_call(key: tuple | None, order: str, token_ref: float | None, eps: float) -> Callable[..., Tensor]:
    """A function that runs the kernels for q, k and v, or for packed qkv."""
    from sima_attn.ops.triton_op import PreparedCall

    return keep_call(key, PreparedCall(order, token_ref, eps))


def sima_attention_qkv(
    qkv: Tensor,
    *,
    token_mask: Tensor | None = None,
    order: str = "auto",
    token_ref: float | None = None,
    eps: float = 1e-12,
    backend: str = "auto",
    group: "Group | None" = None,
) -> Tensor:
    """SimA self-attention of a packed projection qkv [B, N, 3, H, D] -> [B, N, H, D].

    `token_mask` [B, N] is True for real tokens; the other arguments are those of `sima_attention`.
    """
    split = is_split(group)
    key = None if split else call_key((qkv, token_mask), (order, token_ref, eps, backend))
    if (call := prepared_call(key)) is not None:
        return call(qkv, query_mask=token_mask, key_mask=token_mask)
    if not isinstance(qkv, Tensor) or qkv.dim() != 5 or qkv.shape[2] != 3:
        given = tuple(qkv.shape) if isinstance(qkv, Tensor) else type(qkv).__name__
        raise ValueError(f"qkv must be a tensor [batch, tokens, 3, heads, channels], got {given}")
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D] each
    if token_mask is not None:
        check_mask("token_mask", token_mask, q)
    check_qkv(q, k, v, fewest_tokens=0 if split else 1)
    check_token_ref(token_ref)
    check_eps(eps)
    chosen = plan(q, k, v, order=order, backend=backend, group=group)
    if group is not None and split:
        options: dict[str, Any] = {"key_mask": token_mask, "query_mask": token_mask, "token_ref": token_ref, "eps": eps}
        return _split_attention(chosen.backend)(qkv, group=group, **options)
    if chosen.backend == "eager":
        if trains_packed(q, k, v):
            return sima_eager_qkv(qkv, order=chosen.order, token_mask=token_mask, token_ref=token_ref, eps=eps)
        o = sima_eager(
            q, k, v, order=chosen.order, key_mask=token_mask, query_mask=token_mask, token_ref=token_ref, eps=eps
        )
        return o.transpose(1, 2)
    return _triton_call(key, chosen.order, token_ref, eps)(qkv, query_mask=token_mask, key_mask=token_mask)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, fewest_tokens: int = 1) -> None:
    """Raise unless q, k and v fit each other. One short test, because each line counts for small inputs."""
    try:
        (B, H, N, D), (B_k, H_k, M, D_k), (B_v, H_v, M_v, Dv) = q.shape, k.shape, v.shape
        fits = (
            B == B_k == B_v and H == H_k == H_v and D_k == D and M_v == M
            and H > 0 and fewest_tokens <= N and fewest_tokens <= M and D > 0 and Dv > 0
            and q.dtype is k.dtype is v.dtype and q.dtype in DTYPES and q.device == k.device == v.device
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError):  # not tensors, or not of four axes
        fits = False
    if not fits:
        raise ValueError(_describe_mismatch(q, k, v))


def _describe_mismatch(q: Tensor, k: Tensor, v: Tensor) -> str:
    named = {"q": q, "k": k, "v": v}
    for name, t in named.items():
        if not isinstance(t, Tensor):
            return f"{name} must be a torch.Tensor, got {type(t).__name__}"
        if t.dim() != 4:
            return f"{name} must have four axes [batch, heads, tokens, channels], got shape {tuple(t.shape)}"
        if t.dtype not in DTYPES:
            return f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}; convert it first"
    if not (q.dtype == k.dtype == v.dtype):
        return f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    if not (q.device == k.device == v.device):
        return f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}"
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in named.items())
    if not (q.shape[:2] == k.shape[:2] == v.shape[:2]):
        return f"q, k and v must agree in batch and heads, got {shapes}"
    if q.shape[3] != k.shape[3]:
        return f"q and k must have the same number of channels per head, got {shapes}"
    if k.shape[2] != v.shape[2]:
        return f"k and v must have the same number of tokens, got {shapes}"
    return f"heads, tokens and channels must be at least 1, got {shapes}"


def check_mask(name: str, mask: Tensor, tokens: Tensor) -> None:
    expected = (tokens.shape[0], tokens.shape[2])
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} must be a bool tensor, True for a real token, got {given}; e.g. use mask.bool()")
    if tuple(mask.shape) != expected:
        raise ValueError(
            f"{name} must have shape [batch, tokens] = {expected}, got {tuple(mask.shape)}; "
            "SimA can omit tokens, but does not support masks of token pairs"
        )
    if mask.device != tokens.device:
        raise ValueError(f"{name} must be on {tokens.device} like the tokens, got {mask.device}")


def check_options(*, order: str, token_ref: float | None, eps: float) -> None:
    """Check the options of `sima_attention` that a module keeps."""
    check_order(order)
    check_token_ref(token_ref)
    check_eps(eps)


def check_order(order: str) -> None:
    if order not in ORDERS:
        raise unknown_name("order", order, ORDERS)


def check_token_ref(token_ref: float | None) -> None:
    if token_ref is None:
        return
    if isinstance(token_ref, str | bool | Tensor) or not 0 < token_ref < float("inf"):
        raise ValueError(
            f"token_ref must be None or the positive number of tokens of the training size, got {token_ref!r}"
        )


def check_eps(eps: float) -> None:
    if eps is None or isinstance(eps, str | Tensor) or not SMALLEST_EPS <= eps < 1:
        raise ValueError(f"eps must lie in [{SMALLEST_EPS:g}, 1), got {eps!r}; the paper uses 1e-12")
