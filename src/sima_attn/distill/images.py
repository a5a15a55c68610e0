"""Images to learn from, and images to measure on."""

import numpy as np

from sima_attn.data.any_images import OPTIONAL, REQUIRED, open_any
from sima_attn.data.sources import Source, Subset

LEAST_IMAGES = 8


def open_images(path: str, held_out: float, seed: int, *, labeled: bool = False) -> tuple[Source, Source]:
    """(images to learn from, images to measure on): the splits of the data, or parts of a folder of images.

    Labels are optional; with `labeled`, unusable ones are an error. Without val images a part of the others is held
    out, always the same for a seed.
    """
    labels = REQUIRED if labeled else OPTIONAL
    train = open_any(path, "train", labels=labels)
    if len(train) < LEAST_IMAGES:
        raise ValueError(f"{path} has {len(train)} images; a linearization needs at least {LEAST_IMAGES}")
    try:
        return train, open_any(path, "val", labels=labels)
    except FileNotFoundError:
        order = np.random.default_rng(seed).permutation(len(train))
        count = max(1, round(held_out * len(train)))
        part = f"{train.place}, {count / len(train):.0%} of the images"
        return Subset(train, np.sort(order[count:]), train.place), Subset(train, np.sort(order[:count]), part)
