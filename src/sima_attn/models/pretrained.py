"""Weights that come with the package: one safetensors file a model, which `pretrained=True` loads offline.

A file says all there is to know of its weights: its metadata are the `Card`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sima_attn._files import written_whole

WEIGHTS = Path(__file__).parents[1] / "weights"
MOST_BYTES = 12_000_000
_KEY = "about"  # where `sima train` writes recipe and classes too, so that its readers read these files


@dataclass(frozen=True)
class Card:
    """What a file of weights says of itself.

    Attributes:
        classes: Their names in the data, in the order of the logits.
        words: Class -> what to call it, where that is another word.
        size: Side of the images in pixels.
        mean, std: What the channels, in [0, 1], are normalised by.
        recipe: The resolved recipe.
        epochs: Those that were made of the recipe's.
        top1, top5: Accuracy in percent on `images` val images, of the weights as stored.
        terms: What the weights may be used for.
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
    words: dict[str, str] = field(default_factory=dict)

    def timm_cfg(self) -> dict[str, Any]:
        """The card in the fields of timm's pretrained configuration."""
        return {
            "num_classes": len(self.classes),
            "input_size": (3, self.size, self.size),
            "mean": tuple(self.mean),
            "std": tuple(self.std),
            "label_names": tuple(self.classes),
            "label_descriptions": dict(self.words),
            "description": f"{self.top1:.1f} % top-1 on {self.images} val images. {self.terms}",
        }


def weights_file(name: str) -> Path:
    """Where the weights of a model are, or would be."""
    return WEIGHTS / f"{name}.safetensors"


def shipped_cfg(name: str) -> dict[str, Any]:
    """The fields of timm's configuration for a model that comes with weights; an error for any other."""
    path = weights_file(name)
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in WEIGHTS.glob("*.safetensors"))) or "none"
        raise ValueError(
            f"there are no published weights for {name} (weights come with the package for: {shipped}): use "
            "pretrained=False, or give weights of your own with pretrained_cfg_overlay=dict(file=path)"
        )
    return {**read_card(path).timm_cfg(), "file": str(path)}


def read_card(path: Path) -> Card:
    """The card in a file that `save_shipped` wrote."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
    missing = [name for name in ("classes", "recipe", "epochs", "top1", "terms") if name not in about]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)} in its metadata: it was not written by `sima ship`")
    return Card(**about)


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


def save_shipped(weights: Mapping[str, Tensor], name: str, card: Card) -> Path:
    """Write the weights of a registered model as the file that `pretrained=True` will load."""
    import timm
    from safetensors.torch import save_file

    with torch.device("meta"):
        wanted = timm.create_model(name, num_classes=len(card.classes)).state_dict()
    wrong = [key for key in sorted(wanted.keys() | weights.keys()) if _shape(wanted, key) != _shape(weights, key)]
    if wrong:
        raise ValueError(
            f"these weights are not those of {name}: {wrong[0]} is {_shape(weights, wrong[0])}, the model's is "
            f"{_shape(wanted, wrong[0])} ({len(wrong)} such keys); train the model under that very name"
        )
    path = weights_file(name)
    with written_whole(path) as temporary:
        save_file(in_half(weights), temporary, metadata={_KEY: json.dumps(asdict(card))})
        size = temporary.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"{name} takes {size / 1e6:.1f} MB, a file may have {MOST_BYTES / 1e6:.0f} MB")
    return path


def _shape(tensors: Mapping[str, Tensor], key: str) -> tuple[int, ...] | str:
    return tuple(tensors[key].shape) if key in tensors else "missing"
