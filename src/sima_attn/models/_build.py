"""What the three families share: how an attention is chosen, and how a size becomes a model that timm knows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, register_model
from torch import nn

from sima_attn.models.pretrained import shipped_cfg
from sima_attn.nn import Attention, attention_class

# Settings of timm's and our model classes that change what the same weights compute, with their defaults.
FUNCTION_DEFAULTS: dict[str, Any] = {
    "global_pool": "token",
    "use_pos_embed": True,
    "pos_embed": "learn",
    "no_embed_class": False,
    "pool_include_prefix": False,
    "norm_layer": None,
}
# Settings of a size that leave the function alone: any image size runs, and the weights replace initial values.
FREE_SETTINGS = ("img_size", "eta", "init_values", "relu")  # relu is compared as the activation


def default_cfg(size: int = 224, **kwargs) -> dict[str, Any]:
    """timm's facts about a model. The paper evaluates with a crop ratio of 1.0."""
    return {
        "num_classes": 1000,
        "input_size": (3, size, size),
        "pool_size": None,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "license": "mit",
        **kwargs,
    }


def register_family(
    module: str,
    sizes: Mapping[str, Mapping[str, Any]],
    cfgs: Mapping[str, Mapping[str, Any]],
    build: Callable[..., nn.Module],
) -> None:
    """Register every size of a family with timm, as `@register_model` does for a function written out."""
    home = sys.modules[module]
    home.default_cfgs = generate_default_cfgs({name: dict(cfg) for name, cfg in cfgs.items()})  # type: ignore[attr-defined]
    for name, size in sizes.items():
        entry = _entry(name, size, build)
        entry.__name__ = entry.__qualname__ = name
        entry.__module__ = module
        setattr(home, name, register_model(entry))


def _entry(name: str, size: Mapping[str, Any], build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        overlay = kwargs.get("pretrained_cfg_overlay") or {}
        if pretrained and not overlay.get("file"):
            kwargs["pretrained_cfg_overlay"] = {**shipped_cfg(name), **overlay}
            _check_as_trained(name, size, kwargs)
        return build(name, pretrained=pretrained, **{**size, **kwargs})

    return create


def _check_as_trained(name: str, size: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where the weights in the package would load into another function than the one they were trained as."""
    own, asked = _function(size), _function({**size, **kwargs})
    trained_classes = kwargs["pretrained_cfg_overlay"].get("num_classes")
    if kwargs.get("num_classes", trained_classes) != trained_classes:
        del own["global_pool"]  # without the trained head any pooling gives features
    for key, value in own.items():
        if asked[key] != value:
            raise ValueError(
                f"the weights of {name} were trained with {key}={value!r}, got {asked[key]!r}: leave it away, or use "
                "pretrained=False and train the model; its load_state_dict() takes the weights as a start"
            )


def _function(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make another function of weights of the same names and shapes."""
    attention, options = settings.get("attention", "sima"), settings.get("attention_options") or {}
    stages = [options] if isinstance(options, Mapping) else options  # CvT takes one a stage
    act = settings.get("act_layer") or ("relu" if settings.get("relu") else "gelu")
    plain = {**FUNCTION_DEFAULTS, **settings}
    return {
        **{key: plain[key] for key in plain if key not in (*FREE_SETTINGS, "act_layer", "attention_options")},
        "attention": attention,
        "norm": ", ".join(sorted({stage.get("norm", "l1") for stage in stages})),
        "eps": next((stage["eps"] for stage in stages if stage.get("eps") is not None), None),
        "class_attention": settings.get("class_attention", "sima" if attention == "sima" else "softmax"),
        "activation": getattr(act, "__name__", str(act)).lower(),
        "token_ref": _other_ref(settings.get("token_ref"), *(stage.get("token_ref") for stage in stages)),
        "class_token_ref": _other_ref(settings.get("class_token_ref")),
    }


def _other_ref(*token_refs: float | str | None) -> float | str | None:
    """The first reference by which the output is scaled at the training size; "train" scales at other sizes only."""
    return next((token_ref for token_ref in token_refs if token_ref not in (None, "train")), None)


def choose_attention(
    attention: str,
    *,
    options: Mapping[str, Any] | None,
    token_ref: float | str | None,
    trained_tokens: int,
    num_tokens: int,
    has_class_token: bool,
) -> type[Attention]:
    """The attention class of a model, its options fixed.

    `token_ref="train"` stands for the number of tokens at the training size, `trained_tokens`.
    """
    cls = attention_class(attention)
    fixed = dict(options or {})
    reference = resolve_token_ref(token_ref, trained_tokens)
    if reference is not None:
        if attention != "sima":
            raise ValueError(
                f"token_ref is SimA's own: it must be None with attention={attention!r}, got {token_ref!r}"
            )
        if fixed.get("token_ref") not in (None, reference):
            raise ValueError(
                f"token_ref={token_ref!r} and attention_options={{'token_ref': {fixed['token_ref']!r}}} contradict "
                "each other; give one of them"
            )
        fixed["token_ref"] = reference
    if cls.needs_grid and has_class_token:
        raise ValueError(
            f"attention={attention!r} needs all its tokens on a grid, and this model has a class token among them; "
            "use class_token=False, global_pool='avg'"
        )
    if cls.needs_num_tokens:
        fixed.setdefault("num_tokens", num_tokens)
    return attention_class(attention, **fixed)


def resolve_token_ref(token_ref: float | str | None, trained_tokens: int) -> float | None:
    """None, a number of tokens, or "train" for the number at the training size."""
    if isinstance(token_ref, str):
        if token_ref != "train":
            raise ValueError(f"token_ref must be None, a number of tokens or 'train', got {token_ref!r}")
        return float(trained_tokens)
    return token_ref


def relu_instead(act_layer: type[nn.Module] | None) -> type[nn.Module]:
    """ReLU, unless another activation was asked for by name."""
    if act_layer not in (None, nn.ReLU):
        raise ValueError(f"relu=True and act_layer={act_layer!r} contradict each other; give one of them")
    return nn.ReLU
