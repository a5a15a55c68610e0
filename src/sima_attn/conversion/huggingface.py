"""transformers' models, through the attention interface that they offer, proven by counting its calls.

Several model families accept the setting and never call it. So one forward is run, the attentions that called
ours are counted, and a model that called none is put back and refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sima_attn.conversion.modules import looks_like_attention
from sima_attn.conversion.report import ConversionReport, Converted, Skipped
from sima_attn.ops import sima_attention
from sima_attn.ops.api import check_token_ref

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "sima"


def is_pretrained_model(model: nn.Module) -> bool:
    """True for a transformers model; without transformers imported there can be none."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def convert_pretrained(
    model: PreTrainedModel,
    attention: str,
    *,
    where: Callable[[str, nn.Module], bool] | None,
    example_inputs: Any,
    options: dict[str, Any],
    report: ConversionReport,
) -> None:
    """Switch the model to SimA, run it once, and list which of its modules really called it."""
    if attention != "sima":
        raise ValueError(f"transformers' models can be converted to 'sima' only, got {attention!r}")
    if where is not None:
        raise ValueError("transformers switches the attention of a whole model: `where` cannot choose parts of it")
    unknown = set(options) - {"token_ref"}
    if unknown:
        raise ValueError(f"options for transformers' models: token_ref; got {sorted(unknown)}")
    check_token_ref(options.get("token_ref"))
    register()
    before = model.config._attn_implementation
    inputs = example_inputs if example_inputs is not None else _example_image(model)

    def undo() -> None:
        for config in _configs(model):
            vars(config).pop("sima_token_ref", None)
            vars(config).pop("attn_implementation", None)
        model.set_attn_implementation(before)

    model.set_attn_implementation(NAME)
    for config in _configs(model):
        config.sima_token_ref = options.get("token_ref")
    try:
        callers = _callers(model, inputs)
    except BaseException:
        undo()
        raise
    if not callers:
        undo()
        reason = f"{type(model).__name__} accepts attn_implementation='sima' and never calls it"
        report.skipped += [
            Skipped(path, type(module).__name__, reason)
            for path, module in model.named_modules()
            if looks_like_attention(module)
        ]
        return
    for config in _configs(model):
        # Written to config.json by save_pretrained and read by from_pretrained: with sima_attn imported the
        # model comes back with SimA, without it transformers refuses the unknown attention.
        config.attn_implementation = NAME
    report._undo.append(undo)
    for path, module in model.named_modules():
        if module in callers:
            names = tuple(name for name, _ in module.named_parameters())
            report.converted.append(Converted(path, type(module).__name__, "sima_attention", names, ()))
        elif looks_like_attention(module) and not _belongs_to(callers, path, module, report):
            report.skipped.append(Skipped(path, type(module).__name__, "it did not call the attention interface"))


def _belongs_to(callers: set[nn.Module], path: str, module: nn.Module, report: ConversionReport) -> bool:
    """True for the modules around and inside a converted attention, which are part of it."""
    inside = any(path.startswith(f"{one.path}.") for one in report.converted)
    return inside or any(child in callers for child in module.modules())


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
    if kwargs.get("is_causal") or (kwargs.get("is_causal") is None and getattr(module, "is_causal", False)):
        raise ValueError(f"{type(module).__name__} is causal, which SimA cannot be: its norms run over all tokens")
    config = getattr(module, "config", None)
    if config is not None:
        config.attn_implementation = NAME  # so that a reloaded model is saved as what it is, too
    key_mask = None if attention_mask is None else _key_mask(attention_mask)
    query_mask = key_mask if query.shape[2] == key.shape[2] else None
    token_ref = getattr(config, "sima_token_ref", None)
    o = sima_attention(query, key, value, key_mask=key_mask, query_mask=query_mask, token_ref=token_ref)
    return o.transpose(1, 2).contiguous(), None


def _key_mask(mask: Tensor) -> Tensor:
    """A mask [B, 1, N, M] that hides the same keys from every query -> [B, M]."""
    if mask.dtype != torch.bool:
        raise ValueError("SimA cannot add a bias to pairs of tokens; this model gives its attention a mask of numbers")
    keys = mask[:, 0].any(dim=1)  # [B, M]
    rows = mask[:, 0].any(dim=2)  # [B, N], rows of padding may be empty
    if not torch.compiler.is_compiling() and bool((mask[:, 0] != (rows[:, :, None] & keys[:, None, :])).any()):
        raise ValueError("SimA cannot mask pairs of tokens; this mask hides different keys from different queries")
    return keys


def _callers(model: PreTrainedModel, inputs: dict[str, Any]) -> set[nn.Module]:
    """The modules that called our attention in one forward."""
    from transformers import AttentionInterface

    callers: set[nn.Module] = set()

    def counted(module: nn.Module, *args, **kwargs):
        callers.add(module)
        return sima_for_transformers(module, *args, **kwargs)

    training = model.training
    AttentionInterface.register(NAME, counted)
    try:
        with torch.no_grad():
            model.eval()(**inputs)
    finally:
        AttentionInterface.register(NAME, sima_for_transformers)
        model.train(training)
    return callers


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configuration of the model and of its parts."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def _example_image(model: PreTrainedModel) -> dict[str, Tensor]:
    if model.main_input_name != "pixel_values":
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name!r}, not an image: pass example_inputs, the keyword "
            "inputs of one forward"
        )
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    parameter = next(model.parameters())
    return {"pixel_values": torch.zeros(1, channels, height, width, device=parameter.device, dtype=parameter.dtype)}
