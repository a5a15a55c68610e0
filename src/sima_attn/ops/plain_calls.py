"""Which calls PyTorch only has to compute and differentiate: nothing else follows their operations."""

import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

PLAIN_TYPES = (Tensor, nn.Parameter)


def is_plain_call(*tensors: Tensor | None) -> bool:
    """True for a call without compiler, tracer, function transform, forward mode or tensor subclass.

    Autograd is allowed. torch.func (grad, jvp, vmap), batched gradients, forward mode and jit tracing support neither
    writes into `out=` nor kernels that are launched directly.
    """
    return not (
        torch.compiler.is_compiling()
        or any(t is not None and (type(t) not in PLAIN_TYPES or is_legacy_batchedtensor(t)) for t in tensors)
        or peek_interpreter_stack() is not None
        or in_forward_mode()
        or torch.jit.is_tracing()
    )


def in_forward_mode() -> bool:
    """True within `torch.autograd.forward_ad.dual_level`, which `torch.func.jvp` enters too."""
    return forward_ad._current_level >= 0


def needs_grad(*tensors: Tensor) -> bool:
    """True where autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
