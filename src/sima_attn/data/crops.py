"""Multi-crop: an image -> views of it, of two sizes. By workers on single images, or on whole batches on the device.

Shapes: B images, V views, S side of the image, s side of the view in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.data.settings import Crops, Data

GREY = (0.299, 0.587, 0.114)
# RGB -> luma and two axes of colour (NTSC's YIQ): a change of hue is a turn of the two.
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def _hue_maps() -> Tensor:
    """Three maps of RGB, flat [3, 9]: the first + cos(angle) * the second + sin(angle) * the third turns the hue."""
    there = torch.tensor(YIQ, dtype=torch.float64)
    turns = torch.zeros(3, 3, 3, dtype=torch.float64)
    turns[0, 0, 0] = turns[1, 1, 1] = turns[1, 2, 2] = turns[2, 2, 1] = 1
    turns[2, 1, 2] = -1
    return (torch.linalg.inv(there) @ turns @ there).flatten(1).float()


HUE = _hue_maps()


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


class CropBatch(nn.Module):
    """Bytes [B, 3, S, S] -> normalised global views [V * B, 3, S, S] and local ones [V * B, 3, s, s], on the device.

    Each view of each image has draws of its own, all from torch's generator. There is no loop over images, one pass
    a size, and every constant is on the device before the first batch: a copy to it would wait for all its work.
    """

    colours: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, crops: Crops, data: Data) -> None:
        super().__init__()
        self.crops = crops
        made = views(crops, data.size)
        self.groups = [group for group in (made[: crops.global_count], made[crops.global_count :]) if group]
        self.register_buffer("colours", HUE)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(data, name)).view(1, 3, 1, 1))
        for i, group in enumerate(self.groups):
            for name in ("blur", "solarise"):
                chances = torch.tensor([getattr(view, name) for view in group])
                self.register_buffer(f"{name}_{i}", chances.view(-1, 1, 1, 1, 1))  # [V, 1, 1, 1, 1]

    def forward(self, images: Tensor) -> list[Tensor]:
        """Bytes -> the groups of views."""
        images = images.float() / 255
        return [(self.group(images, i) - self.mean) / self.std for i in range(len(self.groups))]

    def group(self, images: Tensor, number: int) -> Tensor:
        """Images [B, 3, S, S] in [0, 1] -> all views of one size [V * B, 3, s, s], not normalised."""
        crops, group = self.crops, self.groups[number]
        x = resized_crops(images.repeat(len(group), 1, 1, 1), group[0].size, group[0].scale, crops.flip)
        if crops.jitter:
            x = torch.where(_chance(x, crops.jitter), jitter_with_hue(x, crops.strength, self.colours), x)
        if crops.grey:
            x = torch.where(_chance(x, crops.grey), _grey(x), x)
        if any(view.blur for view in group):
            x = torch.where(self._chance_by_view(x, f"blur_{number}"), blur(x, crops.blur_sigma), x)
        if any(view.solarise for view in group):
            hit = self._chance_by_view(x, f"solarise_{number}")
            x = torch.where(hit & (x >= 0.5), 1 - x, x)
        return x

    def _chance_by_view(self, images: Tensor, name: str) -> Tensor:
        chances: Tensor = getattr(self, name)
        draws = _uniform(images, 0, 1).view(len(chances), -1, 1, 1, 1)  # [V, B, 1, 1, 1]
        return (draws < chances).flatten(0, 1)  # [V * B, 1, 1, 1]


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
    red, green, blue = images.split(1, dim=1)
    return torch.add(torch.add(red * GREY[0], green, alpha=GREY[1]), blue, alpha=GREY[2])  # [B, 1, S, S]


def jitter_with_hue(images: Tensor, strength: Sequence[float], colours: Tensor | None = None) -> Tensor:
    """Brightness, contrast and saturation times factors in 1 +- strength, and the hue turned by up to its share.

    `colours` is HUE on the device of the images, for a caller that keeps it there.
    """
    brightness, contrast, saturation, hue = strength
    images = (images * _uniform(images, max(0, 1 - brightness), 1 + brightness)).clamp(0, 1)
    mean = _grey(images).mean((2, 3), keepdim=True)
    images = (mean + (images - mean) * _uniform(images, max(0, 1 - contrast), 1 + contrast)).clamp(0, 1)
    grey = _grey(images)
    images = (grey + (images - grey) * _uniform(images, max(0, 1 - saturation), 1 + saturation)).clamp(0, 1)
    if not hue:
        return images
    angle = _uniform(images, -2 * math.pi * hue, 2 * math.pi * hue).view(-1, 1)  # [B, 1]
    turn = torch.cat([torch.ones_like(angle), angle.cos(), angle.sin()], dim=1)  # [B, 3]
    maps = (turn @ (HUE.to(images.device) if colours is None else colours)).view(-1, 3, 3)
    return (maps @ images.flatten(2)).view_as(images).clamp(0, 1)


def blur(images: Tensor, sigma: tuple[float, float]) -> Tensor:
    """Gaussian blur, each image by its own deviation: rows and columns times a banded matrix whose rows sum to 1."""
    S = images.shape[-1]
    place = torch.arange(S, device=images.device, dtype=images.dtype)
    apart = (place[:, None] - place) ** 2  # [S, S]
    weights = torch.exp(-apart / (2 * _uniform(images, *sigma) ** 2))  # [B, 1, S, S]
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ images @ weights.mT
