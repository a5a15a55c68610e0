"""Batches of a source. Which samples, in which order and how varied is a function of (seed, step) alone.

So a run that goes on needs no state of a loader: it asks for the batches from its step on, and gets those it
would have got, whatever the number of worker processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset

from sima_attn.data.images import cut_ends
from sima_attn.data.settings import Augment, Data
from sima_attn.data.sources import Source
from sima_attn.data.workers import Loader, useful_workers
from sima_attn.models.preprocessing import Preprocessing

SHUFFLED_TOGETHER = 8  # blocks (row groups, shards) whose samples an epoch mixes
MOST_BROKEN = 0.01


class Batch(NamedTuple):
    """Images [B, 3, size, size], normalised floats or bytes, and labels [B], of mixtures shares of classes [B, K]."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Share:
    """The part of each global batch that this process takes, in `accumulate` pieces."""

    batch: int
    rank: int = 0
    world: int = 1
    accumulate: int = 1

    def __post_init__(self) -> None:
        pieces = self.world * self.accumulate
        if self.batch % pieces:
            raise ValueError(
                f"run.batch={self.batch} cannot be shared evenly: {self.world} processes x "
                f"{self.accumulate} accumulated parts; make it a multiple of {pieces}"
            )

    @property
    def piece(self) -> int:
        """Images of one process in one forward pass."""
        return self.batch // (self.world * self.accumulate)


def mixed_seed(*numbers: int) -> int:
    """One 64-bit seed of several numbers, unlike those of their neighbours."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_everything(*numbers: int) -> None:
    """Seed torch (every device), numpy and random."""
    seed = mixed_seed(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def epoch_order(source: Source, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """Indices of an epoch [n], each `repeats` times in a row and then cut to the length of the data."""
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


def steps_per_epoch(source: Source, share: Share) -> int:
    """Whole batches in an epoch; the rest of the images waits for another epoch's order."""
    if len(source) < share.batch:
        raise ValueError(
            f"there are {len(source)} training images, fewer than run.batch={share.batch}; make the batch smaller"
        )
    return len(source) // share.batch


