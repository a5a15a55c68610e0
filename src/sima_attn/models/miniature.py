"""Small models for images of 64 pixels, at most 6 M parameters: a ViT and an XCiT, with any attention of the registry.

`sima reproduce miniature` compares attentions in these models, and the package contains weights for some of them.
Shapes: B batch, N patch tokens, C channels; images [B, 3, height, width] -> logits [B, K].
"""

from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, LayerScale, to_2tuple
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.xcit import LPI, checkpoint_filter_fn, conv3x3
from torch import Tensor, nn

from sima_attn.models._build import build_model, register_family
from sima_attn.models.deit import build_vit
from sima_attn.models.sizes import MINI_PX, MINI_VIT, MINI_XCIT
from sima_attn.models.xcit import SimXcit
from sima_attn.nn.grid import Grid, OnGrid, token_grid

PATCH, CLASSES = 4, 100


torch.fx.wrap("token_grid")  # one node of a traced graph: torch.fx knows no number of tokens


class LocalBlock(Block, OnGrid):
    """timm's block with a local mixer, XCiT's LPI, in a residual branch between attention and MLP.

    It has its own branch because SimA's output is small compared to v: a convolution of v added to it would dominate.
    """

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        scale, drop_path = kwargs.get("init_values"), kwargs.get("drop_path", 0.0)
        self.norm3 = kwargs.get("norm_layer", nn.LayerNorm)(dim)
        self.local_mp = LPI(dim, act_layer=kwargs.get("act_layer", nn.GELU))
        self.ls3 = LayerScale(dim, init_values=scale) if scale else nn.Identity()
        self.drop_path3 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid: Grid | None = None,
    ) -> Tensor:
        """Tokens [B, N, C] of a grid, by default that of the image -> tokens [B, N, C]."""
        rows, columns = token_grid(x.shape[1], [grid] if grid else self.likely_grids, "the local mixer")
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
        x = x + self.drop_path3(self.ls3(self.local_mp(self.norm3(x), rows, columns)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class MiniVit(VisionTransformer):
    """timm's VisionTransformer with two options for the initial values of the projections to q and k.

    `qk_init` multiplies their initial weights. SimA's output does not change when a channel of q or k is scaled, and
    Adam's steps do not depend on the size of the gradient. The initial size of the two projections therefore only
    changes their learning rate, by a factor of 1 / qk_init.

    `qk_bias` is their initial bias. With 0, the default, SimA's first attention weights are noise of both signs. With
    1, which is large compared to the weights' part, all are close to D / N^2, so that the attention starts as a mean of
    v, like softmax.
    """

    def __init__(self, *args, qk_init: float = 1.0, qk_bias: float = 0.0, **kwargs) -> None:
        if qk_bias and not kwargs.get("qkv_bias", True):
            raise ValueError(f"qk_bias={qk_bias} needs qkv_bias=True: without it there is no bias to set")
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            blocks: Any = self.blocks
            for block in blocks:
                qkv = block.attn.qkv  # the last rows are those of v, also where q and k share one projection
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

    # SimXcit supports patches of 8 and 16. An image of twice the side has as many patches of 8 as this one of 4.
    trained_px = 2 * MINI_PX

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = MINI_PX,
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


def build_mini_vit(name: str, *, local_mixer: bool = False, class_token: bool = False, **kwargs) -> VisionTransformer:
    """A ViT of any input size; average pooling unless `class_token` is True and `global_pool` is "token".

    `local_mixer` adds LPI in a residual branch. Other arguments are those of `build_vit` and MiniVit.
    """
    if local_mixer and (class_token or kwargs.get("reg_tokens")):
        raise ValueError("the local mixer needs all tokens on a grid: use class_token=False and no reg_tokens")
    block = LocalBlock if local_mixer else Block
    return build_vit(MiniVit, MINI_VIT, name, class_token=class_token, block_fn=block, **kwargs)


register_family(__name__, MINI_VIT, build_mini_vit, first_conv="patch_embed.proj", num_classes=CLASSES)
build_mini_xcit = partial(build_model, MiniXcit, filter_fn=checkpoint_filter_fn)
register_family(__name__, MINI_XCIT, build_mini_xcit, first_conv="patch_embed.proj.0.0", num_classes=CLASSES)
