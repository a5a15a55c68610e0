"""transformers' models, through the attention interface that they offer, proven by counting its calls.

Several model families accept the setting and never call it. So one forward is run, the attentions that called
ours are counted, and a model that called none is put back and refused.

transformers does not save the choice, and what it reads of it from the configuration of a part (the vision model of
CLIP) it overwrites. So a converted configuration is sealed: it is written with an entry that makes transformers
refuse to read it, in any program and at any depth, and `load_pretrained` reads it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sima_attn.conversion.modules import looks_like_attention
from sima_attn.conversion.report import ConversionReport, Converted, Skipped
from sima_attn.conversion.trial import run_once
from sima_attn.ops import sima_attention
from sima_attn.ops.api import check_token_ref

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NAME = "sima"
TOKEN_REF = "sima_token_ref"
# Properties of every configuration that cannot be set: an entry of that name in config.json is an error on loading.
# In a live configuration the property hides the entry. Two, because transformers may drop one of them.
SEALS = ("use_return_dict", "sub_configs")
SEAL = "converted to SimA attention: load this model with sima_attn.conversion.load_pretrained(MODEL_CLASS, PATH)"


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
    if model.config._attn_implementation == NAME:
        raise ValueError(f"the attentions of this {type(model).__name__} are 'sima' already")
    register()
    inputs = example_inputs if example_inputs is not None else _example_image(model)
    own = (*SEALS, TOKEN_REF)
    before = [
        (config, config._attn_implementation, {key: vars(config)[key] for key in own if key in vars(config)})
        for config in _configs(model)
    ]

    def undo() -> None:
        for config, implementation, entries in before:
            config._attn_implementation_internal = implementation
            for key in own:
                vars(config).pop(key, None)
            vars(config).update(entries)

    try:
        model.set_attn_implementation(NAME)
        for config, *_ in before:
            # Also those that only a part holds, such as the decoder of ViT-MAE: loaded again, it gets the model's.
            config._attn_implementation_internal = NAME
            setattr(config, TOKEN_REF, options.get("token_ref"))
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
    for config, *_ in before:
        _seal(config)
    report.proven = True
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


def load_pretrained(model_class: Any, path: str, **kwargs) -> PreTrainedModel:
    """A converted model that `save_pretrained` has written, with SimA where it had SimA.

    Args:
        model_class: A model class of transformers, such as CLIPModel or AutoModel.
        path: The folder.
        kwargs: As for `from_pretrained`.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if "attn_implementation" in kwargs or "config" in kwargs:
        raise ValueError("attn_implementation and config are those of the converted model: remove them")
    register()
    where = {name: kwargs[name] for name in ("subfolder", "revision", "cache_dir", "token") if name in kwargs}
    entries, _ = PreTrainedConfig.get_config_dict(path, **where)
    config_class = getattr(model_class, "config_class", None)  # an Auto class has none
    if config_class is not None and config_class.model_type != entries.get("model_type"):
        entries = entries.get(config_class.base_config_key, entries)  # a part of what was saved
    parts = list(_unseal(entries))
    if not parts:
        raise ValueError(f"{path} holds no model that was converted to SimA: load it with from_pretrained")
    config = AutoConfig.for_model(**entries) if config_class is None else config_class.from_dict(entries)
    for keys in parts:
        part = reduce(getattr, keys, config)
        part._attn_implementation_internal = NAME
        _seal(part)
    return model_class.from_pretrained(path, config=config, **kwargs)


def _seal(config: PreTrainedConfig) -> None:
    """Let transformers refuse what this configuration is saved as."""
    read_only = [name for name in SEALS if _is_read_only(type(config), name)]
    if not read_only:
        raise RuntimeError("this version of transformers would load a converted model as softmax: use 5.17 to 5.23")
    vars(config).update(dict.fromkeys(read_only, SEAL))


def _is_read_only(cls: type, name: str) -> bool:
    found = inspect.getattr_static(cls, name, None)
    return isinstance(found, property) and found.fset is None


def _unseal(entries: dict[str, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Remove the seals of a configuration and of its parts; yield where they were."""
    if SEAL in [entries.pop(name, None) for name in SEALS]:
        yield keys
    for key, value in entries.items():
        if isinstance(value, dict):
            yield from _unseal(value, (*keys, key))


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
    if config is not None and not torch.compiler.is_compiling():
        _seal(config)  # of a model that was built with attn_implementation="sima", not converted
    key_mask = None if attention_mask is None else _key_mask(attention_mask)
    query_mask = None if _is_cross_attention(module) or query.shape[2] != key.shape[2] else key_mask
    token_ref = getattr(config, TOKEN_REF, None)
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


def _callers(model: PreTrainedModel, inputs: Any) -> set[nn.Module]:
    """The modules that called our attention in one forward."""
    from transformers import AttentionInterface

    callers: set[nn.Module] = set()

    def counted(module: nn.Module, *args, **kwargs):
        callers.add(module)
        return sima_for_transformers(module, *args, **kwargs)

    AttentionInterface.register(NAME, counted)
    try:
        run_once(model, inputs)
    finally:
        AttentionInterface.register(NAME, sima_for_transformers)
    return callers


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configurations of the model and of its parts, with those that these hold."""
    found: dict[int, Any] = {}
    left: list[Any] = [model.config, *(getattr(module, "config", None) for module in model.modules())]
    while left:
        config = left.pop()
        if hasattr(config, "_attn_implementation") and id(config) not in found:
            found[id(config)] = config
            left += [getattr(config, name, None) for name in config.sub_configs]
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
