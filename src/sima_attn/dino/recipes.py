"""Recipes of DINO runs: frozen dataclasses of settings, one function per recipe, listed in DINO_RECIPES.

Values are those that the paper prints (100 epochs, batch 256, learning rate 2.5e-4, weight decay 0.04 to 0.4),
otherwise those of DINO's published code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from sima_attn._errors import check_known
from sima_attn._settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Probability, at_least
from sima_attn.data.settings import Crops, Data
from sima_attn.probe.settings import Probe
from sima_attn.train.recipes import Model, Optim, Run, Schedule


@dataclass(frozen=True)
class Distill:
    """Student, teacher and their loss.

    Attributes:
        out_dim, hidden_dim, bottleneck_dim, head_layers: Sizes of the projection head.
        norm_last_layer: Keep the gains of the weight-normalized last layer at 1.
        freeze_last_layer: Epochs in which the last layer is not updated.
        student_temp, teacher_temp: Temperatures; the teacher's rises from `teacher_temp_start` over
            `teacher_temp_epochs`.
        center_momentum: Momentum of the center, the running mean of the teacher's outputs that is subtracted from
            them.
        momentum: Momentum of the teacher at the start; it follows a cosine to 1.
        weight_decay_end: Final weight decay; it follows a cosine from optim.weight_decay.
        clip: Maximum norm of the gradient of each parameter, as in DINO's code; optim.clip limits the norm of all
            parameters together.
        token_ref: Compensate for the smaller number of tokens of local crops, relative to a global crop: SimA's output
            shrinks as 1/N. The paper does not.
        class_token_ref: Multiply SimA's class attention, in models that have one, by N divided by the square root of
            the tokens of a global crop, so that the class token depends on the image from the start. The paper does
            not.
        collapse_steps: Stop after this many consecutive steps in which the teacher's output is the same for every
            image.
    """

    out_dim: Annotated[int, at_least(2)] = 65536
    hidden_dim: PositiveInt = 2048
    bottleneck_dim: PositiveInt = 256
    head_layers: PositiveInt = 3
    norm_last_layer: bool = True
    freeze_last_layer: NonNegativeInt = 1
    student_temp: PositiveFloat = 0.1
    teacher_temp: PositiveFloat = 0.04
    teacher_temp_start: PositiveFloat = 0.04
    teacher_temp_epochs: NonNegativeInt = 0
    center_momentum: Probability = 0.9
    momentum: Probability = 0.996
    weight_decay_end: NonNegativeFloat = 0.4
    clip: PositiveFloat | None = 3.0
    token_ref: bool = False
    class_token_ref: bool = False
    collapse_steps: PositiveInt = 500


@dataclass(frozen=True)
class DinoRecipe:
    """A DINO run."""

    command: ClassVar = "dino"
    name: str
    model: Model
    data: Data
    crops: Crops
    distill: Distill
    optim: Optim
    schedule: Schedule
    run: Run
    probe: Probe = field(default_factory=Probe)

    def check_relations(self) -> None:
        """Raise for settings of other runs that DINO does not use."""
        if self.model.num_classes is not None:
            raise ValueError(
                f"DINO trains without classes: model.num_classes must be none, got {self.model.num_classes}"
            )
        if self.data.val is not None:
            raise ValueError(
                f"DINO holds out no images: data.val must be none, got {self.data.val}; put val images into val/"
            )
        if self.run.ema is not None:
            raise ValueError(
                f"the teacher is the average of the weights: run.ema must be none, got {self.run.ema}; set "
                "distill.momentum instead"
            )


def digits() -> DinoRecipe:
    """A small SimA transformer on scikit-learn's digits: 20-NN 93 %, random weights 88 %; a minute on one CPU core."""
    vit = {
        "img_size": 16,
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 4,
        "mlp_ratio": 2,
        "local_mixer": True,  # without it 20-NN stays at 68 %, the accuracy of random weights
        "weight_init": "jax",
    }
    return DinoRecipe(
        name="digits",
        model=Model("sima_vit_mini_patch4_64", "sima", kwargs=vit),
        data=Data("digits", size=16, mean=(0.3, 0.3, 0.3), std=(0.37, 0.37, 0.37), workers=0, cache=True),
        # Digits have no colors, and mirrored digits are not digits.
        crops=Crops(
            global_scale=(0.4, 1.0),
            local_count=2,
            local_size=8,
            local_scale=(0.15, 0.5),
            flip=0.0,
            jitter=0.0,
            gray=0.0,
            blur=(0.0, 0.0, 0.0),
            solarize=0.0,
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
        # Other families take these arguments, too: model.name=sima_deit_tiny_patch16_224 is the ViT of the same width.
        model=Model("sima_xcit_tiny_12_p8_224", "sima", drop_path=0.05, kwargs={"img_size": 64, "patch_size": 8}),
        data=Data("tiny-imagenet", size=64, cache=True, workers=0),
        crops=Crops(local_size=24, blur_sigma=(0.1, 1.0)),  # in proportion to DINO's 96 of 224
        # Without class_token_ref SimA's teacher soon collapses.
        distill=Distill(out_dim=8192, class_token_ref=True),
        # A small batch, because few images give few steps.
        optim=Optim(lr=5e-4, lr_batch=128, weight_decay=0.04),
        schedule=Schedule(epochs=100, warmup_epochs=10, warmup_lr=0.0, min_lr=1e-6),
        run=Run(batch=128, precision="bf16", eval_epochs=5),
        # The paper's 0.001 is for 1.28 million images; here 40 thousand, so 0.03 gives the same sum over all steps.
        probe=Probe(lr=0.03),
    )


def photos() -> DinoRecipe:
    """Photos at 128 px, for up to 100,000 of them: the model of miniature with patches of 16."""
    small = miniature()
    return replace(
        small,
        name="photos",
        model=replace(small.model, kwargs={"img_size": 128, "patch_size": 16}),
        data=replace(small.data, path="photos", size=128, cache=False, workers=4),  # crops of the whole photo
        crops=replace(small.crops, local_size=48),
    )


def _imagenet(name: str, model: Model) -> DinoRecipe:
    return DinoRecipe(
        name=name,
        model=model,
        data=Data("imagenet", crop_ratio=0.875),  # features of the central 224 of 256 pixels
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
    """XCiT-S12/16 with its own attention (XCA) on ImageNet: 100 epochs; 20-NN 71.6 %, linear 75.8 % in the paper."""
    return _imagenet("xcit_small_12_xca", Model("sima_xcit_small_12_p16_224", "xca", drop_path=0.1))


def vit_small() -> DinoRecipe:
    """ViT-S/16 on ImageNet: 100 epochs; 20-NN 69.3 %, linear 74.0 % in the paper."""
    model = Model("sima_deit_small_patch16_224", "softmax", drop_path=0.1, constant_drop_path=False)
    return _imagenet("vit_small", model)


DINO_RECIPES: dict[str, Callable[[], DinoRecipe]] = {
    make.__name__: make for make in (digits, miniature, photos, xcit_small_12, xcit_small_12_xca, vit_small)
}


def named_dino_recipe(name: str) -> DinoRecipe:
    """The recipe of that name."""
    check_known("DINO recipe", name, DINO_RECIPES)
    return DINO_RECIPES[name]()
