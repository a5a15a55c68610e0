"""Small models for images of 64 pixels, at most 6 M parameters: a ViT and an XCiT, with any attention of the registry.

They are what `sima reproduce miniature` compares attentions in, and what the weights in the package are of.
Shapes: B batch, N patch tokens, C channels; images [B, 3, height, width] -> logits [B, K].
"""

from typing import Any

import torch
from timm.layers import DropPath, LayerScale, to_2tuple
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_filter
from timm.models.xcit import LPI, conv3x3
from timm.models.xcit import checkpoint_filter_fn as xcit_filter
from torch import Tensor, nn

from sima_attn.models._build import choose_attention, default_cfg, register_family, relu_instead
from sima_attn.models.pretrained import shipped_cfg, weights_file
from sima_attn.models.xcit import SimXcit
from sima_attn.nn.grid import token_grid

PX, PATCH, CLASSES = 64, 4, 100

VIT: dict[str, Any] = {
    "img_size": PX,
    "patch_size": PATCH,
    "embed_dim": 192,
    "depth": 12,
    "num_heads": 3,
    "class_token": False,
    "global_pool": "avg",
}
# XCiT-Tiny's width and class attention; ten layers of its twelve, so that it stays under 6 M parameters.
XCIT: dict[str, Any] = {"img_size": PX, "embed_dim": 192, "depth": 10, "num_heads": 4, "eta": 1.0, "tokens_norm": True}
VIT_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "_1head": {"num_heads": 1},
    "_relu": {"relu": True},
    "_local": {"local_mixer": True},
}
XCIT_VARIANTS: dict[str, dict[str, Any]] = {"": {}, "_relu": {"relu": True}, "_nolpi": {"lpi": False}}
SIZES = {
    **{f"sima_vit_mini_patch4_64{suffix}": {**VIT, **variant} for suffix, variant in VIT_VARIANTS.items()},
    **{f"sima_xcit_mini_p4_64{suffix}": {**XCIT, **variant} for suffix, variant in XCIT_VARIANTS.items()},
}


def _cfg(name: str) -> dict[str, Any]:
    first = "patch_embed.proj.0.0" if "xcit" in name else "patch_embed.proj"
    shipped = shipped_cfg(name) if weights_file(name).is_file() else {}  # so that timm lists it as pretrained
    return {**default_cfg(PX, num_classes=CLASSES, first_conv=first, classifier="head"), **shipped}


torch.fx.wrap("token_grid")  # one node of a traced graph: torch.fx knows no number of tokens


