"""Recipes of classification runs: frozen dataclasses of settings, one function per recipe, listed in RECIPES.

Values of the paper's models are those that the paper prints, otherwise those of the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from sima_attn._errors import unknown_name
from sima_attn._settings import (
    Decay,
    Limit,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    one_of,
)
from sima_attn.data.settings import Augment, Data, check_cache
from sima_attn.models.settings import ModelSettings as Model
from sima_attn.train.mesh import mesh_sizes


@dataclass(frozen=True)
class Optim:
    """The optimizer.

    Attributes:
        name: Name in timm's registry of optimizers.
        lr: Learning rate for `lr_batch` images per step, scaled linearly with run.batch; not scaled if lr_batch is 0.
        clip: Maximum norm of the gradient; None disables clipping.
    """

    name: str = "adamw"
    lr: PositiveFloat = 5e-4
    lr_batch: NonNegativeInt = 512
    weight_decay: NonNegativeFloat = 0.05
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    clip: PositiveFloat | None = None

    def lr_at(self, batch: int) -> float:
        """Learning rate for a batch size, summed over all processes."""
        return self.lr * batch / self.lr_batch if self.lr_batch else self.lr


@dataclass(frozen=True)
class Schedule:
    """Cosine schedule over `epochs` down to `min_lr`, which include a linear warm-up; then a cool-down at `min_lr`."""

    epochs: PositiveInt
    warmup_epochs: NonNegativeInt = 5
    warmup_lr: NonNegativeFloat = 1e-6
    min_lr: NonNegativeFloat = 1e-5
    cooldown_epochs: NonNegativeInt = 0

    @property
    def all_epochs(self) -> int:
        """Epochs of the run, including the cool-down."""
        return self.epochs + self.cooldown_epochs

    def check_relations(self) -> None:
        """Raise where the warm-up takes the whole run."""
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"schedule.warmup_epochs must be below schedule.epochs={self.epochs}, got {self.warmup_epochs}"
            )


@dataclass(frozen=True)
class StepSchedule:
    """Step schedule: the learning rate is multiplied by `decay` after each of the epochs in `drops`.

    It first rises linearly over `warmup_steps` optimizer steps, from `warmup_ratio` times its value.
    """

    epochs: PositiveInt
    drops: Range[PositiveInt]
    decay: PositiveFloat = 0.1
    warmup_steps: NonNegativeInt = 0
    warmup_ratio: Probability = 1e-3

    @property
    def all_epochs(self) -> int:
        """Epochs of the run."""
        return self.epochs

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """Factor of the learning rate in a step, counted from 0."""
        dropped = self.decay ** sum(step >= epoch * steps_per_epoch for epoch in self.drops)
        if step >= self.warmup_steps:
            return dropped
        return dropped * (self.warmup_ratio + (1 - self.warmup_ratio) * step / self.warmup_steps)


@dataclass(frozen=True)
class Run:
    """Settings of the training loop.

    Attributes:
        batch: Images per optimizer step, summed over all processes and accumulation steps.
        accumulate: Gradient accumulation: passes per optimizer step.
        strategy: Of several processes: "ddp" holds the whole model in each, "fsdp" a part of it.
        timeout_minutes: How long a process waits for the others before the run ends with an error.
        compile: Compile the model with torch.compile.
        cuda_graph: Capture forward and backward pass in a CUDA graph, for small models that are limited by kernel
            launches. Not supported for detection, where image sizes vary.
        grad_checkpointing: Recompute the blocks in the backward pass to save memory.
        ema: Decay of the moving average of the weights; None disables it.
        ema_warmup: Increase the decay from 0, for short runs.
        checkpoint_minutes, checkpoint_steps: Interval between checkpoints in minutes and in steps; 0 steps: only by
            time.
        eval_epochs: Epochs between evaluations; the last epoch is always evaluated.
        log_steps: Steps per row of the log.
        threads: CPU threads of torch; 0 keeps torch's default.
        mesh: Processes that share a batch and processes that share each image, e.g. "data=2,sequence=2"; None: all
            share the batch. For classification and fine-tuning.
    """

    batch: PositiveInt = 1024
    accumulate: PositiveInt = 1
    strategy: Annotated[str, one_of("ddp", "fsdp")] = "ddp"
    timeout_minutes: PositiveFloat = 10.0
    seed: NonNegativeInt = 0
    precision: Annotated[str, one_of("fp32", "bf16", "fp16")] = "fp32"
    compile: bool = False
    cuda_graph: bool = False
    grad_checkpointing: bool = False
    ema: Annotated[float, Limit("above 0 and below 1", lambda value: 0 < value < 1)] | None = None
    ema_warmup: bool = False
    checkpoint_minutes: NonNegativeFloat = 5.0
    checkpoint_steps: NonNegativeInt = 0
    eval_epochs: PositiveInt = 1
    log_steps: PositiveInt = 50
    threads: NonNegativeInt = 0
    mesh: str | None = None

    def check_relations(self) -> None:
        """Raise where the mesh has unknown names or sizes, or splits images of a model whose parameters are sharded."""
        _, sequence = mesh_sizes(self.mesh)
        if sequence > 1 and self.strategy == "fsdp":
            raise ValueError(
                f"run.mesh={self.mesh} splits images over processes, which run.strategy=fsdp does not support: set "
                "run.strategy=ddp, or omit the mesh"
            )

    def check_not_sharded(self, why: str) -> None:
        """Raise for the strategy fsdp, in a kind of run that does not support it."""
        if self.strategy == "fsdp":
            raise ValueError(f"{why}: run.strategy must be ddp, got fsdp")


@dataclass(frozen=True)
class TeacherSettings:
    """A teacher and its part of the loss.

    Attributes:
        path: The run of a trained classifier of the same classes, or any other model that `sima eval` takes; None: the
            student learns from the labels alone.
        weight: Of the teacher's loss; that of the labels has the rest.
        temperature: Divides the logits of both: above 1, small probabilities count more.
    """

    path: str | None = None
    weight: Probability = 0.5
    temperature: PositiveFloat = 1.0

    def check_relations(self) -> None:
        """Raise for settings of a teacher that there is not."""
        if self.path is None and self != TeacherSettings():
            raise ValueError("teacher.weight and teacher.temperature need a teacher: give one with --teacher")


@dataclass(frozen=True)
class Recipe:
    """A classification run."""

    command: ClassVar = "train"
    name: str
    model: Model
    data: Data
    augment: Augment
    optim: Optim
    schedule: Schedule
    run: Run
    teacher: TeacherSettings = TeacherSettings()

    def check_relations(self) -> None:
        """Raise where settings of different groups exclude each other."""
        check_cache(self.data, self.augment)


def digits() -> Recipe:
    """A small SimA transformer without a single exp() on scikit-learn's digits: 98 %, half a minute on one core."""
    # Patches of 2 pixels and average pooling: with single pixels and a class token accuracy stays at chance.
    vit = {
        "img_size": 8,
        "patch_size": 2,
        "embed_dim": 96,
        "depth": 2,
        "num_heads": 6,
        "mlp_ratio": 2,
        "relu": True,
        "local_mixer": True,  # higher accuracy in fewer epochs
        "weight_init": "jax",  # timm's default standard deviation of 0.02 is too small for so few channels
    }
    return Recipe(
        name="digits",
        model=Model("sima_vit_mini_patch4_64", "sima", kwargs=vit),
        data=Data("digits", size=8, mean=(0.3, 0.3, 0.3), std=(0.37, 0.37, 0.37), workers=0, cache=True),
        augment=Augment(crop="none", flip=0.0, cutmix=1.0, mix_prob=0.5, smoothing=0.1),
        optim=Optim(lr=5e-3, lr_batch=0, clip=1.0),
        schedule=Schedule(epochs=30, warmup_epochs=5),
        # One thread: steps are too small to gain from two, and much slower with two on a busy machine.
        run=Run(batch=128, log_steps=11, eval_epochs=3, threads=1),
    )


