"""Images to learn from, and images to measure on."""

from pathlib import Path

import numpy as np

from sima_attn.data.sources import ClassFolders, Source, Subset, open_data

LEAST_IMAGES = 8


def open_images(path: str, held_out: float, seed: int, *, labelled: bool = False) -> tuple[Source, Source]:
    """(images to learn from, images to measure on): the splits of the data, or parts of a folder of images.

    Labels are optional; with `labelled`, unusable ones are an error. Without val images a part of the others is held
    out, always the same for a seed.
    """
    root = Path(path)
    try:
        train = _open_with_labels(path, "train", required=labelled)
    except FileNotFoundError:
        if not root.is_dir():
            raise
        train = ClassFolders(root, labelled=False)
    if len(train) < LEAST_IMAGES:
        raise ValueError(f"{path} has {len(train)} images; a linearization needs at least {LEAST_IMAGES}")
    try:
        return train, _open_with_labels(path, "val", required=labelled)
    except FileNotFoundError:
        order = np.random.default_rng(seed).permutation(len(train))
        count = max(1, round(held_out * len(train)))
        return Subset(train, np.sort(order[count:])), Subset(train, np.sort(order[:count]))


def _open_with_labels(path: str, split: str, *, required: bool) -> Source:
    """The images of a split, with their labels where they have usable ones."""
    try:
        return open_data(path, split)
    except ValueError:
        if required:
            raise
        return open_data(path, split, labelled=False)