class LocalBlock(Block):
    """timm's block with a local mixer, XCiT's LPI, in a residual branch of its own between attention and MLP.

    SimA's output is small beside v; a convolution of v added to it would drown it. In a branch of its own it
    does not.
    """

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        scale, drop_path = kwargs.get("init_values"), kwargs.get("drop_path", 0.0)
        self.norm3 = kwargs.get("norm_layer", nn.LayerNorm)(dim)
        self.local_mp = LPI(dim, act_layer=kwargs.get("act_layer", nn.GELU))
        self.ls3 = LayerScale(dim, init_values=scale) if scale else nn.Identity()
        self.drop_path3 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [B, N, C] of a square grid -> tokens [B, N, C]."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        rows, columns = token_grid(x.shape[1], None, "the local mixer")
        x = x + self.drop_path3(self.ls3(self.local_mp(self.norm3(x), rows, columns)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class MiniVit(VisionTransformer):
    """timm's VisionTransformer with two ways to start the projections of q and k.

    `qk_init` multiplies their initial weights. SimA's output does not change when a channel of q or k is scaled, and
    Adam's steps do not change with the gradient: the initial size of the two projections is nothing but their
    learning rate, 1 / qk_init times it.

    `qk_bias` is their initial bias. With 0, as everywhere, SimA's first weights are noise of both signs; with 1, large
    beside the weights' part, all are nearly D / N^2 and the attention starts as softmax does, as a mean of v.
    """

    def __init__(self, *args, qk_init: float = 1.0, qk_bias: float = 0.0, **kwargs) -> None:
        if qk_init <= 0:
            raise ValueError(f"qk_init must be above 0, got {qk_init}")
        if qk_bias and not kwargs.get("qkv_bias", True):
            raise ValueError(f"qk_bias={qk_bias} needs qkv_bias=True: without it there is no bias to set")
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            blocks: Any = self.blocks
            for block in blocks:
                qkv = block.attn.qkv  # the rows of v are the last, also where one projection is q and k
                qkv.weight[: -self.embed_dim].mul_(qk_init)
                if qk_bias:
                    qkv.bias[: -self.embed_dim].fill_(qk_bias)


class ConvStem(nn.Module):
    """XCiT's convolutional stem for patches of 4: two convolutions of stride 2."""

    def __init__(self, in_chans: int, dim: int, act_layer: type[nn.Module]) -> None:
        super().__init__()
        self.patch_size = PATCH
        self.proj = nn.Sequential(conv3x3(in_chans, dim // 2, 2), act_layer(), conv3x3(dim // 2, dim, 2))

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Images [B, 3, height, width] -> tokens [B, N, C] and their grid."""
        x = self.proj(images)  # [B, C, rows, columns]
        grid = (x.shape[2], x.shape[3])
        return x.flatten(2).transpose(1, 2), grid  # [B, N, C]


class MiniXcit(SimXcit):
    """XCiT with a stem for patches of 4 pixels."""

    # The stems there are have patches of 8 or 16: an image of twice the side has as many of 8 as this one of 4.
    trained_px = 2 * PX

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = PX,
        in_chans: int = 3,
        act_layer: type[nn.Module] | None = None,
        **kwargs,
    ) -> None:
        height, width = to_2tuple(img_size)
        super().__init__(
            img_size=(2 * height, 2 * width), patch_size=8, in_chans=in_chans, act_layer=act_layer, **kwargs
        )
        self.set_submodule("patch_embed", ConvStem(in_chans, self.embed_dim, act_layer or nn.GELU))
        for info in self.feature_info:
            info["reduction"] = PATCH


def build_vit(
    name: str,
    *,
    pretrained: bool = False,
    attention: str = "sima",
    attention_options: dict[str, Any] | None = None,
    token_ref: float | str | None = None,
    relu: bool = False,
    local_mixer: bool = False,
    class_token: bool = False,
    **kwargs,
) -> MiniVit:
    """A ViT of any input size; average pooling unless a class token is asked for.

    Args:
        name: A key of SIZES.
        attention: Name of a registered attention, `attention_options` its options.
        token_ref: None is the paper; "train" makes up for other image sizes than the training size's.
        relu: ReLU in place of GELU.
        local_mixer: LPI in a residual branch of its own; then the images are square and there is no class token.
        class_token: As in timm; it needs global_pool="token" to be what is classified.
        kwargs: Those of MiniVit and of timm's VisionTransformer.
    """
    if local_mixer and (class_token or kwargs.get("reg_tokens")):
        raise ValueError("the local mixer needs all tokens on a grid: class_token=False and no reg_tokens")
    if relu:
        kwargs["act_layer"] = relu_instead(kwargs.get("act_layer"))
    prefix = int(class_token) + kwargs.get("reg_tokens", 0)
    patch = kwargs["patch_size"]
    height, width = to_2tuple(kwargs["img_size"])
    layer = choose_attention(
        attention,
        options=attention_options,
        token_ref=token_ref,
        trained_tokens=(PX // patch) ** 2 + prefix,
        num_tokens=-(-height // patch) * -(-width // patch) + prefix,
        has_class_token=prefix > 0,
    )
    return build_model_with_cfg(
        MiniVit,
        name,
        pretrained,
        pretrained_filter_fn=vit_filter,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        attn_layer=layer,
        block_fn=LocalBlock if local_mixer else Block,
        class_token=class_token,
        **{"dynamic_img_size": True, "dynamic_img_pad": True, **kwargs},
    )


def build_xcit(name: str, *, pretrained: bool = False, relu: bool = False, **kwargs) -> MiniXcit:
    """An XCiT of any input size; `relu` puts ReLU in the place of every GELU (stem, LPI, MLPs).

    Other arguments are those of SimXcit (`attention`, `class_attention`, `lpi`, `token_ref`) and timm's Xcit.
    """
    if relu:
        kwargs["act_layer"] = relu_instead(kwargs.get("act_layer"))
    return build_model_with_cfg(
        MiniXcit,
        name,
        pretrained,
        pretrained_filter_fn=xcit_filter,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **kwargs,
    )


def _build(name: str, **kwargs) -> nn.Module:
    return build_xcit(name, **kwargs) if "xcit" in name else build_vit(name, **kwargs)


register_family(__name__, SIZES, {name: _cfg(name) for name in SIZES}, _build)
