"""Recipes: what a run is, as frozen dataclasses; one function a run, and RECIPES names them all.

The numbers of the paper's rows are its own where it prints them; the rest is what the authors' code has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sima_attn._errors import unknown_name
from sima_attn._settings import above_zero, at_least
from sima_attn.data.settings import CROPS, INTERPOLATIONS, Augment, Data
from sima_attn.models.settings import ModelSettings as Model

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Optim:
    """The optimiser.

    Attributes:
        name: timm's name of it.
        lr: Learning rate at `lr_batch` images a step; scaled linearly to the batch. lr_batch 0: not scaled.
        clip: Greatest norm of the gradient; None is off.
    """

    name: str = "adamw"
    lr: float = 5e-4
    lr_batch: int = 512
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = None

    def lr_at(self, batch: int) -> float:
        """The learning rate for a batch of all processes together."""
        return self.lr * batch / self.lr_batch if self.lr_batch else self.lr


@dataclass(frozen=True)
class Schedule:
    """Cosine from the learning rate to `min_lr` over `epochs`, after a linear warm-up inside them; then `cooldown`."""

    epochs: int
    warmup_epochs: int = 5
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    cooldown_epochs: int = 0

    @property
    def all_epochs(self) -> int:
        """Epochs with the cool-down."""
        return self.epochs + self.cooldown_epochs


@dataclass(frozen=True)
class StepSchedule:
    """The learning rate times `decay` after each of the epochs in `drops`.

    Before that it rises linearly over `warmup_steps` optimiser steps, from `warmup_ratio` times itself.
    """

    epochs: int
    drops: tuple[int, int]
    decay: float = 0.1
    warmup_steps: int = 0
    warmup_ratio: float = 1e-3

    @property
    def all_epochs(self) -> int:
        """Epochs of the run."""
        return self.epochs

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """What the learning rate is multiplied by in a step, counted from 0."""
        dropped = self.decay ** sum(step >= epoch * steps_per_epoch for epoch in self.drops)
        if step >= self.warmup_steps:
            return dropped
        return dropped * (self.warmup_ratio + (1 - self.warmup_ratio) * step / self.warmup_steps)


@dataclass(frozen=True)
class Run:
    """How the loop runs.

    Attributes:
        batch: Images a step, over all processes and accumulated parts.
        accumulate: Parts that a process takes its share of the batch in.
        compile: Compile the model with torch.compile.
        cuda_graph: Record the pass of a step once and replay it: for small models, which keep the GPU waiting. Not
            for detection, whose images differ in size.
        grad_checkpointing: Compute the blocks again in the backward pass, to save memory.
        ema: Decay of the moving average of the weights; None is off.
        ema_warmup: Let the decay rise from 0, for short runs.
        checkpoint_minutes, checkpoint_steps: A checkpoint after so long, and every so many steps (0: by time alone).
        eval_epochs: Evaluate every so many epochs, and at the end.
        log_steps: Steps a row of the log stands for.
        threads: CPU threads of torch; 0 leaves its own choice.
    """

    batch: int = 1024
    accumulate: int = 1
    seed: int = 0
    precision: str = "fp32"
    compile: bool = False
    cuda_graph: bool = False
    grad_checkpointing: bool = False
    ema: float | None = None
    ema_warmup: bool = False
    checkpoint_minutes: float = 5.0
    checkpoint_steps: int = 0
    eval_epochs: int = 1
    log_steps: int = 50
    threads: int = 0


@dataclass(frozen=True)
class Recipe:
    """A classification run."""

    name: str
    model: Model
    data: Data
    augment: Augment
    optim: Optim
    schedule: Schedule
    run: Run


def digits() -> Recipe:
    """A small SimA transformer without a single exp() on scikit-learn's digits: 98 %, half a minute on one core."""
    # Patches of 2 and average pooling: with single pixels and a class token it does not leave chance.
    vit = {
        "img_size": 8,
        "patch_size": 2,
        "embed_dim": 96,
        "depth": 2,
        "num_heads": 6,
        "mlp_ratio": 2,
        "relu": True,
        "local_mixer": True,  # fewer mistakes, in fewer epochs
        "weight_init": "jax",  # timm's own deviation of 0.02 is too small for so few channels
    }
    return Recipe(
        name="digits",
        model=Model("sima_vit_mini_patch4_64", "sima", kwargs=vit),
        data=Data("digits", size=8, mean=(0.3, 0.3, 0.3), std=(0.37, 0.37, 0.37), workers=0, cache=True),
        augment=Augment(crop="none", flip=0.0, cutmix=1.0, mix_prob=0.5, smoothing=0.1),
        optim=Optim(lr=5e-3, lr_batch=0, clip=1.0),
        schedule=Schedule(epochs=30, warmup_epochs=5),
        # One thread: a step is too small to gain from two, and loses much where another process wants a core.
        run=Run(batch=128, log_steps=11, eval_epochs=3, threads=1),
    )


