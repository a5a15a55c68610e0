"""Feature maps of a backbone -> a pyramid of five maps at strides 4, 8, 16, 32 and 64, all of 256 channels.

Shapes: B batch, C channels; maps [B, C, rows, columns].
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from sima_attn.detect.backbone import BlockMaps, Inside

STRIDES = (4, 8, 16, 32)
COARSEST = 64  # every second cell of the last level, for the largest anchors
CHANNELS = 256


def to_stride(dim: int, have: int, want: int, act: type[nn.Module]) -> nn.Module:
    """A map of stride `have` -> one of stride `want`, as XCiT's detectors have it.

    Finer by transposed convolutions, each doubling the grid, with BatchNorm and an activation between them;
    coarser by max-pooling.
    """
    doublings = round(math.log2(have / want))
    if have != want * 2.0**doublings:
        raise ValueError(f"a map of stride {have} cannot be brought to stride {want}: they differ by no power of two")
    if doublings <= 0:
        return nn.MaxPool2d(2**-doublings) if doublings else nn.Identity()
    layers: list[nn.Module] = [nn.ConvTranspose2d(dim, dim, kernel_size=2, stride=2)]
    for _ in range(doublings - 1):
        layers += [nn.BatchNorm2d(dim), act(), nn.ConvTranspose2d(dim, dim, kernel_size=2, stride=2)]
    return nn.Sequential(*layers)


class Pyramid(nn.Module):
    """Images [B, 3, height, width], sides multiples of 32 -> maps of CHANNELS channels by name: "0" to "3", "pool".

    The activation between the transposed convolutions is the backbone's: with ReLU nothing here needs an exp().

    Args:
        maps: The backbone.
        norm: Whether each map passes a LayerNorm of its own first. The maps are what the blocks hand on, and that
            grows from block to block; a classifier has a norm behind the last one, which is not here. The paper's
            detector has none.
    """

    def __init__(self, maps: BlockMaps, norm: bool = False) -> None:
        super().__init__()
        self.maps = maps
        act = nn.GELU if any(isinstance(module, nn.GELU) for module in maps.modules()) else nn.ReLU
        # CvT has three maps; the last one feeds the coarsest level as well.
        self.sources = [min(i, len(maps.dims) - 1) for i in range(len(STRIDES))]
        # Position by position: the padding of a batch changes nothing for the images in it.
        self.norms = nn.ModuleList(LayerNorm2d(dim) if norm else nn.Identity() for dim in maps.dims)
        self.rescale = nn.ModuleList(
            to_stride(maps.dims[i], maps.strides[i], want, act) for i, want in zip(self.sources, STRIDES, strict=True)
        )
        self.fpn = FeaturePyramidNetwork([maps.dims[i] for i in self.sources], CHANNELS)
        self.out_channels = CHANNELS

    def forward(self, images: Tensor, inside: Inside | None = None) -> OrderedDict[str, Tensor]:
        """The maps, finest first; zeros where `inside` says that there is no image."""
        found = [norm(x) for norm, x in zip(self.norms, self.maps(images, inside), strict=True)]
        levels = [rescale(found[i]) for i, rescale in zip(self.sources, self.rescale, strict=True)]
        if inside is None:
            out = self.fpn(OrderedDict((str(i), x) for i, x in enumerate(levels)))
        else:
            out = self.merge(levels, [inside.mask(stride, images.device) for stride in STRIDES])
        out["pool"] = out["3"][..., ::2, ::2]
        return out

    def merge(self, levels: list[Tensor], masks: list[Tensor]) -> OrderedDict[str, Tensor]:
        """What torchvision's FPN does, with zeros in the padding before and after each of its convolutions."""
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
