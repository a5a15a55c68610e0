"""Feature pyramid: maps of a backbone -> five maps at strides 4, 8, 16, 32 and 64 with 256 channels each.

Shapes: B batch, C channels; maps [B, C, rows, columns].
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from sima_attn.detect.backbone import BatchLayout, BlockMaps

STRIDES = (4, 8, 16, 32)
COARSEST = 64  # every second cell of the last level, for the largest anchors
CHANNELS = 256


def to_stride(dim: int, have: int, want: int, act: type[nn.Module]) -> nn.Module:
    """A module that changes the stride of a map from `have` to `want`, as in XCiT's detectors.

    Upsampling uses transposed convolutions that double the grid, with BatchNorm and an activation between them;
    downsampling uses max-pooling.
    """
    doublings = round(math.log2(have / want))
    if have != want * 2.0**doublings:
        raise ValueError(f"a stride of {have} cannot be changed to {want}: patches of 4, 8 or 16 pixels are supported")
    if doublings <= 0:
        return nn.MaxPool2d(2**-doublings) if doublings else nn.Identity()
    layers: list[nn.Module] = [nn.ConvTranspose2d(dim, dim, kernel_size=2, stride=2)]
    for _ in range(doublings - 1):
        layers += [nn.BatchNorm2d(dim), act(), nn.ConvTranspose2d(dim, dim, kernel_size=2, stride=2)]
    return nn.Sequential(*layers)


class Pyramid(nn.Module):
    """Images [B, 3, height, width] with sides that are multiples of 32 -> maps named "0" to "3" and "pool".

    The activation between the transposed convolutions is that of the backbone: with ReLU there is no exp() here.

    Args:
        maps: The backbone.
        norm: Apply a LayerNorm to each map first. The outputs of the blocks grow from block to block, and the final
            norm of the classifier is not used here. The paper's detector has no such norms.
    """

    def __init__(self, maps: BlockMaps, norm: bool = False) -> None:
        super().__init__()
        self.maps = maps
        act = nn.GELU if any(isinstance(module, nn.GELU) for module in maps.modules()) else nn.ReLU
        # CvT has three maps; the last one also feeds the coarsest level.
        self.sources = [min(i, len(maps.dims) - 1) for i in range(len(STRIDES))]
        # Per position, so that padding does not change the features of the images.
        self.norms = nn.ModuleList(LayerNorm2d(dim) if norm else nn.Identity() for dim in maps.dims)
        self.rescale = nn.ModuleList(
            to_stride(maps.dims[i], maps.strides[i], want, act) for i, want in zip(self.sources, STRIDES, strict=True)
        )
        self.fpn = FeaturePyramidNetwork([maps.dims[i] for i in self.sources], CHANNELS)
        self.out_channels = CHANNELS

    def forward(self, images: Tensor, layout: BatchLayout | None = None) -> OrderedDict[str, Tensor]:
        """The maps, finest first, with zeros in the padding."""
        found = [norm(x) for norm, x in zip(self.norms, self.maps(images, layout), strict=True)]
        levels = [rescale(found[i]) for i, rescale in zip(self.sources, self.rescale, strict=True)]
        if layout is None:
            out = self.fpn(OrderedDict((str(i), x) for i, x in enumerate(levels)))
        else:
            out = self.merge(levels, [layout.mask(stride, images.device) for stride in STRIDES])
        out["pool"] = out["3"][..., ::2, ::2]
        return out

    def merge(self, levels: list[Tensor], masks: list[Tensor]) -> OrderedDict[str, Tensor]:
        """torchvision's FPN, with the padding set to zero before and after each convolution."""
        merged: list[Tensor] = []
        above: Tensor | None = None
        for x, mask, lateral, smooth in reversed(
            list(zip(levels, masks, self.fpn.inner_blocks, self.fpn.layer_blocks, strict=True))
        ):
            x = lateral(x)
            if above is not None:
                x = x + F.interpolate(above, size=x.shape[-2:], mode="nearest")
            above = x * mask
            merged.insert(0, smooth(above) * mask)
        return OrderedDict((str(i), x) for i, x in enumerate(merged))
