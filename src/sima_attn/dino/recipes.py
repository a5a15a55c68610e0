"""Recipes of self-distillation (DINO): what a run is, one function a run, and DINO_RECIPES names them all.

The numbers are the paper's where it prints them (100 epochs, batch 256, learning rate 2.5e-4, weight decay 0.04 to
0.4); the rest is what DINO's published code has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sima_attn._errors import unknown_name
from sima_attn._settings import above_zero, at_least
from sima_attn.data.settings import Augment, Crops, Data
from sima_attn.probe.settings import Probe
from sima_attn.train import recipes
from sima_attn.train.recipes import Model, Optim, Run, Schedule


@dataclass(frozen=True)
class Distill:
    """How the student learns from the teacher.

    Attributes:
        out_dim, hidden_dim, bottleneck_dim, head_layers: Of the projection head.
        norm_last_layer: Keep the gains of the weight-normalised last layer at 1.
        freeze_last_layer: Epochs in which the last layer does not move.
        student_temp, teacher_temp: Temperatures; the teacher's rises from `teacher_temp_start` over
            `teacher_temp_epochs`.
        centre_momentum: Of the mean of the teacher's outputs, which is taken off them.
        momentum: Of the teacher at the start; it rises to 1 as a cosine.
        weight_decay_end: Where optim.weight_decay goes as a cosine.
        clip: Greatest norm of the gradient of each parameter, as DINO's code has it; optim.clip is of all together.
        token_ref: SimA's branch shrinks as 1/N, and local crops have fewer tokens: make up for it, relative to a
            global crop. False is the paper.
        class_token_ref: Multiply SimA's class attention, in models that have one, by N over the root of the tokens of
            a global crop, so that the class token depends on the image from the start. False is the paper.
        collapse_steps: Stop after so many steps in a row in which the teacher says the same of every image.
    """

    out_dim: int = 65536
    hidden_dim: int = 2048
    bottleneck_dim: int = 256
    head_layers: int = 3
    norm_last_layer: bool = True
    freeze_last_layer: int = 1
    student_temp: float = 0.1
    teacher_temp: float = 0.04
    teacher_temp_start: float = 0.04
    teacher_temp_epochs: int = 0
    centre_momentum: float = 0.9
    momentum: float = 0.996
    weight_decay_end: float = 0.4
    clip: float | None = 3.0
    token_ref: bool = False
    class_token_ref: bool = False
    collapse_steps: int = 500


@dataclass(frozen=True)
class DinoRecipe:
    """A run of self-distillation."""

    name: str
    model: Model
    data: Data
    crops: Crops
    distill: Distill
    optim: Optim
    schedule: Schedule
    run: Run
    probe: Probe = field(default_factory=Probe)


def digits() -> DinoRecipe:
    """A small SimA transformer on scikit-learn's digits: 20-NN 93 %, random weights 88 %; a minute on one CPU core."""
    vit = {
        "img_size": 16,
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 4,
        "mlp_ratio": 2,
        "local_mixer": True,  # without it 20-NN stays at 68 %, where random weights have it
        "weight_init": "jax",
    }
    return DinoRecipe(
        name="digits",
        model=Model("sima_vit_mini_patch4_64", "sima", kwargs=vit),
        data=Data("digits", size=16, mean=(0.3, 0.3, 0.3), std=(0.37, 0.37, 0.37), workers=0, cache=True),
        # Digits have no colours, and their mirror images are no digits.
        crops=Crops(
            global_scale=(0.4, 1.0),
            local_count=2,
            local_size=8,
            local_scale=(0.15, 0.5),
            flip=0.0,
            jitter=0.0,
            grey=0.0,
            blur=(0.0, 0.0, 0.0),
            solarise=0.0,
        ),
        distill=Distill(
            out_dim=512,
            hidden_dim=256,
            bottleneck_dim=64,
            freeze_last_layer=2,
            momentum=0.99,
            weight_decay_end=0.1,
            collapse_steps=50,
        ),
        optim=Optim(lr=2e-3, lr_batch=0, weight_decay=0.04),
        schedule=Schedule(epochs=20, warmup_epochs=3, warmup_lr=0.0, min_lr=1e-6),
        run=Run(batch=64, log_steps=22, eval_epochs=5, threads=1),
        probe=Probe(lr=0.1, batch=128),
    )


def miniature() -> DinoRecipe:
    """XCiT-T12/8 with SimA at 64 px, for Tiny ImageNet: 100 epochs on one GPU."""
    return DinoRecipe(
        name="miniature",
        # Both arguments suit any family: --set model.name=sima_deit_tiny_patch16_224 is the ViT of the same width.
        model=Model("sima_xcit_tiny_12_p8_224", "sima", drop_path=0.05, kwargs={"img_size": 64, "patch_size": 8}),
        data=Data("tiny-imagenet", size=64, cache=True, workers=0),
        crops=Crops(local_size=24, blur_sigma=(0.1, 1.0)),  # of 64, as DINO's 96 of 224
        # Without the class token's factor SimA's teacher soon says the same of every image.
        distill=Distill(out_dim=8192, class_token_ref=True),
        # Few images are few steps: a small batch makes the most of them.
        optim=Optim(lr=5e-4, lr_batch=128, weight_decay=0.04),
        schedule=Schedule(epochs=100, warmup_epochs=10, warmup_lr=0.0, min_lr=1e-6),
        run=Run(batch=128, precision="bf16", eval_epochs=5),
        # The paper's 0.001 is for 1.28 million images; over 100 epochs of 40 thousand the rates add up to the same.
        probe=Probe(lr=0.03),
    )


