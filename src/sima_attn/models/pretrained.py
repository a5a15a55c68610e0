"""Weights that come with the package: one safetensors file per model, which `pretrained=True` loads offline.

A file says all there is to know of its weights: its metadata are the `Card`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn._errors import check_known
from sima_attn._files import atomic_write
from sima_attn.models.names import WEIGHTS
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.models.weight_files import ABOUT, check_fits, read_about

MOST_BYTES = 12_000_000


@dataclass(frozen=True)
class Card:
    """The metadata of a weight file.

    Attributes:
        classes: Their names in the data, in the order of the logits.
        words: Class -> what to call it, where that is another word.
        size: Side of the images in pixels.
        mean, std: What the channels, in [0, 1], are normalized by.
        recipe: The resolved recipe.
        epochs: Those that were made of the recipe's.
        top1, top5: Accuracy in percent on `images` val images, of the weights as stored.
        terms: What the weights may be used for.
        other_sizes: Image side in pixels -> top-1 at it, on the same images.
        unsure_below: Probability of the most likely class below which a photo may be of none of the classes; measured
            by `benchmarks/unsure.py`.
    """

    classes: list[str]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    recipe: dict[str, Any]
    epochs: float
    top1: float
    top5: float
    images: int
    terms: str
    other_sizes: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    unsure_below: float | None = None

    @property
    def preprocessing(self) -> Preprocessing:
        """How a photo becomes an input of the model."""
        facts = {"size": self.size, "mean": self.mean, "std": self.std}
        return Preprocessing.from_recipe({**self.recipe.get("data", {}), **facts})

    def timm_cfg(self) -> dict[str, Any]:
        """The card in the fields of timm's pretrained configuration."""
        return {
            **self.preprocessing.to_timm(),
            "num_classes": len(self.classes),
            "label_names": tuple(self.classes),
            "label_descriptions": dict(self.words),
            "description": f"{self.top1:.1f} % top-1 on {self.images} val images. {self.terms}",
        }


def weights_file(name: str) -> Path:
    """Path of the weights of a model, whether they exist or not."""
    return WEIGHTS / f"{name}.safetensors"


def shipped_models() -> list[str]:
    """Names of the models whose weights come with the package."""
    return sorted(file.stem for file in WEIGHTS.glob("*.safetensors"))


def shipped_cfg(name: str) -> dict[str, Any]:
    """The fields of timm's configuration for a model that comes with weights; an error for any other."""
    path = weights_file(name)
    if not path.is_file():
        shipped = ", ".join(shipped_models()) or "none"
        raise ValueError(
            f"there are no published weights for {name} (weights come with the package for: {shipped}): use "
            "pretrained=False, or give weights of your own with pretrained_cfg_overlay=dict(file=path)"
        )
    return {**read_card(path).timm_cfg(), "file": str(path)}


def read_card(path: Path) -> Card:
    """The card in a file that `save_shipped` wrote."""
    return Card(**read_about(path))


def in_half(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices and kernels in float16; norms, biases and statistics, which are small, as they are."""
    halved = {
        name: (tensor.half() if tensor.is_floating_point() and tensor.dim() > 1 else tensor).cpu().contiguous()
        for name, tensor in weights.items()
    }
    for name, tensor in halved.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} does not fit float16: its greatest value is {weights[name].abs().max():g}")
    return halved


def check_same_model(model: nn.Module, name: str, settings: Mapping[str, Any], size: int) -> None:
    """Raise unless the model that `timm.create_model(name)` builds gives, with the weights of `model`, its logits.

    Equal shapes are not enough: another attention or activation has the same ones.

    Args:
        model: The trained model, on the CPU in float32.
        settings: The group `model` of its recipe, to say what differs.
        size: Side in pixels of the random images that both are shown.
    """
    import timm

    check_known("model of this package", name, timm.list_models("sima_*"))  # others have no weights in the package
    if not _same_logits(model, timm.create_model(name, num_classes=model.num_classes), size):
        chosen = {"name": settings["name"], "attention": settings["attention"], **settings["kwargs"]}
        listed = ", ".join(f"{key}={value}" for key, value in chosen.items() if value is not None)
        raise ValueError(
            f"the run's model is not {name} as pretrained=True builds it: with the same weights the outputs differ. "
            f"The run has {listed}. Train without the settings that {name} does not have, or give the name of a model "
            "that has them"
        )


@torch.no_grad()
def _same_logits(one: nn.Module, other: nn.Module, size: int) -> bool:
    """Whether the other model accepts the weights and returns the same logits, up to float32 rounding."""
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    try:
        other.load_state_dict(one.state_dict())
        first, second = one.eval()(images), other.eval()(images)  # [2, K]
    except (RuntimeError, ValueError, AssertionError):  # it does not accept these weights or images
        return False
    return bool((first - second).abs().max() <= 1e-5 * first.abs().max())


def save_shipped(weights: Mapping[str, Tensor], name: str, card: Card) -> Path:
    """Write the weights of a registered model as the file that `pretrained=True` will load."""
    import timm
    from safetensors.torch import save_file

    with torch.device("meta"):
        wanted = timm.create_model(name, num_classes=len(card.classes)).state_dict()
    check_fits(weights, wanted, f"these weights are not those of {name}", "; train the model under this name")
    path = weights_file(name)
    with atomic_write(path) as temporary:
        save_file(in_half(weights), temporary, metadata={ABOUT: json.dumps(asdict(card))})
        size = temporary.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"{name} takes {size / 1e6:.1f} MB, a file may have {MOST_BYTES / 1e6:.0f} MB")
    return path
