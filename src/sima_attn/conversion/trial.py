"""One forward of a model, to see which of its modules really run: what a conversion is proven by."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.nn.eval_mode import eval_mode


def called_modules(model: nn.Module, inputs: Any, watched: Iterable[nn.Module]) -> set[nn.Module]:
    """Those of the watched modules that are called in one forward, in eval mode without gradients.

    `inputs` is a tensor, a tuple, or a dict of keyword inputs. What is compiled runs uncompiled: torch.compile would
    look the modules up again at its next call, and takes long.
    """
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    called: set[nn.Module] = set()
    with ExitStack() as hooks, eval_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for module in set(watched):
            hooks.callback(module.register_forward_pre_hook(lambda module, _: called.add(module)).remove)
        model(*args, **kwargs)
    return called


def example_image(model: nn.Module) -> Tensor | None:
    """A black image of the size that a model of timm or torchvision was built for; None for any other model."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "image_size", None)
    if size is None:
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (None,))[1:]
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or not isinstance(height, int) or not isinstance(width, int):
        return None
    return first.weight.new_zeros(1, first.in_channels, height, width)
