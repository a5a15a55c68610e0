"""Batches of a source. The choice, order and augmentation of samples depend only on (seed, step).

A resumed run therefore needs no loader state: it requests the batches from its step on and gets the same ones as an
uninterrupted run, with any number of worker processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset

from sima_attn.data.images import cut_ends
from sima_attn.data.settings import Augment, Data
from sima_attn.data.sources import ImageSource, Source
from sima_attn.data.workers import Loader
from sima_attn.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from PIL.Image import Image

SHUFFLED_TOGETHER = 8  # blocks (row groups, shards) whose samples are shuffled together
MAX_BROKEN_IN_A_ROW = 100
Key = tuple[int, int, int]  # epoch, position in the epoch, index
Piece = tuple[int, np.ndarray, np.ndarray]  # epoch, positions in the epoch, indices: one forward pass of one process


class Batch(NamedTuple):
    """Images [B, 3, size, size], normalized floats or bytes; labels [B], or soft targets [B, K] when mixup is on."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Share:
    """The part of each global batch that one process takes, split into `accumulate` pieces."""

    batch: int
    rank: int = 0
    world: int = 1
    accumulate: int = 1

    def __post_init__(self) -> None:
        pieces = self.world * self.accumulate
        if self.batch % pieces:
            raise ValueError(
                f"run.batch={self.batch} cannot be split evenly into {self.world} processes x {self.accumulate} "
                f"accumulation steps; make it a multiple of {pieces}"
            )

    @property
    def piece(self) -> int:
        """Images per process and forward pass."""
        return self.batch // (self.world * self.accumulate)


