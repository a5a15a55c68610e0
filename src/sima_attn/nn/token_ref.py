"""Image sizes other than the training size: set `token_ref` of all SimA modules of a model.

SimA's output shrinks as 1/N. `token_ref`, the number of tokens at the training size, restores the scale that later
layers were trained with. The number may differ between modules, so a forward pass at the training size counts it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.nn.class_attention import SimClassAttention
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.nn.image_channels import image_channels


def sima_modules(model: nn.Module) -> list[Any]:
    """The modules of a model that have a `token_ref`."""
    return [module for module in model.modules() if hasattr(module, "token_ref")]


def set_token_ref(model: nn.Module, trained_size: int) -> None:
    """Set `token_ref` of every SimA module to its number of tokens at the training size in pixels.

    Modules that have a `token_ref` keep it.
    """
    modules = sima_modules(model)
    if not modules:
        raise ValueError("token_ref is for SimA attention only, and this model has no SimA attention; omit it")
    without = [module for module in modules if module.token_ref is None]
    if not without:
        return  # without a forward pass, which `sima_local` with a grid of another size would refuse
    for module, tokens in zip(without, tokens_at(model, without, trained_size), strict=True):
        module.token_ref = tokens


def set_class_token_ref(model: nn.Module, trained_size: int) -> None:
    """Set token_ref = sqrt(N) in SimA's class attention, so that the untrained class token depends on the image.

    In the paper its initial output is much smaller than the class token that it is added to, which then is nearly the
    same for every image. Multiplied by N / sqrt(N), N at the training size, it is as large as with softmax.
    """
    modules = [module for module in model.modules() if isinstance(module, SimClassAttention)]
    if modules:
        for module, tokens in zip(modules, tokens_at(model, modules, trained_size), strict=True):
            module.token_ref = tokens**0.5


@contextmanager
def trained_at(model: nn.Module, trained_size: int) -> Iterator[None]:
    """A context in which `set_token_ref` applies; afterwards each `token_ref` is restored."""
    before = [(module, module.token_ref) for module in sima_modules(model)]
    try:
        set_token_ref(model, trained_size)
        yield
    finally:
        for module, old in before:
            module.token_ref = old


@torch.no_grad()
def tokens_at(model: nn.Module, modules: list[Any], size: int) -> list[float]:
    """The number of tokens that each module gets for an image of that size, from a forward pass.

    Inputs are tokens [B, N, C], the queries [B, H, N, D] of a converted attention of transformers, or queries [N, B, C]
    of a SimMultiheadAttention that is not batch_first.
    """
    counts: dict[nn.Module, float] = {}

    def count(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        queries = args[0] if args else kwargs["query"]
        counts[module] = float(queries.shape[-2 if getattr(module, "batch_first", True) else 0])

    with ExitStack() as hooks, eval_mode(model):
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(count, with_kwargs=True).remove)
        model(next(model.parameters()).new_zeros(1, image_channels(model), size, size))
    return [counts[module] for module in modules]