def tiny_imagenet() -> Recipe:
    """Tiny ImageNet at 64 px: 12 layers, 192 channels, 3 heads, patches of 4; a few minutes on one GPU.

    The learning rate is what SimA takes well; softmax is as good at half of it.
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
    """The model that comes with the package: XCiT in small, SimA and ReLU, Tiny ImageNet; a few minutes on one GPU."""
    return Recipe(
        name="shipped",
        model=Model("sima_xcit_mini_p4_64_relu", "sima", drop_path=0.1, constant_drop_path=False),
        data=Data("tiny-imagenet", size=64, cache=True, workers=0),
        augment=Augment(scale=(0.35, 1.0), color_jitter=0.2, mixup=0.8, cutmix=1.0, mix_prob=0.8, smoothing=0.1),
        optim=Optim(lr=2e-3, lr_batch=0, clip=1.0),
        schedule=Schedule(epochs=100, warmup_epochs=5),
        # The average reaches over the last five epochs or so of the hundred.
        run=Run(batch=512, precision="bf16", compile=True, ema=0.998, ema_warmup=True, eval_epochs=5),
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
    """DeiT-S with SimA of a single head on ImageNet: 300 epochs; 79.4 % in the paper."""
    return _imagenet("deit_small_1head", "sima_deit_small_patch16_224_1head", epochs=300)


def deit_small_relu() -> Recipe:
    """DeiT-S with SimA and ReLU, free of exp(), on ImageNet: 300 epochs; 79.6 % in the paper."""
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
    # CvT's own code has a drop path of 0.1 in its last stage alone; the paper gives one sentence for all models.
    return _imagenet("cvt_13", "sima_cvt_13", epochs=300)


RECIPES: dict[str, Callable[[], Recipe]] = {
    make.__name__: make
    for make in (
        digits,
        tiny_imagenet,
        shipped,
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


def check(recipe: Recipe) -> None:
    """Raise for a value that no run can have, before anything is read or built."""
    check_loop(recipe.optim, recipe.run)
    augment, schedule = recipe.augment, recipe.schedule
    for where, value, allowed in (
        ("augment.crop", augment.crop, CROPS),
        ("data.interpolation", recipe.data.interpolation, INTERPOLATIONS),
    ):
        if value not in allowed:
            raise unknown_name(where, value, allowed)
    at_least(1, {"data.size": recipe.data.size, "augment.repeats": augment.repeats, "schedule.epochs": schedule.epochs})
    at_least(
        0,
        {
            "data.workers": recipe.data.workers,
            "augment.color_jitter": augment.color_jitter,
            "augment.padding": augment.padding,
            "augment.mixup": augment.mixup,
            "augment.cutmix": augment.cutmix,
            "schedule.warmup_epochs": schedule.warmup_epochs,
            "schedule.warmup_lr": schedule.warmup_lr,
            "schedule.min_lr": schedule.min_lr,
            "schedule.cooldown_epochs": schedule.cooldown_epochs,
        },
    )
    above_zero({"data.std": min(recipe.data.std)})
    for where, share in (
        ("augment.flip", recipe.augment.flip),
        ("augment.erasing", recipe.augment.erasing),
        ("augment.mix_prob", recipe.augment.mix_prob),
        ("augment.switch_prob", recipe.augment.switch_prob),
        ("augment.smoothing", recipe.augment.smoothing),
        ("model.drop_path", recipe.model.drop_path),
    ):
        if not 0 <= share <= 1:
            raise ValueError(f"{where} must lie between 0 and 1, got {share}")
    low, high = augment.scale
    if not 0 < low <= high <= 1:
        raise ValueError(f"augment.scale must rise from above 0 to at most 1, got {low}, {high}")
    for name, by, overwritten in (
        ("num_classes", "num_classes", True),
        ("drop_path_rate", "drop_path", recipe.model.drop_path > 0),
        ("attention", "attention", recipe.model.attention is not None),
    ):
        if overwritten and name in recipe.model.kwargs:
            raise ValueError(f"model.kwargs.{name} would be overwritten by model.{by}; set that instead")
    if not 0 < recipe.data.crop_ratio <= 1:
        raise ValueError(f"data.crop_ratio must be above 0 and at most 1, got {recipe.data.crop_ratio}")
    if recipe.schedule.warmup_epochs >= recipe.schedule.epochs:
        raise ValueError(
            f"schedule.warmup_epochs={recipe.schedule.warmup_epochs} leaves nothing of "
            f"schedule.epochs={recipe.schedule.epochs}; set one of them"
        )
    if recipe.augment.crop == "padded" and recipe.augment.padding < 1:
        raise ValueError("augment.crop=padded needs augment.padding of at least 1 pixel")
    if recipe.data.cache and recipe.augment.randaugment is not None:
        raise ValueError(
            "RandAugment works on single images, not on a device cache: set data.cache=false or "
            "augment.randaugment=none"
        )
    if augment.randaugment is not None:
        from timm.data.auto_augment import rand_augment_transform

        try:
            rand_augment_transform(augment.randaugment, {})
        except Exception as error:  # timm asserts, and looks up what it does not know
            raise ValueError(
                f"augment.randaugment must be one of timm's configurations, e.g. rand-m9-mstd0.5-inc1, or none, got "
                f"{augment.randaugment!r}"
            ) from error


def check_loop(optim: Optim, run: Run) -> None:
    """The same for what every kind of run has."""
    if run.precision not in PRECISIONS:
        raise unknown_name("run.precision", run.precision, PRECISIONS)
    above_zero({"optim.lr": optim.lr, "optim.eps": optim.eps})
    at_least(
        1,
        {
            "run.batch": run.batch,
            "run.accumulate": run.accumulate,
            "run.log_steps": run.log_steps,
            "run.eval_epochs": run.eval_epochs,
        },
    )
    at_least(
        0,
        {
            "optim.lr_batch": optim.lr_batch,
            "optim.weight_decay": optim.weight_decay,
            "run.seed": run.seed,
            "run.checkpoint_minutes": run.checkpoint_minutes,
            "run.checkpoint_steps": run.checkpoint_steps,
            "run.threads": run.threads,
        },
    )
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"optim.betas must be two numbers from 0 to below 1, got {optim.betas}")
    if optim.clip is not None and not optim.clip > 0:
        raise ValueError(f"optim.clip must be above 0, or none to be off, got {optim.clip}")
    if run.ema is not None and not 0 < run.ema < 1:
        raise ValueError(f"run.ema must lie between 0 and 1, or be none to be off, got {run.ema}")