def mixed_seed(*numbers: int) -> int:
    """One 64-bit seed from several numbers; neighboring numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_everything(*numbers: int) -> None:
    """Seed torch (all devices), numpy and random."""
    seed_cpu(*numbers)
    torch.manual_seed(mixed_seed(*numbers))


def seed_cpu(*numbers: int) -> None:
    """Seed torch (CPU), numpy and random: `torch.manual_seed` takes 0.1 ms and more, too long for each image."""
    seed = mixed_seed(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def epoch_order(source: ImageSource, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """Shuffled indices of an epoch [n], each repeated `repeats` times, truncated to the length of the data."""
    generator = np.random.default_rng([seed, epoch])
    n = len(source)
    if source.blocks is None:
        order = generator.permutation(n)
    else:
        starts = np.concatenate([[0], np.cumsum(source.blocks)])
        blocks = generator.permutation(len(source.blocks))
        order = np.concatenate(
            [
                generator.permutation(np.concatenate([np.arange(starts[b], starts[b + 1]) for b in together]))
                for together in np.split(blocks, range(SHUFFLED_TOGETHER, len(blocks), SHUFFLED_TOGETHER))
            ]
        )
    return np.repeat(order, repeats)[:n] if repeats > 1 else order


def steps_per_epoch(source: ImageSource, share: Share) -> int:
    """Full batches per epoch; the remaining images are dropped from that epoch."""
    if len(source) < share.batch:
        raise ValueError(
            f"there are {len(source)} training images, fewer than run.batch={share.batch}; use a smaller batch"
        )
    return len(source) // share.batch


def possible_batch(batch: int, images: int, parts: int) -> int:
    """The batch, or the largest one that the images allow and that can be split evenly into parts."""
    return batch if batch <= images else max(parts, images - images % parts)


def batch_indices(
    source: ImageSource, share: Share, seed: int, *, start: int, stop: int, repeats: int = 1
) -> Iterator[Piece]:
    """The pieces of this process for the steps from start to stop.

    The processes interleave within a batch, so that together they see the same batch as a single process.
    """
    steps = steps_per_epoch(source, share)
    epoch, order = -1, np.empty(0, dtype=int)
    for step in range(start, stop):
        if step // steps != epoch:
            epoch = step // steps
            order = epoch_order(source, seed, epoch, repeats)
        first = (step % steps) * share.batch
        mine = np.arange(first + share.rank, first + share.batch, share.world)
        for positions in np.split(mine, share.accumulate):
            yield epoch, positions, order[positions]


def pieces_in_order(indices: np.ndarray, batch: int) -> Iterator[Piece]:
    """The indices in order, `batch` at a time, for evaluation."""
    return ((0, part, part) for part in np.split(indices, range(batch, len(indices), batch)) if len(part))


class Samples(Dataset):
    """(epoch, position, index) -> a sample, and the indices of the broken images that were skipped for it.

    With a seed (training), the next readable image replaces a broken one, and the transform is seeded for each sample.
    With seed=None (evaluation), the sample of a broken image is None.
    """

    def __init__(self, source: Any, transform: Callable[..., Any], seed: int | None) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, key: Key) -> tuple[Any, list[int]]:
        epoch, position, index = key
        broken: list[int] = []
        while True:
            try:
                image = self.source.read(index)
                break
            except Exception as error:  # decoders raise anything on broken data
                broken.append(index)
                reason = error
            if self.seed is None:
                return None, broken
            if len(broken) >= min(MAX_BROKEN_IN_A_ROW, len(self.source)):
                names = ", ".join(self.source.name(i) for i in broken[:3])
                raise ValueError(
                    f"{len(broken)} images in a row cannot be read, the first ones: {names}; the last error: {reason}"
                )
            index = (index + 1) % len(self.source)
        if self.seed is not None:
            seed_cpu(self.seed, epoch, position)
        return self.sample(image, index), broken

    def sample(self, image: Image, index: int) -> Any:
        """The transformed image and its label."""
        return self.transform(image), int(self.source.labels[index])


def collate_readable(samples: list[tuple[Any, list[int]]]) -> tuple[list[Any], list[int]]:
    """The samples of the readable images, and the indices of the broken ones."""
    readable = [sample for sample, _ in samples if sample is not None]
    return readable, [index for _, broken in samples for index in broken]


def _collate_images(samples: list[tuple[Any, list[int]]]) -> tuple[Tensor, Tensor, list[int]]:
    readable, broken = collate_readable(samples)
    images = torch.stack([image for image, _ in readable]) if readable else torch.empty(0)
    return images, torch.tensor([label for _, label in readable], dtype=torch.long), broken


def most_broken(images: int) -> int:
    """How many images may be broken: 1 %, of few images 5 or half. With more, the folder or its disk is at fault."""
    return max(images // 100, min(5, images // 2))


@dataclass
class BrokenImages:
    """Reports each broken image once, counts them, and raises when there are too many."""

    source: ImageSource
    say: Callable[[str], None] = print
    found: set[int] = field(default_factory=set)

    def add(self, indices: list[int]) -> None:
        """Report images that could not be read."""
        for index in sorted(set(indices) - self.found):
            self.found.add(index)
            self.say(f"broken image, skipped ({len(self.found)} so far): {self.describe(index)}")
        if len(self.found) > (allowed := most_broken(len(self.source))):
            raise ValueError(
                f"{len(self.found)} of {len(self.source)} images cannot be read, more than the {allowed} that are "
                f"skipped; the last one: {self.describe(max(self.found))}; remove or repair them"
            )

    def describe(self, index: int) -> str:
        """The name of an image and why it cannot be read. It is read again, because workers report only its index."""
        try:
            self.source.read(index)
        except Exception as error:
            return f"{self.source.name(index)}: {error}"
        return self.source.name(index)

    def gather(self) -> None:
        """Report the broken images of all processes; every process must call this.

        Only the first process prints, and each process reads only its share of the images.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        parts: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(parts, sorted(self.found))
        self.add([index for part in parts for index in part])


def batch_loader(
    samples: Samples,
    pieces: Iterator[Piece],
    workers: int,
    pin: bool,
    collate: Callable[[list[Any]], Any] = _collate_images,
) -> DataLoader:
    """(images, labels, indices of broken images) of each piece, or what `collate` makes of its samples."""
    keys: Any = ([(epoch, int(p), int(i)) for p, i in zip(at, which, strict=True)] for epoch, at, which in pieces)
    # The loader draws a base seed. It has its own generator, so that it does not change the random state of the step.
    return Loader(
        samples,
        batch_sampler=keys,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        generator=torch.Generator().manual_seed(0),
    )


