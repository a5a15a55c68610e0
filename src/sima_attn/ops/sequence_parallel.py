"""SimA of tokens that are split over processes: each process holds some of the queries and some of the keys.

K^T V, |K|_1 and |Q|_1 are sums over tokens. Each process computes its part, one all-reduce adds the parts, and every
process multiplies its own queries by the result:

    O_p = Q_p diag(s) (sum_p K_p^T V_p)          s_c = 1 / (sum_p |Q_p^c|_1  sum_p |K_p^c|_1)

The message has D x Dv + 2 D numbers per head, whatever the number of tokens. The gradient of a sum over processes is
the sum of their gradients, so the backward pass is one all-reduce of the same size.

`sima_split` is plain torch. triton_sequence_parallel.py sends the same message with the fused kernels around it.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head; N and M count
the tokens of this process.
"""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sima_attn.ops.cpu_training import unpack_qkv
from sima_attn.ops.eager import (
    compute_dtype,
    drop_padding,
    heads_last,
    l1_over_tokens,
    token_gain,
    without_autocast,
)
from sima_attn.ops.plain_calls import needs_grad

Group = ProcessGroup | DeviceMesh


def process_group(group: Group) -> ProcessGroup:
    """The process group of a mesh with one dimension, or the group itself."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a mesh with one dimension, got {group.ndim}: {group.mesh_dim_names}; "
                "select the one that splits the tokens, e.g. mesh['sequence']"
            )
        return group.get_group()
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group must be a DeviceMesh, or a ProcessGroup that this process belongs to, got {type(group).__name__}; "
            "use e.g. torch.distributed.init_device_mesh"
        )
    return group


def sima_split(
    *tensors: Tensor,
    group: Group,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    token_ref: float | None,
    eps: float,
) -> Tensor:
    """SimA of checked arguments, q, k and v or packed qkv: the output [B, N, H, Dv] for the queries of this process."""
    q, k, v = drop_padding(*unpack_qkv(tensors), key_mask=key_mask, query_mask=query_mask)
    dtype, work = q.dtype, compute_dtype(q.dtype)
    q, k, v = q.to(work), k.to(work), v.to(work)
    with without_autocast(q):
        state = attention_state(q, k, v, group=group, query_mask=query_mask, token_ref=token_ref, eps=eps)
        return heads_last((q @ state).to(dtype)).transpose(1, 2)


def attention_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    query_mask: Tensor | None = None,
    token_ref: float | None,
    eps: float,
) -> Tensor:
    """diag(s) K^T V [B, H, D, Dv] over the tokens of all processes; padding in q, k and v must be zero."""
    members = process_group(group)
    check_agreement(members, q, k, v, backend="eager", token_ref=token_ref, eps=eps)
    D, Dv = q.shape[3], v.shape[3]
    sums = torch.cat([(k.mT @ v).flatten(2), l1_over_tokens(q), l1_over_tokens(k)], -1)  # [B, H, D * Dv + 2 D]
    message = pack_message(sums, None if token_ref is None else token_gains(q, query_mask, token_ref))
    sums, gains = unpack_message(SumOverProcesses.apply(message, members), sums.shape)
    kv, q_norm, k_norm = sums.split([D * Dv, D, D], -1)
    # One norm after the other, as in `folded_attention`: their product can overflow float32.
    state = kv.unflatten(-1, (D, Dv)) / k_norm[..., None].clamp_min(eps) / q_norm[..., None].clamp_min(eps)
    return state if gains is None else state * gains[:, None, None, None]


def token_gains(q: Tensor, query_mask: Tensor | None, token_ref: float) -> Tensor:
    """N / token_ref of each image [B], of the tokens of this process: a sum over the processes too."""
    ones = torch.ones(q.shape[0], 1, 1, dtype=compute_dtype(q.dtype), device=q.device)
    return (ones * token_gain(q, query_mask, token_ref)).flatten()


def pack_message(sums: Tensor, gains: Tensor | None) -> Tensor:
    """The message of a process: K^T V, |Q|_1 and |K|_1 of each head, then the gain of each image if there is one."""
    return sums.flatten() if gains is None else torch.cat([sums.flatten(), gains])


def unpack_message(message: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """(sums of that shape, gains [B])."""
    count = math.prod(shape)
    sums, gains = message[:count].view(shape), message[count:]
    return sums, gains if len(gains) else None


class SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over the processes of a group. Its gradient is the sum of theirs: one all-reduce each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """The sum, a new tensor."""
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The sum of the gradients, which can be differentiated again."""
        return SumOverProcesses.apply(grad, ctx.group), None


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the processes, a new tensor, in a way that torch.compile sees. Autograd does not record it."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


# The calls that all processes of a group were found to agree on, with the device of this process.
_agreed: WeakKeyDictionary[ProcessGroup, set[tuple[str, str]]] = WeakKeyDictionary()


def check_agreement(
    group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor, *, backend: str, token_ref: float | None, eps: float
) -> None:
    """Raise on all processes if their first calls of a kind differ in sizes or options; the token counts may differ.

    Otherwise an all-reduce would wait until its timeout or add unrelated numbers.
    """
    if torch.compiler.is_compiling():
        return
    (B, H, _, D), Dv = q.shape, v.shape[3]
    gradient = needs_grad(q, k, v)
    call = f"{B=}, {H=}, {D=}, {Dv=}, {backend=}, sums in {compute_dtype(q.dtype)}, {token_ref=}, {eps=}, {gradient=}"
    rule = (
        "the processes of a group must call with the same sizes and options, and all or none of them with gradients; "
        "only the number of tokens may differ"
    )
    check_same_call(group, call, rule, q.device)


def check_same_call(group: ProcessGroup, call: str, rule: str, device: torch.device) -> None:
    """Raise the rule on all processes if they describe their calls differently.

    Descriptions are exchanged the first time that a group sees them, and not while torch.compile traces. If one process
    repeats a call while another one makes a new one, both wait until the timeout of the group.
    """
    if torch.compiler.is_compiling():
        return
    agreed = _agreed.setdefault(group, set())
    if (call, device.type) in agreed:
        return
    check_can_send(group, device)
    calls = _calls_of_all(group, call)
    if any(other != call for other in calls):
        listed = "\n".join(f"  process {rank}: {other}" for rank, other in enumerate(calls))
        raise ValueError(f"{rule}:\n{listed}")
    agreed.add((call, device.type))


_START_GLOO = 'torch.distributed.init_process_group("gloo") before the mesh is made'


def check_can_send(group: ProcessGroup, device: torch.device) -> None:
    """Raise unless the group sends tensors of that device."""
    backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    if f"{device.type}:" not in backends:
        raise ValueError(
            f"the tensors are on {device.type!r}, and the backend of the group, {backends!r}, does not send them: on "
            f"the CPU call {_START_GLOO}, on GPUs move model and tensors to the GPU of each process"
        )


def _calls_of_all(group: ProcessGroup, call: str) -> list[str]:
    """The descriptions of all processes; the first message of a group, which NCCL refuses on a shared GPU."""
    calls: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(calls, call, group=group)
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise ValueError(
            "several processes of the group use the same GPU, which NCCL does not support: start one process per GPU, "
            f"or run on the CPU and call {_START_GLOO}"
        ) from error
    return calls
