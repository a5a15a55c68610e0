"""Training images of a detector: flipped, at one of several scales, half of them a crop first.

An image is [3, height, width] of bytes; a target has boxes [n, 4] (x0, y0, x1, y1), labels [n] and masks
[n, height, width]. Randomness is torch's, so a seed fixes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn._settings import PositiveInt, Probability, Range
from sima_attn.data.images import MAX_RESIZED_RATIO

Target = dict[str, Tensor]
LEAST_SIDE = 1.0  # pixels; what a crop leaves of a box may be less, and then goes


@dataclass(frozen=True)
class Augment:
    """How training images are varied; lengths in pixels.

    Attributes:
        flip: Probability of a mirror image.
        sides: Least and greatest shorter side; one of them or of those in between, in steps of 32.
        longest: The most that the longer side may have.
        crop: Probability of the crop branch: first to one of `crop_sides`, and of that a crop.
        crop_sides: Least and greatest shorter side before the crop, in steps of 100.
        crop_size: Least and greatest side of a crop.
    """

    flip: Probability = 0.5
    sides: Range[PositiveInt] = (480, 800)
    longest: int = 1333
    crop: Probability = 0.5
    crop_sides: Range[PositiveInt] = (400, 600)
    crop_size: Range[PositiveInt] = (384, 600)

    def check_relations(self) -> None:
        """Raise where the longer side is limited to less than the shorter one."""
        if self.longest < self.sides[1]:
            raise ValueError(
                f"augment.longest must be at least the largest of augment.sides={self.sides}, got {self.longest}"
            )

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        """An image and its target, varied."""
        if torch.rand(()) < self.flip:
            image, target = flipped(image, target)
        if torch.rand(()) < self.crop:
            side = _one_of(self.crop_sides, 100)
            image, target = resized(image, target, side, MAX_RESIZED_RATIO * side)  # a strip stays affordable
            least, most = self.crop_size
            height, width = (_between(min(side, least), min(side, most)) for side in image.shape[1:])
            top, left = _between(0, image.shape[1] - height), _between(0, image.shape[2] - width)
            image, target = cropped(image, target, top, left, height, width)
        return resized(image, target, _one_of(self.sides, 32), self.longest)


def flipped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Left and right exchanged."""
    x0, y0, x1, y1 = target["boxes"].unbind(1)
    boxes = torch.stack([image.shape[2] - x1, y0, image.shape[2] - x0, y1], dim=1)
    return image.flip(2), {**target, "boxes": boxes, "masks": target["masks"].flip(2)}


def resized(image: Tensor, target: Target, side: int, longest: int | None = None) -> tuple[Tensor, Target]:
    """The shorter side brought to `side`, or to less where the longer one would pass `longest`."""
    height, width = image.shape[1:]
    scale = side / min(height, width)
    if longest is not None:
        scale = min(scale, longest / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    if size == (height, width):
        return image, target
    # Bilinear without smoothing: what evaluation does.
    scaled = F.interpolate(image[None].float(), size=size, mode="bilinear", align_corners=False)[0]
    masks = target["masks"].new_zeros(0, *size)
    if len(target["masks"]):
        masks = F.interpolate(target["masks"][:, None], size=size, mode="nearest")[:, 0]
    factors = torch.tensor([size[1] / width, size[0] / height]).repeat(2)
    return scaled.round().to(image.dtype), {**target, "boxes": target["boxes"] * factors, "masks": masks}


def cropped(image: Tensor, target: Target, top: int, left: int, height: int, width: int) -> tuple[Tensor, Target]:
    """A part of the image; objects outside it go, those across its border are cut."""
    window = (slice(top, top + height), slice(left, left + width))
    boxes = target["boxes"] - torch.tensor([left, top, left, top])
    limits = torch.tensor([width, height, width, height])
    boxes = torch.minimum(boxes.clamp(min=0), limits)
    kept = ((boxes[:, 2:] - boxes[:, :2]) >= LEAST_SIDE).all(dim=1)
    masks = target["masks"][kept][:, *window]
    return image[:, *window], {**target, "boxes": boxes[kept], "labels": target["labels"][kept], "masks": masks}


def _between(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def _one_of(ends: tuple[int, int], step: int) -> int:
    sides = [*range(ends[0], ends[1], step), ends[1]]
    return sides[_between(0, len(sides) - 1)]
