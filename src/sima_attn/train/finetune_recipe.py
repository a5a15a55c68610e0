"""Settings of fine-tuning, and the defaults that follow from the number of images."""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from sima_attn._settings import NonNegativeInt, Share, one_of
from sima_attn.data.settings import Augment, Data, check_cache
from sima_attn.models.settings import ModelSettings
from sima_attn.train.recipes import Optim, Run, Schedule, TeacherSettings

BACKBONE, ALL_BUT_ATTENTION = FREEZE = ("backbone", "all-but-attention")
MOST_EPOCHS, LEAST_EPOCHS = 50, 5
MOST_BATCH, LEAST_BATCH = 128, 8


@dataclass(frozen=True)
class Finetune:
    """What fine-tuning has beside training.

    Attributes:
        start: The model that the run started from, as it was given.
        freeze: Weights that keep their values: "backbone" (all but the classifier) or "all-but-attention" (all but the
            attentions and the classifier). None: all weights learn.
        layer_decay: Factor of the learning rate from each layer to the one before it; the classifier has optim.lr.
        patience: Evaluations without a better val accuracy after which the run ends; 0: never.
    """

    start: str
    freeze: Annotated[str, one_of(*FREEZE)] | None = None
    layer_decay: Share = 0.75
    patience: NonNegativeInt = 10


@dataclass(frozen=True)
class FinetuneRecipe:
    """A trained model that learns the classes of other images."""

    command: ClassVar = "finetune"
    name: str
    model: ModelSettings
    data: Data
    augment: Augment
    finetune: Finetune
    optim: Optim
    schedule: Schedule
    run: Run
    teacher: TeacherSettings = field(default_factory=TeacherSettings)

    def check_relations(self) -> None:
        """Raise where settings of different groups exclude each other."""
        check_cache(self.data, self.augment)
        if self.run.ema is not None:
            raise ValueError("fine-tuning keeps the best weights on the val images: run.ema must be none")
        self.run.check_not_sharded("fine-tuning holds a trained model and its best weights in each process")

    def summary(self, images: int, steps_per_epoch: int) -> str:
        """What was chosen for this many images, and why where it is a default, in one line."""
        epochs, batch, patience = self.schedule.epochs, self.run.batch, self.finetune.patience
        why_epochs = " (the fewer images, the more)" if epochs == default_epochs(images) else ""
        why_batch = " (small enough for many steps)" if batch == default_batch(images) else ""
        rate, decay = f"learning rate {self.optim.lr:g}", self.finetune.layer_decay
        if self.finetune.freeze == BACKBONE:
            rate += " for the classifier alone"
        elif decay < 1:
            rate += f", times {decay:g} for each earlier layer (their features are general)"
        else:
            rate += " in all layers"
        can_stop = 0 < patience < epochs / self.run.eval_epochs
        stop = f"stops after {patience} evaluations without a better one" if can_stop else "does not stop early"
        return (
            f"{epochs} epochs{why_epochs} of {steps_per_epoch} steps, batch {batch}{why_batch}, {self.data.size} px, "
            f"{rate}, {stop}"
        )


def default_augment(path: str) -> Augment:
    """Large crops, flips and light color jitter; digits stay as they are, since a flipped one is none."""
    if path == "digits":
        return Augment(crop="none", flip=0.0, smoothing=0.1)
    return Augment(scale=(0.5, 1.0), color_jitter=0.2, smoothing=0.1)


def default_epochs(images: int) -> int:
    """1500 / sqrt(images), from 5 to 50: more images make more steps, and need fewer epochs."""
    return min(MOST_EPOCHS, max(LEAST_EPOCHS, round(1500 / math.sqrt(images))))


def default_batch(images: int) -> int:
    """The largest power of two that makes 16 steps per epoch, from 8 to 128."""
    return min(MOST_BATCH, max(LEAST_BATCH, 2 ** int(math.log2(max(1, images / 16)))))


def default_schedule(epochs: int) -> Schedule:
    """A tenth of the epochs, at least one, is warm-up; a run of one epoch has none."""
    return Schedule(epochs, warmup_epochs=max(1, epochs // 10) if epochs > 1 else 0, min_lr=1e-6)
