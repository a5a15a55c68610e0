"""DeiT with any attention of the registry: timm's VisionTransformer, sized and named.

Shapes: images [B, 3, height, width] -> logits [B, K].
"""

from typing import Any

from timm.layers import to_2tuple
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from sima_attn.models._build import choose_attention, default_cfg, register_family, relu_instead

WIDTHS: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 192, "num_heads": 3},
    "small": {"embed_dim": 384, "num_heads": 6},
    "base": {"embed_dim": 768, "num_heads": 12},
}
# The variants of the paper: a single head, ReLU in place of GELU (then the whole network is free of exp()),
# and the LayerScale that the authors' own listing has.
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "_1head": {"num_heads": 1},
    "_relu": {"relu": True},
    "_layerscale": {"init_values": 1.0},
}
SIZES = {
    f"sima_deit_{width}_patch16_{px}{suffix}": {**size, **variant, "img_size": px}
    for width, size in WIDTHS.items()
    for px in (224, 384)
    for suffix, variant in VARIANTS.items()
}
CFGS = {
    name: default_cfg(size["img_size"], first_conv="patch_embed.proj", classifier="head")
    for name, size in SIZES.items()
}
PATCH = 16


def build_deit(
    name: str,
    *,
    pretrained: bool = False,
    attention: str = "sima",
    attention_options: dict[str, Any] | None = None,
    token_ref: float | str | None = None,
    relu: bool = False,
    class_token: bool = True,
    **kwargs,
) -> VisionTransformer:
    """A DeiT of any input size (position embeddings are resampled, sides padded to whole patches).

    Args:
        name: A key of SIZES.
        attention: Name of a registered attention; "softmax" is DeiT itself.
        attention_options: Options of that attention.
        token_ref: None is the paper; "train" makes up for other image sizes than the training size's.
        relu: ReLU in place of GELU.
        class_token: As in timm.
        kwargs: timm's VisionTransformer arguments.
    """
    prefix = int(class_token) + kwargs.get("reg_tokens", 0)
    if relu:
        kwargs["act_layer"] = relu_instead(kwargs.get("act_layer"))
    patch = kwargs.setdefault("patch_size", PATCH)
    height, width = to_2tuple(kwargs.get("img_size", SIZES[name]["img_size"]))
    trained = SIZES[name]["img_size"]
    layer = choose_attention(
        attention,
        options=attention_options,
        token_ref=token_ref,
        trained_tokens=(trained // patch) ** 2 + prefix,
        num_tokens=-(-height // patch) * -(-width // patch) + prefix,
        has_class_token=prefix > 0,
    )
    kwargs.setdefault("dynamic_img_size", True)
    kwargs.setdefault("dynamic_img_pad", True)
    kwargs.setdefault("depth", 12)
    return build_model_with_cfg(
        VisionTransformer,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        attn_layer=layer,
        class_token=class_token,
        **kwargs,
    )


register_family(__name__, SIZES, CFGS, build_deit)
