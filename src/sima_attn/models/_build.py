"""Shared by the model families: register sizes with timm, build a model, choose its attention."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from sima_attn.models.pretrained import shipped_cfg, weights_file
from sima_attn.nn import Attention, attention_class, follow_image_grid

# Settings of timm's and our model classes that change what the same weights compute, with their defaults.
FUNCTION_DEFAULTS: dict[str, Any] = {
    "global_pool": "token",
    "use_pos_embed": True,
    "pos_embed": "learn",
    "no_embed_class": False,
    "pool_include_prefix": False,
    "norm_layer": None,
}
# Settings of a size that do not change the function: any image size runs, and the weights replace initial values.
FREE_SETTINGS = ("img_size", "eta", "init_values", "relu")  # relu is compared as the activation


def register_family(
    module: str,
    sizes: Mapping[str, Mapping[str, Any]],
    build: Callable[..., nn.Module],
    *,
    first_conv: str,
    num_classes: int = 1000,
) -> None:
    """Register a function per size with timm, as `@register_model` does for a function of that name in `module`.

    A size is the arguments of `build` for one model; `img_size` is the training size.
    """
    home: Any = sys.modules[module]
    cfgs: dict[str, Any] = {name: _default_cfg(name, size, first_conv, num_classes) for name, size in sizes.items()}
    home.default_cfgs = {**getattr(home, "default_cfgs", {}), **generate_default_cfgs(cfgs)}
    for name, size in sizes.items():
        create = _create_function(name, size, build)
        create.__name__ = create.__qualname__ = name
        create.__module__ = module
        setattr(home, name, register_model(create))


def _default_cfg(name: str, size: Mapping[str, Any], first_conv: str, num_classes: int) -> dict[str, Any]:
    """timm's configuration of a model. The paper evaluates with a crop ratio of 1.0."""
    px = size.get("img_size", 224)
    cfg = {
        "num_classes": num_classes,
        "input_size": (3, px, px),
        "pool_size": None,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "license": "mit",
        "first_conv": first_conv,
        "classifier": "head",
    }
    # With the file of the weights, timm lists the model as pretrained.
    return {**cfg, **shipped_cfg(name)} if weights_file(name).is_file() else cfg


def _create_function(name: str, size: Mapping[str, Any], build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        overlay = kwargs.get("pretrained_cfg_overlay") or {}
        if pretrained and not overlay.get("file"):
            kwargs["pretrained_cfg_overlay"] = {**shipped_cfg(name), **overlay}
            _check_as_trained(name, size, kwargs)
        return build(name, pretrained=pretrained, **{**size, **kwargs})

    return create


def build_model(
    cls: type[nn.Module],
    name: str,
    *,
    pretrained: bool = False,
    relu: bool = False,
    filter_fn: Callable | None = None,
    **kwargs,
) -> Any:
    """A model of class `cls` with timm's configuration of `name`.

    `relu` uses ReLU in place of every GELU; `filter_fn` renames the weights of a checkpoint; `kwargs` are for `cls`.
    """
    if relu:
        if kwargs.get("act_layer") not in (None, nn.ReLU):
            raise ValueError(f"relu=True and act_layer={kwargs['act_layer']!r} contradict each other; pass one of them")
        kwargs["act_layer"] = nn.ReLU
    feature_cfg = {"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"}
    model = build_model_with_cfg(
        cls, name, pretrained, pretrained_filter_fn=filter_fn, feature_cfg=feature_cfg, **kwargs
    )
    follow_image_grid(model)
    return model


def _check_as_trained(name: str, size: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    """Raise unless the model computes the function that the weights in the package were trained for."""
    trained, given = _function_settings(size), _function_settings({**size, **kwargs})
    trained_classes = kwargs["pretrained_cfg_overlay"].get("num_classes")
    if kwargs.get("num_classes", trained_classes) != trained_classes:
        del trained["global_pool"]  # without the trained head any pooling gives features
    for key, value in trained.items():
        if given[key] != value:
            raise ValueError(
                f"the weights of {name} were trained with {key}={value!r}, got {given[key]!r}: omit {key}, or use "
                "pretrained=False and train the model, starting from the weights with load_state_dict()"
            )


def _function_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change what weights of the same names and shapes compute."""
    attention, options = settings.get("attention", "sima"), settings.get("attention_options") or {}
    stages = [options] if isinstance(options, Mapping) else options  # CvT has one per stage
    act = settings.get("act_layer") or ("relu" if settings.get("relu") else "gelu")
    plain = {**FUNCTION_DEFAULTS, **settings}
    return {
        **{key: plain[key] for key in plain if key not in (*FREE_SETTINGS, "act_layer", "attention_options")},
        "attention": attention,
        "norm": ", ".join(sorted({stage.get("norm", "l1") for stage in stages})),
        "eps": next((stage["eps"] for stage in stages if stage.get("eps") is not None), None),
        "class_attention": settings.get("class_attention", "sima" if attention == "sima" else "softmax"),
        "activation": getattr(act, "__name__", str(act)).lower(),
        "token_ref": _scaling_ref(settings.get("token_ref"), *(stage.get("token_ref") for stage in stages)),
        "class_token_ref": _scaling_ref(settings.get("class_token_ref")),
    }


def _scaling_ref(*token_refs: float | str | None) -> float | str | None:
    """The first reference that scales the output at the training size; "train" scales it at other sizes only."""
    return next((token_ref for token_ref in token_refs if token_ref not in (None, "train")), None)


def choose_attention(
    attention: str,
    *,
    options: Mapping[str, Any] | None,
    token_ref: float | str | None,
    trained_tokens: int,
    num_tokens: int,
    prefix_tokens: int,
) -> type[Attention]:
    """The attention class of a model, with its options fixed.

    `token_ref="train"` stands for the number of tokens at the training size, `trained_tokens`. `prefix_tokens` of
    `num_tokens` are not on the grid.
    """
    cls = attention_class(attention)
    fixed = dict(options or {})
    reference = resolve_token_ref(token_ref, trained_tokens)
    if reference is not None:
        if attention != "sima":
            raise ValueError(f"token_ref is for SimA attention only: omit it with attention={attention!r}")
        if fixed.get("token_ref") not in (None, reference):
            raise ValueError("token_ref and the token_ref of attention_options contradict each other; pass one of them")
        fixed["token_ref"] = reference
    if cls.needs_grid and prefix_tokens:
        raise ValueError(
            f"attention={attention!r} needs all its tokens on a grid, and this model has a class token among them; "
            "use class_token=False, global_pool='avg'"
        )
    if cls.needs_num_tokens:
        fixed.setdefault("num_tokens", num_tokens)
    if cls.has_local_branch:
        fixed.setdefault("prefix_tokens", prefix_tokens)
    return attention_class(attention, **fixed)


def resolve_token_ref(token_ref: float | str | None, trained_tokens: int) -> float | None:
    """None, a number of tokens, or "train" for the number at the training size."""
    if isinstance(token_ref, str):
        if token_ref != "train":
            raise ValueError(f"token_ref must be None, a number of tokens or 'train', got {token_ref!r}")
        return float(trained_tokens)
    return token_ref
