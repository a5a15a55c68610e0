"""Settings of a linearization: stages, learning rates and losses."""

import math
from dataclasses import dataclass
from typing import Annotated

from sima_attn._settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, between
from sima_attn.data.settings import Augment, Data
from sima_attn.models.settings import ModelSettings
from sima_attn.train.recipes import Optim, Run

BLOCKS, ATTENTIONS, NETWORK = STAGES = ("blocks", "attentions", "network")
WARMUP = 0.1  # part of each stage in which the learning rate rises


@dataclass(frozen=True)
class Stages:
    """Three stages; in each, the learning rate rises linearly over a tenth of its steps and follows a cosine to 0.

    Attributes:
        block_epochs: Epochs in which each new attention learns the teacher's output for the teacher's input.
        attention_epochs: Epochs in which the new attentions learn to match the final output of the network.
        network_epochs: Epochs in which all weights do.
        attention_lr, network_lr: Learning rates of the last two stages, relative to optim.lr.
    """

    block_epochs: PositiveInt = 26
    attention_epochs: NonNegativeInt = 13
    network_epochs: NonNegativeInt = 13
    attention_lr: PositiveFloat = 0.2
    network_lr: PositiveFloat = 0.02

    @property
    def all_epochs(self) -> int:
        """Epochs of the run."""
        return self.block_epochs + self.attention_epochs + self.network_epochs

    def stage(self, step: int, steps_per_epoch: int) -> str:
        """The stage of a step, counted from 0."""
        epoch = step // steps_per_epoch
        if epoch < self.block_epochs:
            return BLOCKS
        return ATTENTIONS if epoch < self.block_epochs + self.attention_epochs else NETWORK

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """Factor of the learning rate in a step, counted from 0."""
        stage = self.stage(step, steps_per_epoch)
        first = {BLOCKS: 0, ATTENTIONS: self.block_epochs, NETWORK: self.block_epochs + self.attention_epochs}[stage]
        epochs, lr = {
            BLOCKS: (self.block_epochs, 1.0),
            ATTENTIONS: (self.attention_epochs, self.attention_lr),
            NETWORK: (self.network_epochs, self.network_lr),
        }[stage]
        done = (step + 0.5 - first * steps_per_epoch) / (epochs * steps_per_epoch)
        if done < WARMUP:
            return lr * done / WARMUP
        return lr * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))) / 2


@dataclass(frozen=True)
class Transfer:
    """What the student learns from.

    Attributes:
        teacher_attention: Attention of the teacher, as in `model.attention`.
        held_out: Part of the images to measure on and not to train on, where the data have no val images.
        logits: Weight of the Kullback-Leibler divergence of the logits, for teachers with a classifier.
        attentions: Weight of the mean relative error of the outputs of the new attentions, in the stages that match the
            final output. The student runs as a whole there, so that each attention learns to correct those before it.
    """

    teacher_attention: str | None = None
    held_out: Annotated[float, between(0.01, 0.5)] = 0.1
    logits: NonNegativeFloat = 1.0
    attentions: NonNegativeFloat = 1.0


@dataclass(frozen=True)
class LinearizeRecipe:
    """A linearization; `model` is the student."""

    name: str
    model: ModelSettings
    data: Data
    augment: Augment
    transfer: Transfer
    optim: Optim
    schedule: Stages
    run: Run

    def check_relations(self) -> None:
        """Raise for settings that a linearization does not use."""
        for setting, value in {
            "augment.mixup": self.augment.mixup,
            "augment.cutmix": self.augment.cutmix,
            "augment.smoothing": self.augment.smoothing,
        }.items():
            if value:
                raise ValueError(f"the student learns from outputs, not from labels: {setting} must be 0, got {value}")
        if self.data.cache and self.augment.randaugment is not None:
            raise ValueError("RandAugment needs single images: set data.cache=false or augment.randaugment=none")
        if self.run.ema is not None:
            raise ValueError("the best weights on held-out images are kept: run.ema must be none")


def epochs_for(steps: int, images: int, batch: int) -> int:
    """Whole epochs of at least that many steps."""
    return math.ceil(steps / max(1, images // batch))
