"""Images -> patch tokens: timm's patch embedding, as one matrix product on a GPU.

Shapes: B batch, C channels of the image, D channels per token.
"""

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from torch import Tensor, nn

from sima_attn.nn.leaf_module import LeafModule

HALF_PRECISION = (torch.float16, torch.bfloat16)


def project_patches(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution with stride = kernel size as a product: [B, C, height, width] -> [B, D, rows, columns].

    The weight is [D, C, p, q]; p and q divide height and width.
    """
    (B, C, height, width), (p, q) = images.shape, weight.shape[2:]
    patches = images.view(B, C, height // p, p, width // q, q).permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.flatten(1), bias).permute(0, 3, 1, 2)  # [B, D, rows, columns]


class PatchConv2d(LeafModule, nn.Conv2d):
    """A convolution whose stride is its kernel size; in half precision on a CUDA device it is one matrix product.

    Patches do not overlap, so the convolution is a product over all pixels of a patch. cuDNN does not make use of that:
    with three input channels it takes about ten times as long.
    """

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, height, width] -> [B, D, rows, columns]."""
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else images.dtype
        if not images.is_cuda or dtype not in HALF_PRECISION:
            return super().forward(images)
        return project_patches(images.to(dtype), self.weight, self.bias)


class ProductPatchEmbed(PatchEmbed):
    """timm's `PatchEmbed` with a `PatchConv2d`; pass it to timm's vision transformers as `embed_layer`.

    Parameters, their names and initial values are those of `PatchEmbed`.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        conv = self.proj
        # On the meta device nothing is drawn from the random generator.
        self.proj = PatchConv2d(
            conv.in_channels,
            conv.out_channels,
            self.patch_size,
            self.patch_size,
            bias=conv.bias is not None,
            device="meta",
        )
        self.proj.weight, self.proj.bias = conv.weight, conv.bias
