"""Losses and gradients that are not finite: the error, and the module in which they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class NonFiniteError(ValueError):
    """A loss or gradient that is not finite; `step` counts from 1."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


def first_non_finite(model: nn.Module, forward: Callable[[], Any]) -> tuple[Any, str]:
    """The result of `forward`, and a description of the first module whose output is not finite."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not is_finite(output):
            given = "" if is_finite(inputs) else ", whose input was already not finite"
            found.append(f"first in the output of {names[module] or 'the model'} ({type(module).__name__}){given}")

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        out = forward()
    finally:
        for hook in hooks:
            hook.remove()
    return out, found[0] if found else "all modules have finite outputs; the cause is the loss function or its targets"


def is_finite(value: Any) -> bool:
    """Whether all floating-point tensors in nested lists, tuples and dictionaries are finite."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