def tiny_imagenet() -> Recipe:
    """Tiny ImageNet at 64 px: 12 layers, 192 channels, 3 heads, patches of 4; a few minutes on one GPU.

    The learning rate suits SimA; softmax reaches its best accuracy at half of it.
    """
    return Recipe(
        name="tiny_imagenet",
        model=Model("sima_vit_mini_patch4_64", "sima", drop_path=0.05),
        data=Data("tiny-imagenet", size=64, cache=True, workers=0),
        augment=Augment(crop="padded", padding=8, mixup=0.8, cutmix=1.0, smoothing=0.1),
        optim=Optim(lr=2e-3, lr_batch=0, clip=1.0),
        schedule=Schedule(epochs=60, warmup_epochs=5),
        run=Run(batch=512, precision="bf16", compile=True),
    )


def shipped() -> Recipe:
    """The pretrained model of the package: small XCiT, SimA and ReLU, Tiny ImageNet; a few minutes on one GPU."""
    return Recipe(
        name="shipped",
        model=Model("sima_xcit_mini_p4_64_relu", "sima", drop_path=0.1, constant_drop_path=False),
        data=Data("tiny-imagenet", size=64, cache=True, workers=0),
        augment=Augment(scale=(0.35, 1.0), color_jitter=0.2, mixup=0.8, cutmix=1.0, mix_prob=0.8, smoothing=0.1),
        optim=Optim(lr=2e-3, lr_batch=0, clip=1.0),
        schedule=Schedule(epochs=100, warmup_epochs=5),
        # The average covers about the last five of the 100 epochs.
        run=Run(batch=512, precision="bf16", compile=True, ema=0.998, ema_warmup=True, eval_epochs=5),
    )


