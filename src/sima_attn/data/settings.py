"""Recipe settings for images: path, size and augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from sima_attn._settings import (
    Limit,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    Share,
    between,
    check_value,
    from_dict,
    one_of,
)
from sima_attn.models.preprocessing import CROP_MODES, MAX_SIZE, Preprocessing

if TYPE_CHECKING:
    from sima_attn.models.loading import LoadedModel

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Bounded above too: a recipe may come from a file that anyone has written.
Pixels = Annotated[int, between(1, MAX_SIZE)]
Workers = Annotated[int, between(0, 2**8)]
Hue = Annotated[float, between(0, 0.5)]


def _is_randaugment(configuration: str) -> bool:
    from timm.data.auto_augment import rand_augment_transform

    try:
        rand_augment_transform(configuration, {})
    except Exception:  # assertions, failed conversions and lookups of timm
        return False
    return True


@dataclass(frozen=True)
class Data:
    """Path, size and preprocessing of the images.

    Attributes:
        path: A folder, or "digits"; see `open_data`.
        size: Side of the square input images in pixels.
        crop_ratio: Fraction of the resized image that the center crop of evaluation keeps.
        interpolation: bicubic or bilinear, for each resize.
        crop_mode: In evaluation, "center" crops the longer side, "squash" resizes both sides, as in timm.
        mean, std: Per channel, for values in [0, 1].
        workers: Decoding processes. The batches do not depend on their number.
        cache: Decode all images once, keep them on the device and augment whole batches there.
        cache_size: Side of the training images in the cache: with one above `size`, crops of a part of an image are
            sharp. None: `size`.
        val: Part of the images of each class to hold out as val, for data without val images; None: the data have some.
        split_seed: Seed of the choice of these images.
    """

    path: str
    size: Pixels = 224
    crop_ratio: Share = 1.0
    interpolation: Annotated[str, one_of("bicubic", "bilinear")] = "bicubic"
    crop_mode: Annotated[str, one_of(*CROP_MODES)] = "center"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = IMAGENET_STD
    workers: Workers = 8
    cache: bool = False
    cache_size: Pixels | None = None
    val: Annotated[float, Limit("above 0 and below 1", lambda value: 0 < value < 1)] | None = None
    split_seed: NonNegativeInt = 0

    @property
    def preprocessing(self) -> Preprocessing:
        """How evaluation prepares an image."""
        return Preprocessing(
            self.size, self.mean, self.std, self.crop_ratio, self.interpolation, crop_mode=self.crop_mode
        )

    def check_relations(self) -> None:
        """Raise for a size of cached images that cannot be used."""
        if self.cache_size is None:
            return
        if not self.cache:
            raise ValueError("data.cache_size is the size of cached images: set data.cache=true, or leave it out")
        if self.cache_size < self.size:
            raise ValueError(f"data.cache_size must be at least data.size={self.size}, got {self.cache_size}")

    @classmethod
    def of_model(cls, loaded: LoadedModel) -> Data:
        """The settings of the run that trained a model; without a run, its preprocessing and no path."""
        if "recipe" not in loaded.about:
            return cls("", workers=0, **vars(loaded.preprocessing))
        data = from_dict(cls, loaded.about["recipe"]["data"])
        check_value(data, cls, "data")
        return data


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images.

    Attributes:
        crop: "resized" is a random resized crop (`scale` is the range of its relative area); "padded" shifts by up to
            `padding` pixels; "none" keeps the image.
        flip: Probability of a horizontal flip.
        color_jitter: Strength. Not applied when RandAugment is on, as in timm and the paper.
        randaugment: timm's configuration string; None is off. Not supported with a device cache.
        erasing: Probability of random erasing with noise.
        repeats: Consecutive repetitions of each image (repeated augmentation); epochs keep their length.
        mixup, cutmix: Their alphas; 0 is off. One draw per batch.
        mix_prob, switch_prob: Probability of mixing, and of cutmix when both are on.
        smoothing: Label smoothing.
    """

    crop: Annotated[str, one_of("resized", "padded", "none")] = "resized"
    scale: Range[Share] = (0.08, 1.0)
    padding: NonNegativeInt = 0
    flip: Probability = 0.5
    color_jitter: NonNegativeFloat = 0.0
    randaugment: (
        Annotated[str, Limit("a configuration of timm, e.g. rand-m9-mstd0.5-inc1,", _is_randaugment)] | None
    ) = None
    erasing: Probability = 0.0
    repeats: PositiveInt = 1
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    mix_prob: Probability = 1.0
    switch_prob: Probability = 0.5
    smoothing: Probability = 0.0

    @property
    def mixes(self) -> bool:
        """Whether the images of a batch are mixed in pairs."""
        return bool(self.mixup or self.cutmix)

    def check_relations(self) -> None:
        """Raise where settings exclude each other."""
        if self.crop == "padded" and self.padding < 1:
            raise ValueError("augment.crop=padded needs augment.padding of at least 1 pixel")


def check_cache(data: Data, augment: Augment) -> None:
    """Raise where a device cache has whole batches augmented, and the augmentation needs single images."""
    if data.cache and augment.randaugment is not None:
        raise ValueError(
            "RandAugment needs single images, not a device cache: set data.cache=false or augment.randaugment=none"
        )
    if data.cache_size is not None and augment.crop != "resized":
        raise ValueError(f"data.cache_size needs augment.crop=resized: with {augment.crop}, no crop is enlarged")


@dataclass(frozen=True)
class Crops:
    """DINO's views of an image. The side of a global crop is data.size.

    Attributes:
        global_count, local_count: Crops per image. The teacher sees the global ones, the student all of them.
        global_scale, local_scale: Range of the area relative to the image.
        local_size: Side of a local crop in pixels.
        flip: Probability of a horizontal flip.
        jitter, strength: Probability of color jitter, and its brightness, contrast, saturation and hue.
        gray: Probability of conversion to grayscale.
        blur: Probability of blur in the first global crop, the other global crops, and the local crops.
        blur_sigma: Range of the sigma of the blur in pixels.
        solarize: Probability of solarization in the global crops after the first.
    """

    global_count: PositiveInt = 2
    global_scale: Range[Share] = (0.4, 1.0)
    local_count: NonNegativeInt = 8
    local_size: PositiveInt = 96
    local_scale: Range[Share] = (0.05, 0.4)
    flip: Probability = 0.5
    jitter: Probability = 0.8
    strength: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, Hue] = (0.4, 0.4, 0.2, 0.1)
    gray: Probability = 0.2
    blur: tuple[Probability, Probability, Probability] = (1.0, 0.1, 0.5)
    blur_sigma: Range[PositiveFloat] = (0.1, 2.0)
    solarize: Probability = 0.2

    def check_relations(self) -> None:
        """Raise where there is nothing to compare."""
        if self.global_count + self.local_count < 2:
            raise ValueError("DINO compares views: crops.global_count + crops.local_count must be at least 2, got 1")
