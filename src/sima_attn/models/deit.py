"""DeiT with any attention of the registry: timm's VisionTransformer, sized and named.

Shapes: images [B, 3, height, width] -> logits [B, K].
"""

from functools import partial
from typing import Any

from timm.layers import to_2tuple
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

from sima_attn.models._build import build_model, choose_attention, register_family
from sima_attn.models.patch_embed import ProductPatchEmbed
from sima_attn.models.sizes import DEIT, Sizes


def build_vit(
    cls: type[VisionTransformer],
    sizes: Sizes,
    name: str,
    *,
    attention: str = "sima",
    attention_options: dict[str, Any] | None = None,
    token_ref: float | str | None = None,
    class_token: bool = True,
    **kwargs,
) -> VisionTransformer:
    """A ViT of any input size (position embeddings are resampled, sides padded to whole patches).

    Args:
        name: A key of `sizes`.
        attention: Name of a registered attention; "softmax" is the usual ViT.
        token_ref: None is the paper; "train" compensates for image sizes other than the training size.
        kwargs: Arguments of `build_model` and of timm's VisionTransformer.
    """
    prefix = int(class_token) + kwargs.get("reg_tokens", 0)
    patch, (height, width) = kwargs["patch_size"], to_2tuple(kwargs["img_size"])
    layer = choose_attention(
        attention,
        options=attention_options,
        token_ref=token_ref,
        trained_tokens=(sizes[name]["img_size"] // patch) ** 2 + prefix,
        num_tokens=-(-height // patch) * -(-width // patch) + prefix,
        prefix_tokens=prefix,
    )
    kwargs = {"dynamic_img_size": True, "dynamic_img_pad": True, "embed_layer": ProductPatchEmbed, **kwargs}
    return build_model(cls, name, filter_fn=checkpoint_filter_fn, attn_layer=layer, class_token=class_token, **kwargs)


register_family(__name__, DEIT, partial(build_vit, VisionTransformer, DEIT), first_conv="patch_embed.proj")
