"""Recipes of detection runs: the paper's, one for images of one's own, and a small one that overfits 96 images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from sima_attn._errors import check_known
from sima_attn._settings import PositiveInt, Probability, between
from sima_attn.data.settings import Pixels, Workers
from sima_attn.detect.augment import Augment
from sima_attn.train.recipes import Optim, Run, StepSchedule


@dataclass(frozen=True)
class Detector:
    """A Mask R-CNN or Faster R-CNN; see `build_rcnn`.

    Attributes:
        name: A DeiT, XCiT or CvT of this package.
        masks: False trains a Faster R-CNN, which finds boxes only; None: a Mask R-CNN if most objects have masks.
        weights: Initial weights of the backbone: a file, or a run of `sima train`; None: random weights.
        drop_path: Rate of stochastic depth.
        blocks: Blocks that feed the pyramid, counted from 1; None: 4, 6, 8 and 12 of 12.
        norm_maps: Apply a LayerNorm to the map of each block before the pyramid.
        freeze_statistics: Keep the running statistics of the backbone's BatchNorms.
        proposals: Regions per image that the heads process.
        kwargs: Arguments of the model, e.g. attention, token_ref, relu, pretrained.
    """

    name: str
    masks: bool | None = None
    weights: str | None = None
    drop_path: Probability = 0.05
    blocks: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None = None
    norm_maps: bool = False
    freeze_statistics: bool = False
    proposals: PositiveInt = 1000
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """Images and annotations.

    Attributes:
        path: A folder with COCO files or YOLO labels; see `open_split`.
        train_split, eval_split: Splits for training and evaluation; several evaluation splits are separated by commas,
            e.g. "train,val".
        side, longest: Size of images in evaluation: shorter side, and maximum of the longer side, in pixels.
        eval_batch: Images per evaluation batch and process.
        workers: Processes that decode images. The batches do not depend on their number.
    """

    path: str
    train_split: str = "train"
    eval_split: str = "val"
    side: Pixels = 800
    longest: Pixels = 1333
    eval_batch: Annotated[int, between(1, 2**10)] = 2
    workers: Workers = 4

    @property
    def eval_splits(self) -> list[str]:
        """The evaluation splits."""
        return [split.strip() for split in self.eval_split.split(",")]

    def check_relations(self) -> None:
        """Raise for wrong lists of splits, and where the longer side is limited to less than the shorter one."""
        splits = self.eval_splits
        if not all(splits) or len(set(splits)) != len(splits):
            raise ValueError(
                f"data.eval_split must be one split, or different ones separated by commas, got {self.eval_split!r}"
            )
        if self.longest < self.side:
            raise ValueError(f"data.longest must be at least data.side={self.side}, got {self.longest}")


@dataclass(frozen=True)
class DetectRecipe:
    """A detection run."""

    command: ClassVar = "detect train"
    name: str
    model: Detector
    data: Data
    augment: Augment
    optim: Optim
    schedule: StepSchedule
    run: Run

    def check_relations(self) -> None:
        """Raise for settings of other runs that detection does not support."""
        self.run.check_not_sharded("detection calls parts of the model in each process")


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
    """Overfit 96 images from the weights of the package, evaluated on these and on others; minutes on one GPU."""
    return DetectRecipe(
        name="coco_mini",
        # With patches of 4 pixels the pyramid only pools the maps; without a norm nothing rescales them.
        model=Detector(
            "sima_xcit_mini_p4_64_relu",
            drop_path=0.0,
            norm_maps=True,
            freeze_statistics=True,
            kwargs={"pretrained": True, "token_ref": "train"},
        ),
        data=Data("coco-mini", eval_split="train,val", side=480, longest=576, eval_batch=8),
        # No augmentation: the aim is to overfit.
        augment=Augment(flip=0.0, sides=(480, 480), longest=576, crop=0.0),
        optim=Optim(lr=3e-4, lr_batch=0, weight_decay=0.05, clip=1.0),
        schedule=StepSchedule(epochs=150, drops=(120, 142), warmup_steps=50),
        run=Run(batch=8, precision="bf16", eval_epochs=75, log_steps=12),
    )


def own_images() -> DetectRecipe:
    """Images of one's own, up to tens of thousands: from the weights of the package, with flips, sizes and crops."""
    mini = coco_mini()
    return replace(
        mini,
        name="own_images",
        data=Data("images", side=480, longest=576),
        augment=Augment(sides=(384, 576), longest=576),
        schedule=StepSchedule(epochs=100, drops=(75, 92), warmup_steps=50),
        run=replace(mini.run, eval_epochs=5),
    )


RECIPES: dict[str, Callable[[], DetectRecipe]] = {make.__name__: make for make in (coco, coco_mini, own_images)}


def named_recipe(name: str) -> DetectRecipe:
    """The recipe of that name."""
    check_known("detection recipe", name, RECIPES)
    return RECIPES[name]()