def photos() -> Recipe:
    """Photos at 128 px, for up to 100,000 of them: XCiT-T12/8 with SimA and ReLU; on one GPU."""
    return Recipe(
        name="photos",
        model=Model("sima_xcit_tiny_12_p8_224_relu", "sima", drop_path=0.1, constant_drop_path=False),
        data=Data("photos", size=128, workers=4),
        augment=Augment(scale=(0.35, 1.0), color_jitter=0.2, mixup=0.8, cutmix=1.0, mix_prob=0.8, smoothing=0.1),
        optim=Optim(lr=2e-3, lr_batch=0, clip=1.0),
        schedule=Schedule(epochs=100, warmup_epochs=5),
        run=Run(batch=512, precision="bf16"),
    )


def _imagenet(name: str, model: str, epochs: int) -> Recipe:
    return Recipe(
        name=name,
        model=Model(model, "sima", drop_path=0.05),
        data=Data("imagenet"),
        augment=Augment(
            color_jitter=0.4,
            randaugment="rand-m9-mstd0.5-inc1",
            erasing=0.25,
            repeats=3,
            mixup=0.8,
            cutmix=1.0,
            smoothing=0.1,
        ),
        optim=Optim(),
        schedule=Schedule(epochs=epochs, cooldown_epochs=10),
        run=Run(precision="fp16", ema=0.99996),
    )


def deit_small() -> Recipe:
    """DeiT-S with SimA on ImageNet: 300 epochs; 79.8 % in the paper."""
    return _imagenet("deit_small", "sima_deit_small_patch16_224", epochs=300)


def deit_small_1head() -> Recipe:
    """DeiT-S with single-head SimA on ImageNet: 300 epochs; 79.4 % in the paper."""
    return _imagenet("deit_small_1head", "sima_deit_small_patch16_224_1head", epochs=300)


def deit_small_relu() -> Recipe:
    """DeiT-S with SimA and ReLU, without exp(), on ImageNet: 300 epochs; 79.6 % in the paper."""
    return _imagenet("deit_small_relu", "sima_deit_small_patch16_224_relu", epochs=300)


def xcit_small_12() -> Recipe:
    """XCiT-S12/16 with SimA on ImageNet: 400 epochs; 82.1 % in the paper."""
    return _imagenet("xcit_small_12", "sima_xcit_small_12_p16_224", epochs=400)


def xcit_tiny_12_p8() -> Recipe:
    """XCiT-T12/8 with SimA on ImageNet: 400 epochs; 79.4 % in the paper."""
    return _imagenet("xcit_tiny_12_p8", "sima_xcit_tiny_12_p8_224", epochs=400)


def xcit_tiny_24() -> Recipe:
    """XCiT-T24/16 with SimA on ImageNet: 400 epochs; 79.8 % in the paper."""
    return _imagenet("xcit_tiny_24", "sima_xcit_tiny_24_p16_224", epochs=400)


def cvt_13() -> Recipe:
    """CvT-13 with SimA on ImageNet: 300 epochs; 81.4 % in the paper."""
    # CvT's code uses drop path 0.1 in its last stage only; the paper states one set of values for all models.
    return _imagenet("cvt_13", "sima_cvt_13", epochs=300)


RECIPES: dict[str, Callable[[], Recipe]] = {
    make.__name__: make
    for make in (
        digits,
        tiny_imagenet,
        shipped,
        photos,
        deit_small,
        deit_small_1head,
        deit_small_relu,
        xcit_small_12,
        xcit_tiny_12_p8,
        xcit_tiny_24,
        cvt_13,
    )
}


def named_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]()
