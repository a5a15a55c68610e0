"""DINO's multi-crop: global and local views of an image, made per image by workers or per batch on the device.

Shapes: B images, V views, S side of the image, s side of the view in pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.data import augment as ops
from sima_attn.data.settings import Crops, Data


@dataclass(frozen=True)
class View:
    """Settings of one crop: side, range of the relative area, and probabilities of blur and solarization."""

    size: int
    scale: tuple[float, float]
    blur: float
    solarize: float


def views(crops: Crops, size: int) -> list[View]:
    """Settings of all views of an image: the global ones, with side `size`, come first."""
    first = View(size, crops.global_scale, crops.blur[0], 0.0)
    others = View(size, crops.global_scale, crops.blur[1], crops.solarize)
    local = View(crops.local_size, crops.local_scale, crops.blur[2], 0.0)
    return [first, *[others] * (crops.global_count - 1), *[local] * crops.local_count]


class CropImage:
    """PIL image -> all its views, flattened into one row of bytes that a loader can stack; see `split_views`."""

    def __init__(self, crops: Crops, size: int, interpolation: str) -> None:
        self.pipelines = [_pipeline(view, crops, interpolation) for view in views(crops, size)]

    def __call__(self, image: Any) -> Tensor:
        """The views of an image [bytes of all views]."""
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
            transforms.RandomGrayscale(crops.gray),
            transforms.RandomApply([_Blur(crops.blur_sigma)], view.blur),
            transforms.RandomSolarize(128, view.solarize),
            transforms.PILToTensor(),
        ]
    )


class _Blur:
    """Gaussian blur of a PIL image with a random sigma."""

    def __init__(self, sigma: tuple[float, float]) -> None:
        self.sigma = sigma

    def __call__(self, image: Any) -> Any:
        from PIL import ImageFilter

        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(*self.sigma))))


def split_views(rows: Tensor, crops: Crops, size: int) -> list[Tensor]:
    """Rows of `CropImage` [B, bytes of all views] -> global views [V * B, 3, s, s] and local ones, in [0, 1].

    The first B entries are the first view of each image, the next B the second view, and so on.
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
    """Bytes [B, 3, S, S] -> normalized global views [V * B, 3, S, S] and local views [V * B, 3, s, s], on the device.

    Each view of each image has its own random draws. All views of one size are made in one pass, and all constants
    are on the device before the first batch: copying them there would wait for all pending work.
    """

    hue_maps: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, crops: Crops, data: Data) -> None:
        super().__init__()
        self.crops = crops
        made = views(crops, data.size)
        self.groups = [group for group in (made[: crops.global_count], made[crops.global_count :]) if group]
        self.register_buffer("hue_maps", ops.HUE)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(data, name)).view(1, 3, 1, 1))
        for i, group in enumerate(self.groups):
            for name in ("blur", "solarize"):
                probability = torch.tensor([getattr(view, name) for view in group])
                self.register_buffer(f"{name}_{i}", probability.view(-1, 1, 1, 1, 1))  # [V, 1, 1, 1, 1]

    def forward(self, images: Tensor) -> list[Tensor]:
        """Bytes -> the groups of views."""
        images = images.float() / 255
        return [(self.group(images, i) - self.mean) / self.std for i in range(len(self.groups))]

    def group(self, images: Tensor, number: int) -> Tensor:
        """Images [B, 3, S, S] in [0, 1] -> all views of one size [V * B, 3, s, s], not normalized."""
        crops, group = self.crops, self.groups[number]
        x = images.repeat(len(group), 1, 1, 1)
        # Border padding, not zeros: half a pixel at the edge of the largest crops is outside the image.
        x = ops.sample_boxes(x, ops.random_boxes(x, group[0].scale), group[0].size, crops.flip, padding_mode="border")
        if crops.jitter:
            x = torch.where(ops.chance(x, crops.jitter), ops.jitter_colors(x, *crops.strength, self.hue_maps), x)
        if crops.gray:
            x = torch.where(ops.chance(x, crops.gray), ops.to_gray(x), x)
        if any(view.blur for view in group):
            x = torch.where(self._chance_by_view(x, f"blur_{number}"), ops.blur(x, crops.blur_sigma), x)
        if any(view.solarize for view in group):
            x = torch.where(self._chance_by_view(x, f"solarize_{number}"), ops.solarize(x), x)
        return x

    def _chance_by_view(self, images: Tensor, name: str) -> Tensor:
        probability: Tensor = getattr(self, name)
        draws = ops.uniform(images, 0, 1).view(len(probability), -1, 1, 1, 1)  # [V, B, 1, 1, 1]
        return (draws < probability).flatten(0, 1)  # [V * B, 1, 1, 1]
