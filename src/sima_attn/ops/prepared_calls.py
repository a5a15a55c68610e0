"""Calls of the kernels that were checked before: an eager call with the same description needs no checks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sima_attn.ops.triton_support import INTERPRETED, describe, is_plain_call

MOST_PREPARED = 1024
_prepared: dict[tuple, Callable[..., Tensor]] = {}


def call_key(tensors: tuple[Tensor | None, ...], options: tuple) -> tuple | None:
    """All that the checks of a call depend on, if it is a plain one on a device that has the kernels.

    None for other calls, e.g. while torch.compile traces.
    """
    if not is_plain_call(*tensors) or not (INTERPRETED or getattr(tensors[0], "is_cuda", False)):
        return None
    return (*map(describe, tensors), *options)


def prepared_call(key: tuple | None) -> Callable[..., Tensor] | None:
    """The call that was prepared under this key, if there is one."""
    return None if key is None else _prepared.get(key)


def keep_call(key: tuple | None, call: Any) -> Callable[..., Tensor]:
    """The call, kept for the next time if there is a key; otherwise as a torch operator."""
    if key is None:
        return call.through_operator
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    _prepared[key] = call
    return call