def decoded_batches(
    samples: Samples, pieces: Iterator[Piece], workers: int, device: torch.device, broken: BrokenImages
) -> Iterator[Batch]:
    """Batches of the pieces on the device, decoded by worker processes; broken images are reported."""
    for images, labels, skipped in batch_loader(samples, pieces, workers, device.type == "cuda"):
        broken.add(skipped)
        if len(labels):
            yield Batch(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))


def training_batches(
    source: Source,
    share: Share,
    data: Data,
    augment: Augment,
    seed: int,
    *,
    start: int,
    stop: int,
    device: torch.device,
    broken: BrokenImages,
) -> Iterator[Batch]:
    """Augmented, normalized batches for the steps from start to stop."""
    samples = Samples(source, training_transform(data, augment), seed)
    pieces = batch_indices(source, share, seed, start=start, stop=stop, repeats=augment.repeats)
    return decoded_batches(samples, pieces, data.workers, device, broken)


def evaluation_batches(
    source: Source,
    data: Data,
    batch: int,
    *,
    device: torch.device,
    broken: BrokenImages,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """Each image of this process once, resized and center-cropped; broken images are skipped."""
    samples = Samples(source, evaluation_transform(data.preprocessing), seed=None)
    pieces = pieces_in_order(np.arange(rank, len(source), world), batch)
    return decoded_batches(samples, pieces, data.workers, device, broken)


def training_transform(data: Data, augment: Augment) -> Callable[[Any], Tensor]:
    """PIL image -> augmented, normalized tensor [3, size, size], by timm's transforms."""
    from timm.data.transforms import str_to_interp_mode
    from timm.data.transforms_factory import transforms_imagenet_train
    from torchvision import transforms

    first, second, last = transforms_imagenet_train(
        data.size,
        scale=augment.scale,
        hflip=augment.flip,
        color_jitter=augment.color_jitter,
        auto_augment=augment.randaugment,
        interpolation=data.interpolation,
        mean=data.mean,
        std=data.std,
        re_prob=augment.erasing,
        re_mode="pixel",
        separate=True,
    )
    if augment.crop != "resized":
        mode = str_to_interp_mode(data.interpolation)
        steps: list[Any] = [cut_ends, transforms.Resize(data.size, mode), transforms.CenterCrop(data.size)]
        if augment.crop == "padded":
            steps.append(transforms.RandomCrop(data.size, padding=augment.padding))
        first = transforms.Compose([*steps, transforms.RandomHorizontalFlip(augment.flip)])
    for step in second.transforms:
        for operation in getattr(step, "ops", []):  # of RandAugment
            if operation.name.startswith("Posterize"):
                operation.level_fn = partial(_at_least_one_bit, operation.level_fn)
    return transforms.Compose([first, second, last])


def _at_least_one_bit(bits: Callable[[float, Any], tuple[int]], level: float, settings: Any) -> tuple[int]:
    """At a magnitude of 10, which noise can reach from 9, timm keeps 0 bits, and Pillow raises."""
    return (max(1, bits(level, settings)[0]),)


def evaluation_transform(preprocessing: Preprocessing, *, normalize: bool = True) -> Callable[[Any], Tensor]:
    """PIL image -> tensor [3, size, size]: resized to size / crop_ratio, then center-cropped.

    The result is normalized floats, or bytes with normalize=False.
    """
    from timm.data.transforms_factory import transforms_imagenet_eval
    from torchvision import transforms

    by_timm = transforms_imagenet_eval(
        preprocessing.size,
        crop_pct=preprocessing.crop_ratio,
        crop_mode=preprocessing.crop_mode,
        interpolation=preprocessing.interpolation,
        mean=preprocessing.mean,
        std=preprocessing.std,
        normalize=normalize,
    )
    return transforms.Compose([cut_ends, by_timm])
