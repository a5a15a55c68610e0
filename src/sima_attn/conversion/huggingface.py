"""Attentions of transformers that call its attention interface, switched to another attention one by one.

transformers looks an attention up by the name in the configuration that a module holds, and many modules hold the same
configuration. So a converted module gets a copy of it, which names `attend`, and a child module, the core: a registered
attention without its projections, which the module has itself. Parameters of the core, such as the gain per head of
"sima_local", are so trained, moved and saved with the model. What the conversion leaves in the configuration of the
model, and so on disk, is in saved.py.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

import inspect
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.conversion.mixins import Mixin, with_mixin, without_mixin
from sima_attn.conversion.modules import SAME_FUNCTION, Refused
from sima_attn.nn import Attention, SimAttention, attention_class

NAME = "sima_attn"  # of `attend`, in transformers' table of attentions
CORE = "attention_core"  # child of a converted module
AROUND_THE_CORE = ("qkv", "q_norm", "k_norm", "norm", "proj", "proj_drop")  # which the module does itself
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


class AttentionCore(Mixin):
    """An attention that gets q, k and v from the module that holds it, and has no projections of its own."""

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, **masks) -> Tensor:
        """q, k, v [B, H, N, D] -> o [B, H, N, D]."""
        return self.core(q, k, v, **masks)


def switch(module: Any, attention: str, options: dict[str, Any]) -> None:
    """Let one module, which calls the interface, call a registered attention; raises Refused with the reason why not.

    The new parameters are those that the attention starts with.
    """
    cls = attention_class(attention)
    if attention in SAME_FUNCTION["Attention"]:
        raise Refused("it has softmax already")
    if cls.ties_qk:
        raise Refused(f"{attention!r} has one projection for queries and keys, this attention has two")
    if cls.has_local_branch and _is_cross_attention(module):
        raise Refused(f"it has other keys than queries, which {attention!r} cannot take")
    if cls.has_local_branch and drops_patches(module.config):
        raise Refused(
            f"it sees some of the patches in a random order (ViT-MAE), and {attention!r} has a convolution over all of "
            "them; load the encoder as ViTModel, or convert to 'sima'"
        )
    heads, dim = _heads_and_width(module)
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))  # others are quantized
    core: Any = with_mixin(AttentionCore, cls)(dim, heads, device=like.device, dtype=like.dtype, **options)
    for part in AROUND_THE_CORE:
        delattr(core, part)
    register()
    set_implementation(module, NAME)
    module.add_module(CORE, core.train(module.training))


def drops_patches(config: Any) -> bool:
    """True for ViT-MAE: its attentions see some of the patches, in a random order even at a mask ratio of 0."""
    return type(config).model_type == "vit_mae"  # not that of the object: a ViT may be loaded from a file of ViT-MAE


def switch_back(module: Any) -> None:
    """Undo `switch`."""
    delattr(module, CORE)
    module.config = shared_config(module)


def core_of(module: nn.Module) -> Attention | None:
    """The attention that a converted module of transformers calls; None for any other module."""
    core: Any = module._modules.get(CORE)
    return core if isinstance(core, AttentionCore) else None  # type: ignore[return-value]  # mixed into one


def projections_of(module: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """The layers that give v and take the output of an attention; None where it does not have both (YOLOS)."""
    parts = dict(module.named_children())
    found = [
        next((parts[name] for name in names if isinstance(parts.get(name), nn.Linear)), None)
        for names in (("v_proj", "value"), ("o_proj", "out_proj"))
    ]
    return None if None in found else tuple(found)  # type: ignore[return-value]


def is_plain_softmax(module: Any) -> bool:
    """True for an attention of transformers that computes softmax(Q K^T / sqrt(D)) V of what it projects.

    RoPE and relative position biases come from outside the module.
    """
    if not calls_interface(module) or core_of(module) is not None:
        return False
    biases = ("use_relative_position_bias", "use_shared_relative_position_bias")
    return not any(getattr(module.config, name, False) for name in biases) and "position_embeddings" not in (
        inspect.signature(module.forward).parameters
    )


def _heads_and_width(module: Any) -> tuple[int, int]:
    """(H, H * D) of an attention of transformers, by the names that its classes have for them."""

    def first(*places: tuple[Any, str]) -> int | None:
        return next((getattr(owner, name) for owner, name in places if getattr(owner, name, None)), None)

    config = module.config
    heads = first((module, "num_heads"), (module, "num_attention_heads"), (config, "num_attention_heads"))
    head_dim = first((module, "head_dim"), (module, "attention_head_size"))
    width = first((config, "hidden_size")) if heads is None or head_dim is None else heads * head_dim
    if heads is None or width is None:
        raise Refused("it does not say how many heads it has, and how wide they are")
    return heads, width


def set_implementation(module: Any, implementation: str) -> None:
    """Choose the attention of one module: it gets a copy of the configuration that it shares with others."""
    shared = shared_config(module)
    module.config = object.__new__(without_mixin(type(shared)))
    vars(module.config).update(vars(shared), _attn_implementation_internal=implementation, **{SHARED: shared})


def shared_config(module: Any) -> Any:
    """The configuration that a module was built with."""
    return vars(module.config).get(SHARED, module.config)


def register() -> None:
    """Make `attend` known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # otherwise padding masks are dropped silently


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """The core of a module as transformers calls an attention: q, k, v [B, H, N, D] -> [B, N, H, D] and no weights.

    Our attentions have a scale of their own, and no attention matrix: `scaling` and `dropout` have no place in them.
    """
    core = core_of(module)
    if core is None:
        raise ValueError(
            f"this {type(module).__name__} was not converted, but its configuration is that of a converted model, or "
            f"has attn_implementation={NAME!r}. Convert a model with sima_attn.convert, and load a converted one with "
            "an Auto class of transformers or with sima_attn.conversion.load_pretrained. To have a softmax model "
            "beside it, build that from a copy of the configuration made before the conversion"
        )
    kind = without_mixin(type(core)).__name__
    if kwargs.get("is_causal") or (kwargs.get("is_causal") is None and getattr(module, "is_causal", False)):
        raise ValueError(
            f"{type(module).__name__} is causal, which {kind} cannot be: its sums run over all tokens; leave it out "
            'with `where`; where="vision" converts the vision model of CLIP alone'
        )
    if kwargs.get("output_attentions"):  # a warning, as for "sdpa", because it may be set in the configuration
        warnings.warn(
            "output_attentions is not supported by a converted attention, which computes no attention matrix; "
            "sima_attn.explain.read_attention(model, images) reads the queries and keys of each layer",
            stacklevel=2,
        )
    masks: dict[str, Tensor] = {}
    if attention_mask is not None:
        if not isinstance(core, SimAttention):
            raise ValueError(f"{kind} takes no mask, and this model gives its attention one; convert it to 'sima'")
        across = _is_cross_attention(module) or query.shape[2] != key.shape[2]
        masks = {"key_mask" if across else "token_mask": _key_mask(attention_mask)}
    return core(query, key, value, **masks).transpose(1, 2).contiguous(), None


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


def vision_model_of(model: Any) -> nn.Module:
    """The vision model of a transformers model for images and texts, such as CLIP."""
    vision = getattr(model, "vision_model", None) if is_pretrained_model(model) else None
    if vision is None:
        raise ValueError(
            f'where="vision" is for models of transformers with a vision_model, such as CLIPModel, and this '
            f"{type(model).__name__} has none; omit it, or pass a function of path and module"
        )
    return vision


def example_pixels(model: Any) -> dict[str, Tensor]:
    """A black image of the size that a transformers model was built for, as keyword inputs."""
    if model.main_input_name != "pixel_values" and hasattr(model, "vision_model"):
        raise ValueError(
            f"{type(model).__name__} has a vision model and a text model. To convert the vision model alone, pass "
            'where="vision". A causal text model, as that of CLIP, cannot be converted; to convert both models of one '
            "that is not, as SigLIP, pass example_inputs with pixel_values and input_ids"
        )
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
