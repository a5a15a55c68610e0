"""Multi-crop: an image -> views of it, of two sizes. By workers on single images, or on whole batches on the device.

Shapes: B images, V views, S side of the image, s side of the view in pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn.train.dino_recipes import Crops

GREY = (0.299, 0.587, 0.114)
# RGB -> luma and two axes of colour (NTSC's YIQ): a change of hue is a turn of the two.
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


@dataclass(frozen=True)
class View:
    """How one crop is made: its side, share of the area, and probabilities of blur and solarisation."""

    size: int
    scale: tuple[float, float]
    blur: float
    solarise: float


def views(crops: Crops, size: int) -> list[View]:
    """The views of an image, the global ones (of side `size`) first."""
    first = View(size, crops.global_scale, crops.blur[0], 0.0)
    others = View(size, crops.global_scale, crops.blur[1], crops.solarise)
    local = View(crops.local_size, crops.local_scale, crops.blur[2], 0.0)
    return [first, *[others] * (crops.global_count - 1), *[local] * crops.local_count]


class CropImage:
    """PIL image -> all its views in one row of bytes, which a loader stacks as it does images; see `split_views`."""

    def __init__(self, crops: Crops, size: int, interpolation: str) -> None:
        self.pipelines = [_pipeline(view, crops, interpolation) for view in views(crops, size)]

    def __call__(self, image: Any) -> Tensor:
        """The row of an image."""
        return torch.cat([pipeline(image).flatten() for pipeline in self.pipelines])


def _pipeline(view: View, crops: Crops, interpolation: str) -> Any:
    from timm.data.transforms import str_to_interp_mode
    from torchvision import transforms

    brightness, contrast, saturation, hue = crops.strength
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(view.size, view.scale, interpolation=str_to_interp_mode(interpolation)),
            transforms.RandomHorizontalFlip(crops.flip),
            transforms.RandomApply([transforms.ColorJitter(brightness, contrast, saturation, hue)], crops.jitter),
            transforms.RandomGrayscale(crops.grey),
            transforms.RandomApply([_Blur(crops.blur_sigma)], view.blur),
            transforms.RandomSolarize(128, view.solarise),
            transforms.PILToTensor(),
        ]
    )


class _Blur:
    """Gaussian blur of a PIL image by a random deviation."""

    def __init__(self, sigma: tuple[float, float]) -> None:
        self.sigma = sigma

    def __call__(self, image: Any) -> Any:
        from PIL import ImageFilter

        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(*self.sigma))))


def split_views(rows: Tensor, crops: Crops, size: int) -> list[Tensor]:
    """Bytes [B, all views of an image] -> the global views [V * B, 3, s, s] and the local ones, values in [0, 1].

    The views follow one another, each of all images.
    """
    B = len(rows)
    groups, start = [], 0
    for count, side in ((crops.global_count, size), (crops.local_count, crops.local_size)):
        stop = start + count * 3 * side * side
        if count:
            part = rows[:, start:stop].reshape(B, count, 3, side, side).transpose(0, 1)  # [V, B, 3, s, s]
            groups.append(part.reshape(count * B, 3, side, side).float() / 255)
        start = stop
    return groups


def crop_batch(images: Tensor, crops: Crops) -> list[Tensor]:
    """Images [B, 3, S, S] in [0, 1] -> the global views [V * B, 3, S, S] and the local ones [V * B, 3, s, s].

    Each view of each image has draws of its own, all from torch's generator; there is no loop over images.
    """
    all_views = views(crops, images.shape[-1])
    groups = (all_views[: crops.global_count], all_views[crops.global_count :])
    return [
        torch.cat(
            [_vary(images.repeat(len(list(same)), 1, 1, 1), view, crops) for view, same in itertools.groupby(group)]
        )
        for group in groups
        if group
    ]


def _vary(images: Tensor, view: View, crops: Crops) -> Tensor:
    images = resized_crops(images, view.size, view.scale, crops.flip)
    if crops.jitter:
        hit = _chance(images, crops.jitter)
        images = torch.where(hit, jitter_with_hue(images, crops.strength), images)
    if crops.grey:
        images = torch.where(_chance(images, crops.grey), _grey(images), images)
    if view.blur:
        images = torch.where(_chance(images, view.blur), blur(images, crops.blur_sigma), images)
    if view.solarise:
        images = torch.where(_chance(images, view.solarise) & (images >= 0.5), 1 - images, images)
    return images


def _uniform(images: Tensor, low: float, high: float) -> Tensor:
    """A number for each image [B, 1, 1, 1]."""
    return torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(low, high)


def _chance(images: Tensor, probability: float) -> Tensor:
    return _uniform(images, 0, 1) < probability


def resized_crops(images: Tensor, size: int, scale: tuple[float, float], flip: float) -> Tensor:
    """Images [B, 3, S, S] -> a random part of each, perhaps mirrored, at the new size [B, 3, s, s]; bilinear."""
    area = _uniform(images, *scale)
    ratio = _uniform(images, math.log(3 / 4), math.log(4 / 3)).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    x, y = (1 - width) * _uniform(images, -1, 1), (1 - height) * _uniform(images, -1, 1)
    if flip:
        width = torch.where(_chance(images, flip), -width, width)
    zero = torch.zeros_like(x)
    maps = torch.cat([width, zero, x, zero, height, y], dim=3).view(-1, 2, 3)
    grid = F.affine_grid(maps, [len(images), 3, size, size], align_corners=False)
    # The border, not zeros: half a pixel at the edge of the largest crops lies outside.
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _grey(images: Tensor) -> Tensor:
    return (images * images.new_tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True)


def jitter_with_hue(images: Tensor, strength: Sequence[float]) -> Tensor:
    """Brightness, contrast and saturation times factors in 1 +- strength, and the hue turned by up to its share."""
    brightness, contrast, saturation, hue = strength
    images = (images * _uniform(images, max(0, 1 - brightness), 1 + brightness)).clamp(0, 1)
    mean = _grey(images).mean((2, 3), keepdim=True)
    images = (mean + (images - mean) * _uniform(images, max(0, 1 - contrast), 1 + contrast)).clamp(0, 1)
    grey = _grey(images)
    images = (grey + (images - grey) * _uniform(images, max(0, 1 - saturation), 1 + saturation)).clamp(0, 1)
    if not hue:
        return images
    angle = (2 * math.pi * _uniform(images, -hue, hue)).flatten()  # [B]
    turn = torch.zeros(len(images), 3, 3, device=images.device)
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2], turn[:, 2, 1] = -angle.sin(), angle.sin()
    there = torch.tensor(YIQ)
    back = torch.linalg.inv(there)  # on the CPU: on a GPU it would wait for the device
    maps = back.to(images.device) @ turn @ there.to(images.device)  # [B, 3, 3]
    return (maps @ images.flatten(2)).view_as(images).clamp(0, 1)


def blur(images: Tensor, sigma: tuple[float, float]) -> Tensor:
    """Gaussian blur, each image by its own deviation: rows and columns times a banded matrix whose rows sum to 1."""
    S = images.shape[-1]
    place = torch.arange(S, device=images.device, dtype=images.dtype)
    apart = (place[:, None] - place) ** 2  # [S, S]
    weights = torch.exp(-apart / (2 * _uniform(images, *sigma) ** 2))  # [B, 1, S, S]
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ images @ weights.mT
