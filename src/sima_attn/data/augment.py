"""Random augmentation of whole batches on their device, with one draw per image and no loop over images.

All draws come from torch's generator, which the engine seeds at each step.
Shapes: B batch, S side in pixels; images [B, 3, S, S] with values in [0, 1].
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn.data.settings import Augment

GRAY = (0.299, 0.587, 0.114)
# RGB -> luma and two color axes (NTSC's YIQ): a change of hue rotates the two axes.
YIQ = (GRAY, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def _hue_maps() -> Tensor:
    """Three RGB maps, flat [3, 9]; first + cos(angle) * second + sin(angle) * third rotates the hue by the angle."""
    to_yiq = torch.tensor(YIQ, dtype=torch.float64)
    rotations = torch.zeros(3, 3, 3, dtype=torch.float64)
    rotations[0, 0, 0] = rotations[1, 1, 1] = rotations[1, 2, 2] = rotations[2, 2, 1] = 1
    rotations[2, 1, 2] = -1
    return (torch.linalg.inv(to_yiq) @ rotations @ to_yiq).flatten(1).float()


HUE = _hue_maps()


def augment_batch(images: Tensor, augment: Augment, size: int) -> Tensor:
    """Crop, flip and jitter images for classification -> [B, 3, size, size]; only resized crops change the size."""
    images = crop_and_flip(images, augment, size)
    strength = augment.color_jitter
    return jitter_colors(images, strength, strength, strength) if strength else images


def crop_and_flip(images: Tensor, augment: Augment, size: int) -> Tensor:
    """Random resized crop or shift, and random horizontal flip, with zeros outside the image."""
    if augment.crop == "resized":
        box = random_boxes(images, augment.scale)
    else:
        ones, zeros = images.new_ones(len(images), 1, 1, 1), images.new_zeros(len(images), 1, 1, 1)
        box = [ones, ones, zeros, zeros]
    if augment.crop == "padded":
        shape = (2, len(images), 1, 1, 1)
        pixels = torch.randint(-augment.padding, augment.padding + 1, shape, device=images.device)
        box[2:] = pixels * (2 / images.shape[-1])
    elif augment.crop == "none" and not augment.flip:
        return images
    return sample_boxes(images, box, size, augment.flip, padding_mode="zeros")


def uniform(images: Tensor, low: float, high: float) -> Tensor:
    """One random number per image [B, 1, 1, 1]."""
    return torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(low, high)


def chance(images: Tensor, probability: float) -> Tensor:
    """True with this probability, per image [B, 1, 1, 1]."""
    return uniform(images, 0, 1) < probability


def random_boxes(images: Tensor, scale: Sequence[float]) -> list[Tensor]:
    """Random crop per image, as width, height, x and y [B, 1, 1, 1] each.

    `scale` is the range of the area relative to the image, the aspect ratio is between 3:4 and 4:3. Width and height
    are relative to the image; x and y are the center in coordinates from -1 to 1.
    """
    area = uniform(images, *scale)
    ratio = uniform(images, math.log(3 / 4), math.log(4 / 3)).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    return [width, height, (1 - width) * uniform(images, -1, 1), (1 - height) * uniform(images, -1, 1)]


def sample_boxes(images: Tensor, box: Sequence[Tensor], size: int, flip: float, *, padding_mode: str) -> Tensor:
    """Crop images to their boxes (see `random_boxes`), flip some, and resize to [B, 3, size, size]; bilinear.

    An output point p in [-1, 1] is read at width * p + x: one affine map per image. Whole-pixel shifts are exact.
    """
    width, height, x, y = box
    if flip:
        width = torch.where(chance(images, flip), -width, width)
    zero = torch.zeros_like(x)
    maps = torch.cat([width, zero, x, zero, height, y], dim=3).view(-1, 2, 3)
    grid = F.affine_grid(maps, [len(images), 3, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=padding_mode, align_corners=False)


def to_gray(images: Tensor) -> Tensor:
    """Luma [B, 1, S, S]."""
    red, green, blue = images.split(1, dim=1)
    return torch.add(torch.add(red * GRAY[0], green, alpha=GRAY[1]), blue, alpha=GRAY[2])


def jitter_colors(
    images: Tensor, brightness: float, contrast: float, saturation: float, hue: float = 0.0, hue_maps: Tensor = HUE
) -> Tensor:
    """Scale brightness, contrast and saturation by factors in 1 +- their strength; rotate the hue by up to `hue` turns.

    A caller that keeps HUE on the device of the images passes it as `hue_maps`, which saves a copy per call.
    """

    def factor(strength: float) -> Tensor:
        return uniform(images, max(0.0, 1 - strength), 1 + strength)

    images = (images * factor(brightness)).clamp(0, 1)
    mean = to_gray(images).mean((2, 3), keepdim=True)
    images = (mean + (images - mean) * factor(contrast)).clamp(0, 1)
    gray = to_gray(images)
    images = (gray + (images - gray) * factor(saturation)).clamp(0, 1)
    if not hue:
        return images
    angle = uniform(images, -2 * math.pi * hue, 2 * math.pi * hue).view(-1, 1)  # [B, 1]
    rotation = torch.cat([torch.ones_like(angle), angle.cos(), angle.sin()], dim=1)  # [B, 3]
    maps = (rotation @ hue_maps.to(images.device)).view(-1, 3, 3)
    return (maps @ images.flatten(2)).view_as(images).clamp(0, 1)


def blur(images: Tensor, sigma: tuple[float, float]) -> Tensor:
    """Gaussian blur with a random sigma per image, as products with a banded matrix whose rows sum to 1."""
    S = images.shape[-1]
    pixel = torch.arange(S, device=images.device, dtype=images.dtype)
    squared_distance = (pixel[:, None] - pixel) ** 2  # [S, S]
    weights = torch.exp(-squared_distance / (2 * uniform(images, *sigma) ** 2))  # [B, 1, S, S]
    weights = weights / weights.sum(-1, keepdim=True)
    return weights @ images @ weights.mT


def solarize(images: Tensor) -> Tensor:
    """Invert the values from 0.5 on."""
    return torch.where(images >= 0.5, 1 - images, images)


def erase(images: Tensor, probability: float) -> Tensor:
    """Random erasing: fill one box (2 % to a third of the area) of some normalized images with normal noise."""
    S = images.shape[-1]
    area = uniform(images, 0.02, 1 / 3)
    ratio = uniform(images, math.log(0.3), math.log(1 / 0.3)).exp()
    hit = chance(images, probability)

    def inside(length: Tensor) -> Tensor:
        length = (length.clamp(max=1) * S).round()
        first = (uniform(images, 0, 1) * (S - length + 1)).floor()
        pixel = torch.arange(S, device=images.device)
        return (pixel >= first) & (pixel < first + length)  # [B, 1, 1, S]

    rows, columns = inside((area * ratio).sqrt()), inside((area / ratio).sqrt())
    return torch.where(rows.mT & columns & hit, torch.randn_like(images), images)
