"""Augmentation of detection training images: random flip, random crop, random size, by torchvision.

An image is [3, height, width] as bytes. A target has boxes [n, 4] (x0, y0, x1, y1), labels [n] and, if
there are any, masks [n, height, width]. All draws come from torch's generator, so a seed fixes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sima_attn._settings import PositiveInt, Probability, Range
from sima_attn.data.images import MAX_RESIZED_RATIO

Target = dict[str, Tensor]
MIN_SIDE = 1.0  # pixels; cropped boxes that are smaller are removed


@dataclass(frozen=True)
class Augment:
    """Augmentation settings; lengths are in pixels.

    Attributes:
        flip: Probability of a horizontal flip.
        sides: Range of the shorter side after augmentation, in steps of 32.
        longest: Maximum of the longer side; it takes precedence over `sides`.
        crop: Probability of a random crop before the final resize.
        crop_sides: Range of the shorter side before that crop, in steps of 100.
        crop_size: Range of the sides of the crop.
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
        """Augment an image and its target."""
        from torchvision import tv_tensors  # heavy, and recipes import this module
        from torchvision.transforms.v2 import functional as F

        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=image.shape[1:])
        sample: list[Tensor] = [tv_tensors.Image(image), boxes]
        sample += [tv_tensors.Mask(target["masks"])] if "masks" in target else []
        labels = target["labels"]
        if torch.rand(()) < self.flip:
            sample = [F.horizontal_flip(x) for x in sample]
        if torch.rand(()) < self.crop:
            side = _choose(self.crop_sides, 100)
            sample = resize(sample, side, MAX_RESIZED_RATIO * side)  # limits the size of very long images
            sizes = [_randint(*(min(side, end) for end in self.crop_size)) for side in sample[0].shape[1:]]
            corner = [_randint(0, side - size) for side, size in zip(sample[0].shape[1:], sizes, strict=True)]
            image, boxes, *masks = (F.crop(x, *corner, *sizes) for x in sample)
            boxes, kept = F.sanitize_bounding_boxes(boxes, min_size=MIN_SIDE)
            sample = [image, boxes, *(tv_tensors.Mask(x[kept]) for x in masks)]  # indexing drops the type
            labels = labels[kept]
        image, boxes, *masks = (x.as_subclass(Tensor) for x in resize(sample, _choose(self.sides, 32), self.longest))
        return image, {"boxes": boxes, "labels": labels, **({"masks": masks[0]} if masks else {})}


def resize(sample: Sequence[Tensor], side: int, longest: int) -> list[Tensor]:
    """Resize image, boxes and masks to a shorter side of `side`, or less if the longer side would exceed `longest`."""
    from torchvision.transforms.v2 import functional as F

    height, width = sample[0].shape[1:]
    scale = min(side / min(height, width), longest / max(height, width))
    size = [max(1, round(height * scale)), max(1, round(width * scale))]
    # No antialiasing, as in the evaluation of torchvision's detectors.
    return [F.resize(x, size, antialias=False) for x in sample]


def _randint(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def _choose(ends: tuple[int, int], step: int) -> int:
    sides = [*range(ends[0], ends[1], step), ends[1]]
    return sides[_randint(0, len(sides) - 1)]
