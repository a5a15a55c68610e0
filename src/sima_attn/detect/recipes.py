"""Recipes of detection runs: the paper's, and one that learns 96 images by heart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sima_attn._errors import unknown_name
from sima_attn.detect.augment import Augment
from sima_attn.train.recipes import Optim, Run, StepSchedule, check_loop


@dataclass(frozen=True)
class Detector:
    """A Mask R-CNN; see `build_mask_rcnn`.

    Attributes:
        name: A DeiT, XCiT or CvT of the zoo.
        weights: A file or a run of `sima train` with the weights that the backbone starts from; None: from nothing.
        drop_path: Rate of stochastic depth.
        blocks: Blocks that feed the pyramid, counted from 1; None: 4, 6, 8 and 12 of 12.
        norm_maps: Whether a LayerNorm stands between each block's map and the pyramid.
        freeze_statistics: Whether BatchNorm of the backbone keeps the statistics it came with.
        proposals: Regions of an image that the heads look at.
        kwargs: Arguments of the model, e.g. attention, token_ref, relu, pretrained.
    """

    name: str
    weights: str | None = None
    drop_path: float = 0.05
    blocks: tuple[int, int, int, int] | None = None
    norm_maps: bool = False
    freeze_statistics: bool = False
    proposals: int = 1000
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """Images and annotations.

    Attributes:
        path: A folder in COCO's format; see `open_coco`.
        train_split, eval_split: Which of its splits are trained and evaluated on; to evaluate on several, write them
            with commas, "train,val".
        side, longest: Of an image in evaluation: the shorter side, and the most of the longer one, in pixels.
        eval_batch: Images a process evaluates at a time.
        workers: Processes that decode. The batches do not depend on their number.
    """

    path: str
    train_split: str = "train"
    eval_split: str = "val"
    side: int = 800
    longest: int = 1333
    eval_batch: int = 2
    workers: int = 4

    @property
    def eval_splits(self) -> list[str]:
        """The splits that are evaluated on."""
        return [split.strip() for split in self.eval_split.split(",")]


@dataclass(frozen=True)
class DetectRecipe:
    """A detection run."""

    name: str
    model: Detector
    data: Data
    augment: Augment
    optim: Optim
    schedule: StepSchedule
    run: Run


def coco() -> DetectRecipe:
    """Mask R-CNN on XCiT-S12/16 with SimA, COCO, 36 epochs; box AP 44.8 and mask AP 40.3 in the paper."""
    return DetectRecipe(
        name="coco",
        model=Detector("sima_xcit_small_12_p16_224"),
        data=Data("coco"),
        augment=Augment(),
        optim=Optim(lr=1e-4, lr_batch=0, weight_decay=0.05),
        schedule=StepSchedule(epochs=36, drops=(27, 33), warmup_steps=500),
        run=Run(batch=16, precision="fp16", eval_epochs=3),
    )


def coco_mini() -> DetectRecipe:
    """The weights of the package learn 96 images by heart, evaluated on them and on others; minutes on one GPU."""
    return DetectRecipe(
        name="coco_mini",
        # Patches of 4 pixels: the maps are made coarser by pooling alone, and nothing but a norm can scale them.
        model=Detector(
            "sima_xcit_mini_p4_64_relu",
            drop_path=0.0,
            norm_maps=True,
            freeze_statistics=True,
            kwargs={"pretrained": True, "token_ref": "train"},
        ),
        data=Data("coco-mini", eval_split="train,val", side=480, longest=576, eval_batch=8),
        # Every time the same image: to learn by heart is the task.
        augment=Augment(flip=0.0, sides=(480, 480), longest=576, crop=0.0),
        optim=Optim(lr=3e-4, lr_batch=0, weight_decay=0.05, clip=1.0),
        schedule=StepSchedule(epochs=150, drops=(120, 142), warmup_steps=50),
        run=Run(batch=8, precision="bf16", eval_epochs=75, log_steps=12),
    )


RECIPES: dict[str, Callable[[], DetectRecipe]] = {make.__name__: make for make in (coco, coco_mini)}


def named_recipe(name: str) -> DetectRecipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise unknown_name("detection recipe", name, RECIPES)
    return RECIPES[name]()


def check(recipe: DetectRecipe) -> None:
    """Raise for a value that no run can have, before anything is read or built."""
    check_loop(recipe.optim, recipe.run)
    augment, schedule, data = recipe.augment, recipe.schedule, recipe.data
    splits = data.eval_splits
    if not all(splits) or len(set(splits)) != len(splits):
        raise ValueError(
            f"data.eval_split must be a split, or several with commas between them, got {data.eval_split!r}"
        )
    for where, number in (
        ("schedule.epochs", schedule.epochs),
        ("model.proposals", recipe.model.proposals),
        ("data.side", data.side),
        ("data.eval_batch", data.eval_batch),
    ):
        if number < 1:
            raise ValueError(f"{where} must be at least 1, got {number}")
    for where, share in (
        ("augment.flip", augment.flip),
        ("augment.crop", augment.crop),
        ("model.drop_path", recipe.model.drop_path),
        ("schedule.warmup_ratio", schedule.warmup_ratio),
    ):
        if not 0 <= share <= 1:
            raise ValueError(f"{where} must lie between 0 and 1, got {share}")
    for where, (low, high) in (
        ("augment.sides", augment.sides),
        ("augment.crop_sides", augment.crop_sides),
        ("augment.crop_size", augment.crop_size),
        ("schedule.drops", schedule.drops),
    ):
        if not 1 <= low <= high:
            raise ValueError(f"{where} must be two numbers from 1 on, the lower one first, got {low}, {high}")
    for where, longest, side in (
        ("augment.longest", augment.longest, augment.sides[1]),
        ("data.longest", data.longest, data.side),
    ):
        if longest < side:
            raise ValueError(f"{where} must not be below the shorter side's {side}, got {longest}")
