"""Images without a named recipe -> the recipe that suits their size and number, adapted to them."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sima_attn.data.settings import Data
from sima_attn.data.sources import Source
from sima_attn.data.splits import open_split, with_val_images
from sima_attn.train.recipes import named_recipe

# Limits between kinds of data. They are judgments, not measurements.
PHOTO_SIDE = 96  # pixels; images with a shorter side below it are small
MANY_IMAGES = 100_000  # the paper's recipes are for 1.28 million
FEW_IMAGES = 10_000  # below, fine-tuning is mentioned
MEASURED_IMAGES = 32
LEAST_STEPS, LEAST_BATCH = 16, 8  # steps per epoch, images per step


class ImageStats(NamedTuple):
    """Number of images and classes (0 without labels), and the median of the shorter sides in pixels."""

    images: int
    classes: int
    side: int

    def __str__(self) -> str:
        classes = f" in {self.classes} classes" if self.classes else ""
        return f"{self.images} images of about {self.side} px{classes}"


class SuitedRecipes(NamedTuple):
    """Names of the recipes for small images, for photos, and for very many photos."""

    small: str
    photos: str
    many: str

    def name_for(self, stats: ImageStats) -> str:
        """The recipe for these images."""
        if stats.side < PHOTO_SIDE:
            return self.small
        return self.photos if stats.images < MANY_IMAGES else self.many


CLASSIFIERS = SuitedRecipes("shipped", "photos", "deit_small")


class Choice(NamedTuple):
    """A recipe, and what to print about it."""

    recipe: Any
    notes: Sequence[str]


def measure_images(source: Source) -> ImageStats:
    """The numbers that a recipe is chosen by; the side is that of a few images, spread over the data."""
    sides = []
    for index in np.linspace(0, len(source) - 1, MEASURED_IMAGES).round().astype(int):
        with contextlib.suppress(Exception):  # a run reports broken images
            sides.append(min(source.read(int(index)).size))
    if not sides:
        raise ValueError(
            f"none of {MEASURED_IMAGES} images in {source.place} can be read, the first is {source.name(0)}"
        )
    return ImageStats(len(source), len(source.classes), round(float(np.median(sides))))


def choose_recipe(named: Callable[[str], Any], suited: SuitedRecipes, source: Source, device: str) -> Choice:
    """The recipe for the images of a source, with a batch for their number, and a precision for the device.

    Args:
        named: Returns the recipe of a name.
        device: "cpu" or "cuda".
    """
    stats = measure_images(source)
    recipe = named(suited.name_for(stats))
    run, optim = recipe.run, recipe.optim
    batch = min(run.batch, max(LEAST_BATCH, 2 ** int(math.log2(max(1, stats.images / LEAST_STEPS)))))
    if not optim.lr_batch:  # not scaled by itself; the root of the batch is the usual rule for Adam
        optim = replace(optim, lr=float(f"{optim.lr * math.sqrt(batch / run.batch):.2g}"))
    run = replace(run, batch=batch)
    if device == "cpu":
        run = replace(run, precision="fp32", compile=False)  # both are for GPUs
    note = (
        f"{stats}: the recipe is {recipe.name} ({recipe.data.size} px, {recipe.schedule.epochs} epochs, batch "
        f"{batch}); choose another with --recipe, see `sima recipes`"
    )
    return Choice(replace(recipe, run=run, optim=optim), [note])


def choose_classifier(data: Data, device: str) -> Choice:
    """The recipe of `sima train` for the images at `data.path`; some are held out where there are no val images."""
    data, notes = with_val_images(data)
    source = open_split(data, "train")
    recipe, lines = choose_recipe(named_recipe, CLASSIFIERS, source, device)
    if len(source) < FEW_IMAGES:
        notes.append(f"to start from a trained model instead: `sima finetune --data {shlex.quote(data.path)}`")
    settings = replace(recipe.data, path=data.path, val=data.val)
    return Choice(replace(recipe, data=settings), [*lines, *notes])
