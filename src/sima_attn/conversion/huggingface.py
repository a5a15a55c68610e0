"""Attentions of transformers that call its attention interface, switched to SimA one by one.

transformers looks an attention up by the name in the configuration that a module holds, and many modules hold the same
configuration. So a converted module gets a copy of it, which names SimA. What the conversion leaves in the
configuration of the model, and so on disk, is in saved.py.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.conversion.mixins import without_mixin
from sima_attn.ops import sima_attention
from sima_attn.ops.api import check_token_ref

NAME = "sima"
TOKEN_REF = "_sima_token_ref"  # in the configuration of a converted module
SHARED = "_sima_shared_config"  # in a copy of a configuration: the one it was copied from


def is_pretrained_model(model: Any) -> bool:
    """True for a transformers model; without transformers imported there can be none."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def calls_interface(module: Any) -> bool:
    """True for the modules that look up their attention in transformers' table of attentions."""
    if not hasattr(getattr(module, "config", None), "_attn_implementation") or is_pretrained_model(module):
        return False
    methods = [inspect.unwrap(part) for cls in type(module).__mro__ for part in vars(cls).values() if callable(part)]
    return any("ALL_ATTENTION_FUNCTIONS" in part.__code__.co_names for part in methods if inspect.isfunction(part))


def switch_to_sima(module: Any, token_ref: float | None = None) -> None:
    """Let one module, which calls the interface, call SimA."""
    check_token_ref(token_ref)
    register()
    set_implementation(module, NAME)
    vars(module.config)[TOKEN_REF] = token_ref


def set_implementation(module: Any, implementation: str) -> None:
    """Choose the attention of one module: it gets a copy of the configuration that it shares with others."""
    shared = shared_config(module)
    module.config = object.__new__(without_mixin(type(shared)))
    vars(module.config).update(vars(shared), _attn_implementation_internal=implementation, **{SHARED: shared})


def shared_config(module: Any) -> Any:
    """The configuration that a module was built with."""
    return vars(module.config).get(SHARED, module.config)


def register() -> None:
    """Make the name "sima" known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, sima_for_transformers)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # otherwise padding masks are dropped silently


def sima_for_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """SimA as transformers calls an attention: q, k, v [B, H, N, D] -> [B, N, H, D] and no weights.

    SimA has no scale and no attention matrix: `scaling` and `dropout` have no place in it.
    """
    if TOKEN_REF not in vars(module.config):
        raise ValueError(
            f"this {type(module).__name__} was not converted to SimA, but its configuration is that of a converted "
            "model, or has attn_implementation='sima'. Convert a model with sima_attn.convert, and load a converted "
            "one with an Auto class of transformers or with sima_attn.conversion.load_pretrained. To have a softmax "
            "model beside it, build that from a copy of the configuration made before the conversion"
        )
    if kwargs.get("is_causal") or (kwargs.get("is_causal") is None and getattr(module, "is_causal", False)):
        raise ValueError(f"{type(module).__name__} is causal, which SimA cannot be: its norms run over all tokens")
    key_mask = None if attention_mask is None else _key_mask(attention_mask)
    query_mask = None if _is_cross_attention(module) or query.shape[2] != key.shape[2] else key_mask
    token_ref = vars(module.config)[TOKEN_REF]
    o = sima_attention(query, key, value, key_mask=key_mask, query_mask=query_mask, token_ref=token_ref)
    return o.transpose(1, 2).contiguous(), None


def _is_cross_attention(module: nn.Module) -> bool:
    """True where the keys are other tokens than the queries, however many: padding among them hides no query."""
    return getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower()


def _key_mask(mask: Tensor) -> Tensor:
    """A mask [B, 1, N, M] that hides the same keys from every query -> [B, M]."""
    if mask.dtype != torch.bool:
        raise ValueError("SimA cannot add a bias to pairs of tokens; this model gives its attention a mask of numbers")
    keys = mask[:, 0].any(dim=1)  # [B, M]
    rows = mask[:, 0].any(dim=2)  # [B, N], rows of padding may be empty
    if not torch.compiler.is_compiling() and bool((mask[:, 0] != (rows[:, :, None] & keys[:, None, :])).any()):
        raise ValueError("SimA cannot mask pairs of tokens; this mask hides different keys from different queries")
    return keys


@contextmanager
def recorded_callers() -> Iterator[set[nn.Module]]:
    """Collects the modules that call SimA through the interface."""
    callers: set[nn.Module] = set()
    if "transformers" not in sys.modules:
        yield callers
        return
    from transformers import AttentionInterface

    def recorded(module: nn.Module, *args, **kwargs):
        callers.add(module)
        return sima_for_transformers(module, *args, **kwargs)

    AttentionInterface.register(NAME, recorded)
    try:
        yield callers
    finally:
        AttentionInterface.register(NAME, sima_for_transformers)


def example_pixels(model: Any) -> dict[str, Tensor]:
    """A black image of the size that a transformers model was built for, as keyword inputs."""
    if model.main_input_name != "pixel_values":
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name!r}, not an image: pass example_inputs, the keyword "
            "inputs of one forward"
        )
    config = getattr(model.config, "vision_config", model.config)
    of_timm = (getattr(config, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
    size = getattr(config, "image_size", of_timm[1:])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    parameter = next(model.parameters())
    return {"pixel_values": torch.zeros(1, channels, height, width, device=parameter.device, dtype=parameter.dtype)}
