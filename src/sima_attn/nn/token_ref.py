"""Other image sizes than the training size: `token_ref` of all SimA modules of a model at once.

SimA's output shrinks as 1/N. `token_ref`, the number of tokens at the training size, brings it back to what the later
layers know. Every module may see a number of its own, so they are asked, by one forward of an image of that size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.nn.class_attention import SimClassAttention


def sima_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that have a `token_ref`."""
    return [module for module in model.modules() if hasattr(module, "token_ref")]


def set_token_ref(model: nn.Module, trained_size: int) -> None:
    """Let every SimA module make up for the number of tokens, relative to that at the training size in pixels.

    One that has a `token_ref` does so already and keeps it.
    """
    modules = sima_modules(model)
    if not modules:
        raise ValueError("token_ref is SimA's own, and this model has no SimA attention; leave it away")
    without = [module for module in modules if module.token_ref is None]
    for module, tokens in zip(without, tokens_at(model, without, trained_size), strict=True):
        module.token_ref = tokens


def set_class_token_ref(model: nn.Module, trained_size: int) -> None:
    """Let SimA's class attention, in models that have one, depend on the image from the start: token_ref = sqrt(N).

    Untrained, the output of the paper's is far below the class token that it is added to, which then is nearly the
    same for every image. Times N / sqrt(N), N of the training size, it has the size that softmax's has.
    """
    modules = [module for module in model.modules() if isinstance(module, SimClassAttention)]
    if modules:
        for module, tokens in zip(modules, tokens_at(model, modules, trained_size), strict=True):
            module.token_ref = tokens**0.5


@contextmanager
def trained_at(model: nn.Module, trained_size: int) -> Iterator[None]:
    """Within it `set_token_ref` holds, after it what was before."""
    before = [(module, module.token_ref) for module in sima_modules(model)]
    try:
        set_token_ref(model, trained_size)
        yield
    finally:
        for module, old in before:
            module.token_ref = old


@torch.no_grad()
def tokens_at(model: nn.Module, modules: list[Any], size: int) -> list[float]:
    """The number of tokens [B, N, C] that each of the modules sees in an image of that size, by looking."""
    seen: dict[nn.Module, float] = {}

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[module] = float(inputs[0].shape[1])

    hooks = [module.register_forward_pre_hook(look) for module in modules]
    was_training = model.training
    try:
        model.eval()(next(model.parameters()).new_zeros(1, 3, size, size))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return [seen[module] for module in modules]