def batch_indices(
    source: Source, share: Share, seed: int, *, start: int, stop: int, repeats: int = 1
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(epoch, positions in the epoch, indices) of each piece of this process, for the steps from start to stop.

    The processes take turns within a batch, so that together they see what a single one would.
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


class Samples(Dataset):
    """(epoch, position, index) -> image, label and the indices of broken images that were passed over."""

    def __init__(self, source: Source, transform: Callable[[Any], Tensor], seed: int | None) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[Tensor | None, int, list[int]]:
        epoch, position, index = key
        broken: list[int] = []
        while True:
            try:
                image = self.source.read(index)
                break
            except Exception as error:  # whatever the decoder says: the image cannot be used
                broken.append(index)
                reason = error
            if self.seed is None:  # evaluation leaves it out
                return None, 0, broken
            if len(broken) > 100:
                names = ", ".join(self.source.name(i) for i in broken[:3])
                raise ValueError(
                    f"a hundred images in a row cannot be read, the first ones: {names}; the last: {reason}"
                )
            index = (index + 1) % len(self.source)
        if self.seed is not None:
            seed_everything(self.seed, epoch, position)
        return self.transform(image), int(self.source.labels[index]), broken


def _collate(samples: list[tuple[Tensor | None, int, list[int]]]) -> tuple[Tensor, Tensor, list[int]]:
    images = [image for image, _, _ in samples if image is not None]
    labels = [label for image, label, _ in samples if image is not None]
    broken = [index for *_, passed in samples for index in passed]
    return torch.stack(images) if images else torch.empty(0), torch.tensor(labels, dtype=torch.long), broken


@dataclass
class BrokenImages:
    """Names each broken image once, counts them, and stops when they are too many."""

    source: Source
    say: Callable[[str], None] = print
    found: set[int] = field(default_factory=set)

    def add(self, indices: list[int]) -> None:
        """Take note of samples that could not be read."""
        for index in sorted(set(indices) - self.found):
            self.found.add(index)
            self.say(f"broken image, skipped ({len(self.found)} so far): {self.describe(index)}")
        if len(self.found) > MOST_BROKEN * len(self.source):
            raise ValueError(
                f"{len(self.found)} of {len(self.source)} images cannot be read, more than {MOST_BROKEN:.0%}; "
                f"the last one: {self.describe(max(self.found))}"
            )

    def describe(self, index: int) -> str:
        """The name of an image and why it cannot be read, by reading it again: workers report its index alone."""
        try:
            self.source.read(index)
        except Exception as error:
            return f"{self.source.name(index)}: {error}"
        return self.source.name(index)

    def gather(self) -> None:
        """Take note of what the other processes have found; all must call it.

        Only the first process can be heard, and each one sees no more than its share.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        parts: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(parts, sorted(self.found))
        self.add([index for part in parts for index in part])


class _Keys:
    """A batch sampler from a stream of pieces; iterated once."""

    def __init__(self, pieces: Iterator[tuple[int, np.ndarray, np.ndarray]]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        for epoch, positions, indices in self.pieces:
            yield [(epoch, int(p), int(i)) for p, i in zip(positions, indices, strict=True)]


def batch_loader(samples: Samples, pieces: Iterator, workers: int, pin: bool) -> DataLoader:
    """(images, labels, broken indices) of each piece."""
    keys: Any = _Keys(pieces)
    # A generator of its own: the loader draws a base seed, and must not draw it from the step's randomness.
    return Loader(
        samples,
        batch_sampler=keys,
        num_workers=useful_workers(workers),
        collate_fn=_collate,
        pin_memory=pin,
        generator=torch.Generator().manual_seed(0),
    )


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
    """Augmented, normalised pieces of the steps from start to stop, decoded by worker processes."""
    samples = Samples(source, training_transform(data, augment), seed)
    pieces = batch_indices(source, share, seed, start=start, stop=stop, repeats=augment.repeats)
    for images, labels, passed in batch_loader(samples, pieces, data.workers, device.type == "cuda"):
        broken.add(passed)
        yield Batch(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))


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
    """Every image of this process once, resized and cropped in the middle; broken ones left out."""
    samples = Samples(source, evaluation_transform(data.preprocessing), seed=None)
    mine = np.arange(rank, len(source), world)
    pieces = ((0, part, part) for part in np.split(mine, range(batch, len(mine), batch)) if len(part))
    for images, labels, passed in batch_loader(samples, pieces, data.workers, device.type == "cuda"):
        broken.add(passed)
        if len(labels):
            yield Batch(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))


def training_transform(data: Data, augment: Augment) -> Callable[[Any], Tensor]:
    """PIL image -> augmented tensor [3, size, size]: timm's transforms."""
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
        _keep_a_bit(step)
    return transforms.Compose([first, second, last])


def _keep_a_bit(step: Any) -> None:
    """Let the posterize operations of timm's RandAugment, AugMix or AutoAugment keep a bit or more.

    With a magnitude of 10, to which noise takes that of 9 now and again, timm asks for 0 bits, which Pillow refuses.
    """
    several = getattr(step, "ops", [op for ops in getattr(step, "policy", []) for op in ops])
    for op in several:
        if op.name.startswith("Posterize"):
            op.level_fn = partial(_a_bit_or_more, op.level_fn)


def _a_bit_or_more(bits: Callable[[float, Any], tuple[int]], level: float, settings: Any) -> tuple[int]:
    return (max(1, bits(level, settings)[0]),)


def evaluation_transform(preprocessing: Preprocessing, *, normalize: bool = True) -> Callable[[Any], Tensor]:
    """PIL image -> tensor [3, size, size]: shorter side resized to size / crop_ratio, then the center crop.

    Normalized floats, or the bytes of the image with normalize=False.
    """
    from timm.data.transforms_factory import transforms_imagenet_eval
    from torchvision import transforms

    by_timm = transforms_imagenet_eval(
        preprocessing.size,
        crop_pct=preprocessing.crop_ratio,
        interpolation=preprocessing.interpolation,
        mean=preprocessing.mean,
        std=preprocessing.std,
        normalize=normalize,
    )
    return transforms.Compose([cut_ends, by_timm])
