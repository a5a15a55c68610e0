"""Augmentation of whole batches on their device: each image its own draw, no loop over images.

Every draw comes from torch's generator, which the engine seeds at each step.
Shapes: B batch, S side in pixels; images [B, 3, S, S], values in [0, 1].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn.data.settings import Augment


def augment_batch(images: Tensor, augment: Augment) -> Tensor:
    """Images in [0, 1] -> the same, cropped, mirrored and jittered."""
    images = crop_and_flip(images, augment)
    if augment.color_jitter:
        images = jitter_colours(images, augment.color_jitter)
    return images


def _uniform(images: Tensor, low: float, high: float) -> Tensor:
    return torch.empty(len(images), device=images.device).uniform_(low, high)


def crop_and_flip(images: Tensor, augment: Augment) -> Tensor:
    """One affine map an image: its random crop, or shift, and its mirror image.

    A point of the output at p in [-1, 1] is read at scale * p + shift. Whole-pixel shifts are exact; outside is 0.
    """
    B, _, S, _ = images.shape
    ones = torch.ones(B, device=images.device)
    width, height, shift_x, shift_y = ones, ones, ones * 0, ones * 0
    if augment.crop == "resized":
        area = _uniform(images, augment.scale[0], augment.scale[1])
        ratio = _uniform(images, math.log(3 / 4), math.log(4 / 3)).exp()
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        shift_x, shift_y = (1 - width) * _uniform(images, -1, 1), (1 - height) * _uniform(images, -1, 1)
    elif augment.crop == "padded":
        pixels = torch.randint(-augment.padding, augment.padding + 1, (2, B), device=images.device)
        shift_x, shift_y = pixels * (2 / S)
    if augment.flip:
        width = torch.where(_uniform(images, 0, 1) < augment.flip, -width, width)
    elif augment.crop == "none":
        return images
    zero = ones * 0
    maps = torch.stack(
        [torch.stack([width, zero, shift_x], 1), torch.stack([zero, height, shift_y], 1)], 1
    )  # [B, 2, 3]
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def jitter_colours(images: Tensor, strength: float) -> Tensor:
    """Brightness, contrast and saturation, each multiplied by a factor in 1 +- strength."""

    def factor() -> Tensor:
        return _uniform(images, max(0.0, 1 - strength), 1 + strength).view(-1, 1, 1, 1)

    images = (images * factor()).clamp(0, 1)
    grey = (images * images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    mean = grey.mean((2, 3), keepdim=True)
    images = (mean + (images - mean) * factor()).clamp(0, 1)
    grey = (images * images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    return (grey + (images - grey) * factor()).clamp(0, 1)


def erase(images: Tensor, probability: float) -> Tensor:
    """Normalised images with a random box (2 % to a third of the area) of normal noise, some of them."""
    S = images.shape[-1]
    area = _uniform(images, 0.02, 1 / 3)
    ratio = _uniform(images, math.log(0.3), math.log(1 / 0.3)).exp()
    hit = _uniform(images, 0, 1) < probability

    def inside(length: Tensor) -> Tensor:
        length = (length.clamp(max=1) * S).round()
        first = (_uniform(images, 0, 1) * (S - length + 1)).floor()
        place = torch.arange(S, device=images.device)
        return (place >= first[:, None]) & (place < (first + length)[:, None])  # [B, S]

    rows, columns = inside((area * ratio).sqrt()), inside((area / ratio).sqrt())
    box = rows[:, :, None] & columns[:, None, :] & hit[:, None, None]  # [B, S, S]
    return torch.where(box[:, None], torch.randn_like(images), images)