def _imagenet(name: str, model: Model) -> DinoRecipe:
    return DinoRecipe(
        name=name,
        model=model,
        data=Data("imagenet", crop_ratio=0.875),  # features are taken from the middle 224 of 256 pixels
        crops=Crops(),
        distill=Distill(),
        optim=Optim(lr=2.5e-4, lr_batch=256, weight_decay=0.04),
        schedule=Schedule(epochs=100, warmup_epochs=10, warmup_lr=0.0, min_lr=1e-6),
        run=Run(batch=256, precision="fp16", eval_epochs=10),
    )


def xcit_small_12() -> DinoRecipe:
    """XCiT-S12/16 with SimA on ImageNet: 100 epochs; 20-NN 71.2 %, linear 75.5 % in the paper."""
    return _imagenet("xcit_small_12", Model("sima_xcit_small_12_p16_224", "sima", drop_path=0.1))


def xcit_small_12_xca() -> DinoRecipe:
    """XCiT-S12/16 itself on ImageNet: 100 epochs; 20-NN 71.6 %, linear 75.8 % in the paper."""
    return _imagenet("xcit_small_12_xca", Model("sima_xcit_small_12_p16_224", "xca", drop_path=0.1))


def vit_small() -> DinoRecipe:
    """ViT-S/16 on ImageNet: 100 epochs; 20-NN 69.3 %, linear 74.0 % in the paper."""
    model = Model("sima_deit_small_patch16_224", "softmax", drop_path=0.1, constant_drop_path=False)
    return _imagenet("vit_small", model)


DINO_RECIPES: dict[str, Callable[[], DinoRecipe]] = {
    make.__name__: make for make in (digits, miniature, xcit_small_12, xcit_small_12_xca, vit_small)
}


def named_dino_recipe(name: str) -> DinoRecipe:
    """The recipe of that name."""
    if name not in DINO_RECIPES:
        raise unknown_name("DINO recipe", name, DINO_RECIPES)
    return DINO_RECIPES[name]()


def check(recipe: DinoRecipe) -> None:
    """Raise for a value that no run can have, before anything is read or built."""
    # What a classification run has too is checked in one place.
    recipes.check(
        recipes.Recipe(recipe.name, recipe.model, recipe.data, Augment(), recipe.optim, recipe.schedule, recipe.run)
    )
    crops, distill, probe = recipe.crops, recipe.distill, recipe.probe
    if recipe.model.num_classes is not None:
        raise ValueError(
            f"DINO learns without classes: leave model.num_classes at none, got {recipe.model.num_classes}"
        )
    if recipe.run.ema is not None:
        raise ValueError("the teacher is the average of the weights: leave run.ema at none, set distill.momentum")
    if crops.global_count < 1 or crops.local_count < 0 or crops.global_count + crops.local_count < 2:
        raise ValueError(
            "DINO compares views: it needs a global crop and one more of any kind, got "
            f"crops.global_count={crops.global_count}, crops.local_count={crops.local_count}"
        )
    for where, least, number in (
        ("crops.local_size", 1, crops.local_size),
        ("distill.out_dim", 2, distill.out_dim),
        ("distill.hidden_dim", 1, distill.hidden_dim),
        ("distill.bottleneck_dim", 1, distill.bottleneck_dim),
        ("distill.head_layers", 1, distill.head_layers),
        ("distill.freeze_last_layer", 0, distill.freeze_last_layer),
        ("distill.teacher_temp_epochs", 0, distill.teacher_temp_epochs),
        ("distill.collapse_steps", 1, distill.collapse_steps),
        ("probe.k", 1, probe.k),
        ("probe.bank", 0, probe.bank),
        ("probe.epochs", 1, probe.epochs),
        ("probe.batch", 1, probe.batch),
    ):
        if number < least:
            raise ValueError(f"{where} must be at least {least}, got {number}")
    for where, (low, high), most in (
        ("crops.global_scale", crops.global_scale, 1.0),
        ("crops.local_scale", crops.local_scale, 1.0),
        ("crops.blur_sigma", crops.blur_sigma, float("inf")),
    ):
        if not 0 < low <= high <= most:
            raise ValueError(f"{where} must rise from above 0 to at most {most:g}, got {low}, {high}")
    for where, share in (
        ("crops.flip", crops.flip),
        ("crops.jitter", crops.jitter),
        ("crops.grey", crops.grey),
        ("crops.solarise", crops.solarise),
        *(("crops.blur", probability) for probability in crops.blur),
        ("distill.momentum", distill.momentum),
        ("distill.centre_momentum", distill.centre_momentum),
    ):
        if not 0 <= share <= 1:
            raise ValueError(f"{where} must lie between 0 and 1, got {share}")
    at_least(0, {"distill.weight_decay_end": distill.weight_decay_end, "crops.strength": min(crops.strength)})
    if crops.strength[3] > 0.5:
        raise ValueError(f"the hue, the last of crops.strength, must be at most 0.5, got {crops.strength[3]}")
    above_zero(
        {
            "distill.student_temp": distill.student_temp,
            "distill.teacher_temp": distill.teacher_temp,
            "distill.teacher_temp_start": distill.teacher_temp_start,
            "distill.clip": 1.0 if distill.clip is None else distill.clip,
            "probe.temperature": probe.temperature,
            "probe.lr": probe.lr,
        }
    )
    if 0 < probe.bank < probe.k:
        raise ValueError(f"probe.bank={probe.bank} images have no {probe.k} neighbours; make it larger, or 0")
