"""One forward of a model, to see which of its modules really run, and on which tokens: the proof of a conversion."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.nn.eval_mode import eval_mode
from sima_attn.nn.grid import MOST_PREFIX_TOKENS


def called_modules(model: nn.Module, inputs: Any, watched: Iterable[nn.Module]) -> set[nn.Module]:
    """Those of the watched modules that are called in one forward, in eval mode without gradients.

    `inputs` is a tensor, a tuple, or a dict of keyword inputs. What is compiled runs uncompiled: torch.compile would
    look the modules up again at its next call, and takes long.
    """
    called: set[nn.Module] = set()
    with ExitStack() as hooks:
        for module in set(watched):
            hooks.callback(module.register_forward_pre_hook(lambda module, _: called.add(module)).remove)
        _run(model, inputs)
    return called


def token_layouts(model: nn.Module, inputs: Any, watched: Iterable[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
    """The option `prefix_tokens` of the watched attentions, seen in one forward; {} without inputs.

    The grid is the last feature map of a convolution before an attention. Other tokens are prefix tokens, up to 8;
    where there are more, or fewer tokens than positions, the options fit no layout, and the attention raises.
    """
    layouts: dict[nn.Module, dict[str, Any]] = {}
    grid: list[int] = []

    def keep_grid(module: nn.Module, inputs: Any, feature_map: Tensor) -> None:
        grid[:] = feature_map.shape[-2:]

    def keep_layout(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("hidden_states")
        if not grid or not isinstance(tokens, Tensor) or tokens.dim() != 3:
            return
        prefix = tokens.shape[1] - grid[0] * grid[1]
        fits = 0 <= prefix <= MOST_PREFIX_TOKENS
        layouts[module] = {"prefix_tokens": prefix} if fits else {"prefix_tokens": 0, "grid": tuple(grid)}

    if inputs is None:
        return layouts
    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                hooks.callback(module.register_forward_hook(keep_grid).remove)
        for module in watched:
            hooks.callback(module.register_forward_pre_hook(keep_layout, with_kwargs=True).remove)
        _run(model, inputs)
    return layouts


def _run(model: nn.Module, inputs: Any) -> None:
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    with eval_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(*args, **kwargs)


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
