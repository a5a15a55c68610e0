"""Settings of a linearization: stages, learning rates and losses."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, ClassVar, NamedTuple

from sima_attn._settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share, between
from sima_attn.data.settings import Augment, Data, check_cache
from sima_attn.models.settings import ModelSettings
from sima_attn.train.recipes import Optim, Run

BLOCKS, ATTENTIONS, NETWORK, FINETUNE = STAGES = ("blocks", "attentions", "network", "finetune")
WARMUP = 0.1  # part of each stage in which the learning rate rises
DEFAULT_BUDGET = 0.99


class Stage(NamedTuple):
    """A stage: its name, its first epoch, its number of epochs, and its learning rate relative to optim.lr."""

    name: str
    first: int
    epochs: int
    lr: float


@dataclass(frozen=True)
class Stages:
    """Four stages; in each, the learning rate rises linearly over a tenth of its steps and follows a cosine to 0.

    Attributes:
        block_epochs: Epochs in which each new attention learns the teacher's output for the teacher's input.
        attention_epochs: Epochs in which the new attentions learn to match the final output of the network.
        network_epochs: Epochs in which all weights do.
        finetune_epochs: Epochs in which all weights learn from the labels of the images.
        attention_lr, network_lr, finetune_lr: Learning rates of the later stages, relative to optim.lr.
    """

    block_epochs: PositiveInt = 26
    attention_epochs: NonNegativeInt = 13
    network_epochs: NonNegativeInt = 13
    finetune_epochs: NonNegativeInt = 0
    attention_lr: PositiveFloat = 0.025
    network_lr: PositiveFloat = 0.005
    finetune_lr: PositiveFloat = 0.02

    @property
    def stages(self) -> list[Stage]:
        """The stages that have epochs, in their order."""
        epochs = (self.block_epochs, self.attention_epochs, self.network_epochs, self.finetune_epochs)
        rates = (1.0, self.attention_lr, self.network_lr, self.finetune_lr)
        starts = accumulate(epochs, initial=0)
        return [Stage(*each) for each in zip(STAGES, starts, epochs, rates, strict=False) if each[2]]

    @property
    def all_epochs(self) -> int:
        """Epochs of the run."""
        return sum(stage.epochs for stage in self.stages)

    def at(self, step: int, steps_per_epoch: int) -> Stage:
        """The stage of a step, counted from 0."""
        return next(stage for stage in reversed(self.stages) if step >= stage.first * steps_per_epoch)

    def stage(self, step: int, steps_per_epoch: int) -> str:
        """The name of that stage."""
        return self.at(step, steps_per_epoch).name

    def first_step(self, name: str, steps_per_epoch: int) -> int | None:
        """The first step of a stage, counted from 0; None if it has no epochs."""
        return next((stage.first * steps_per_epoch for stage in self.stages if stage.name == name), None)

    def last_steps(self, steps_per_epoch: int) -> list[int]:
        """The number of completed steps at the end of each stage."""
        return [(stage.first + stage.epochs) * steps_per_epoch for stage in self.stages]

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """Factor of the learning rate in a step, counted from 0."""
        stage = self.at(step, steps_per_epoch)
        done = (step + 0.5 - stage.first * steps_per_epoch) / (stage.epochs * steps_per_epoch)
        if done < WARMUP:
            return stage.lr * done / WARMUP
        return stage.lr * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))) / 2


@dataclass(frozen=True)
class Transfer:
    """What the student learns from.

    Attributes:
        teacher_attention: Attention of the teacher, as in `model.attention`.
        held_out: Part of the images to measure on and not to train on, where the data have no val images.
        logits: Weight of the Kullback-Leibler divergence of the logits, for teachers with a classifier.
        attentions: Weight of the mean relative error of the outputs of the new attentions, in the stages that match the
            final output. The student runs as a whole there, so that each attention learns to correct those before it.
        keep: Number of attentions that stay those of the teacher, chosen after the first stage; None finds the smallest
            number that reaches the budget.
        budget: For keep=None: cosine of the final tokens or, with labels, accuracy relative to the teacher's.
        candidates: Attentions tried for each one that is kept, those with the largest errors.
    """

    teacher_attention: str | None = None
    held_out: Annotated[float, between(0.01, 0.5)] = 0.1
    logits: NonNegativeFloat = 1.0
    attentions: NonNegativeFloat = 1.0
    keep: NonNegativeInt | None = 0
    budget: Share | None = None
    candidates: PositiveInt = 4

    def check_relations(self) -> None:
        """Raise unless there is a budget exactly where the number of kept attentions follows from it."""
        if self.budget is not None and self.keep is not None:
            raise ValueError(
                f"a budget of {self.budget} decides how many attentions are kept, so keep must be auto, got {self.keep}"
            )
        if self.keep is None and self.budget is None:
            raise ValueError(f"keep=auto needs a budget, such as {DEFAULT_BUDGET}")


@dataclass(frozen=True)
class Report:
    """What is measured for the report beside the errors.

    Attributes:
        trade: Largest number of kept attentions for which the report shows cosine and time; 0 omits the table.
        speed: Measure time and memory of teacher and student.
        photos: Held-out images in features.png; 0 omits it.
    """

    trade: NonNegativeInt = 4
    speed: bool = True
    photos: NonNegativeInt = 4


@dataclass(frozen=True)
class LinearizeRecipe:
    """A linearization; `model` is the student."""

    command: ClassVar = "linearize"
    name: str
    model: ModelSettings
    data: Data
    augment: Augment
    transfer: Transfer
    optim: Optim
    schedule: Stages
    run: Run
    report: Report = Report()

    def check_relations(self) -> None:
        """Raise for settings that a linearization does not use."""
        for setting, value in {
            "augment.mixup": self.augment.mixup,
            "augment.cutmix": self.augment.cutmix,
            "augment.smoothing": self.augment.smoothing,
        }.items():
            if value and not self.schedule.finetune_epochs:
                raise ValueError(
                    f"the student learns from outputs, not from labels: {setting} must be 0 without a stage of "
                    f"fine-tuning, got {value}"
                )
        self.run.check_not_sharded("linearizing calls parts of teacher and student in each process")
        if self.data.val is not None:
            raise ValueError(f"data.val must be none, got {self.data.val}: set transfer.held_out instead")
        check_cache(self.data, self.augment)
        if self.run.ema is not None:
            raise ValueError("the best weights on held-out images are kept: run.ema must be none")


def epochs_for(steps: int, images: int, batch: int) -> int:
    """Whole epochs of at least that many steps."""
    return math.ceil(steps / max(1, images // batch))
