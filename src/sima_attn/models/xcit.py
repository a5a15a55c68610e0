"""XCiT with any attention of the registry: timm's Xcit with another attention.

Shapes: B batch, N patch tokens, C channels; images [B, 3, height, width] -> logits [B, K].
"""

from functools import partial
from typing import Any

from timm.layers import to_2tuple
from timm.models.xcit import Xcit, checkpoint_filter_fn
from torch import Tensor, nn

from sima_attn._errors import check_known
from sima_attn.models._build import build_model, choose_attention, register_family, resolve_token_ref
from sima_attn.models.sizes import XCIT
from sima_attn.nn import SimClassAttention

TRAINED_PX = 224
CLASS_ATTENTIONS = ("sima", "softmax")


class SimXcit(Xcit):
    """timm's Xcit with a choice of self-attention, class attention and local patch interaction (LPI).

    `class_token_ref` r multiplies the output of SimA's class attention by N / r, independently of `token_ref`; "train"
    is the number of its tokens at the training size. Without that factor, as in the paper, an untrained class token
    hardly depends on the image; with r = sqrt(N) it depends on it as much as with softmax.
    """

    trained_px = TRAINED_PX

    def __init__(
        self,
        *,
        attention: str = "sima",
        attention_options: dict[str, Any] | None = None,
        class_attention: str | None = None,
        token_ref: float | str | None = None,
        class_token_ref: float | str | None = None,
        lpi: bool = True,
        img_size: int | tuple[int, int] = TRAINED_PX,
        patch_size: int = 16,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_rate: float = 0.0,
        **kwargs,
    ) -> None:
        if patch_size not in (8, 16):
            raise ValueError(f"the convolutional stem of XCiT has patch_size 8 or 16, got {patch_size}")
        class_attention = class_attention or ("sima" if attention == "sima" else "softmax")
        check_known("class attention", class_attention, CLASS_ATTENTIONS)
        if class_token_ref is not None and class_attention != "sima":
            raise ValueError(f"class_token_ref is for SimA's class attention, got class_attention={class_attention!r}")
        height, width = to_2tuple(img_size)
        whole = (-(-height // patch_size) * patch_size, -(-width // patch_size) * patch_size)
        super().__init__(
            img_size=whole,  # timm only stores it: any size runs
            patch_size=patch_size,
            num_heads=num_heads,
            qkv_bias=qkv_bias,
            proj_drop_rate=proj_drop_rate,
            drop_rate=drop_rate,
            **kwargs,
        )
        self.pos_drop = ContiguousTokens(self.pos_drop.p)
        trained_tokens = (self.trained_px // patch_size) ** 2
        layer = choose_attention(
            attention,
            options=attention_options,
            token_ref=token_ref,
            trained_tokens=trained_tokens,
            num_tokens=(whole[0] // patch_size) * (whole[1] // patch_size),
            prefix_tokens=0,  # the class token joins after the self-attention blocks
        )
        for i, block in enumerate(self.blocks):
            drops: dict[str, Any] = {"attn_drop": attn_drop_rate, "proj_drop": proj_drop_rate}
            block.set_submodule("attn", layer(self.embed_dim, num_heads, qkv_bias=qkv_bias, **drops))
            if not lpi:
                self.blocks[i] = BlockWithoutLpi(block)
        class_ref = resolve_token_ref(token_ref if class_token_ref is None else class_token_ref, trained_tokens + 1)
        for block in self.cls_attn_blocks:
            if class_attention == "sima":
                block.attn = SimClassAttention(
                    self.embed_dim,
                    num_heads,
                    qkv_bias=qkv_bias,
                    attn_drop=attn_drop_rate,
                    proj_drop=drop_rate,
                    token_ref=class_ref,
                )
        self.apply(self._init_weights)


class ContiguousTokens(nn.Dropout):
    """Dropout of tokens [B, N, C], which then lie in memory token by token.

    The convolutional stem leaves them channel by channel, and the residual connections would keep them so: every layer
    norm would have to copy them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, N, C] -> tokens [B, N, C]."""
        return super().forward(x.contiguous())


class BlockWithoutLpi(nn.Module):
    """The paper's ablation: an XCiT block without the local patch interaction."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.drop_path1, self.gamma1 = block.norm1, block.attn, block.drop_path1, block.gamma1
        self.norm2, self.mlp, self.drop_path2, self.gamma2 = block.norm2, block.mlp, block.drop_path2, block.gamma2

    def forward(self, x: Tensor, H: int, W: int) -> Tensor:
        """Tokens [B, N, C] -> tokens [B, N, C]; only LPI would use the grid H x W."""
        x = x + self.drop_path1(self.gamma1 * self.attn(self.norm1(x)))
        return x + self.drop_path2(self.gamma2 * self.mlp(self.norm2(x)))


build_xcit = partial(build_model, SimXcit, filter_fn=checkpoint_filter_fn)
register_family(__name__, XCIT, build_xcit, first_conv="patch_embed.proj.0.0")
