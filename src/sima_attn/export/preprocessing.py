"""Photo of any size -> what a model takes: the facts, the transform for PIL images, and the same inside an ONNX graph.

Shapes: photo [height, width, 3] in bytes -> images [B, 3, size, size], normalised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.data.images import cut_ends

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_SIZE = 2**13


@dataclass(frozen=True)
class Preprocessing:
    """How a photo becomes an input: shorter side to size / crop_ratio, the middle cut out, normalised."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop_ratio: float = 1.0
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size <= MOST_SIZE:
            raise ValueError(f"size must be a whole number from 1 to {MOST_SIZE} pixels, got {self.size!r}")
        for name in ("mean", "std"):
            object.__setattr__(self, name, _three_numbers(name, getattr(self, name)))
        if min(self.std) <= 0:
            raise ValueError(f"std must be above 0, got {self.std}")
        if self.interpolation not in ("bicubic", "bilinear"):
            raise ValueError(f"interpolation must be bicubic or bilinear, got {self.interpolation!r}")
        if not isinstance(self.crop_ratio, int | float) or not 0 < self.crop_ratio <= 1:
            raise ValueError(f"crop_ratio must lie in (0, 1], got {self.crop_ratio!r}")
        if self.size / self.crop_ratio > MOST_SIZE:
            raise ValueError(
                f"size / crop_ratio must be at most {MOST_SIZE} pixels, got {self.size} / {self.crop_ratio}"
            )

    @classmethod
    def of_model(cls, model: nn.Module, size: int) -> Preprocessing | None:
        """What timm's configuration of a model says, None for a model without one."""
        config: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
        if "mean" not in config:
            return None
        return cls(size, config["mean"], config["std"], config.get("crop_pct", 1.0), config["interpolation"])

    @classmethod
    def from_json(cls, text: str) -> Preprocessing:
        """From the metadata of an ONNX file, which anybody may have written."""
        try:
            values = json.loads(text)
            return cls(**values)
        except (json.JSONDecodeError, RecursionError, TypeError) as error:
            raise ValueError(f"this is not the pre-processing of an exported model: {str(text)[:200]!r}") from error

    def to_json(self) -> str:
        """For the metadata of an ONNX file."""
        return json.dumps(asdict(self))

    def transform(self) -> Callable[[Image], Tensor]:
        """PIL image -> [3, size, size]: timm's own evaluation transform."""
        from timm.data.transforms_factory import transforms_imagenet_eval
        from torchvision import transforms

        by_timm = transforms_imagenet_eval(
            self.size, crop_pct=self.crop_ratio, interpolation=self.interpolation, mean=self.mean, std=self.std
        )
        return transforms.Compose([cut_ends, by_timm])

    def in_graph(self) -> nn.Module:
        """The same as a module that exports: photo [height, width, 3] in bytes -> [1, 3, size, size]."""
        return PreparePhoto(self)


class PreparePhoto(nn.Module):
    """PIL's arithmetic but for its rounding to bytes: within about one grey level of `Preprocessing.transform`.

    That transform cuts the ends off a photo more than 10 times as long as wide before resizing, a graph does not: there
    the two may be shifted by a part of a pixel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, how: Preprocessing) -> None:
        super().__init__()
        self.size, self.interpolation = how.size, how.interpolation
        self.shorter_side = int(how.size / how.crop_ratio)
        self.register_buffer("mean", torch.tensor(how.mean).view(1, 3, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(how.std).view(1, 3, 1, 1) * 255)

    def forward(self, photo: Tensor) -> Tensor:
        """Photo [height, width, 3] in bytes -> [1, 3, size, size]."""
        height, width, _ = photo.shape
        rows = torch.sym_max(self.shorter_side, self.shorter_side * height // width)
        columns = torch.sym_max(self.shorter_side, self.shorter_side * width // height)
        image = photo.permute(2, 0, 1)[None].float()  # [1, 3, height, width]
        image = self.resize(image, height, columns)  # PIL, too, resizes rows first and clips between the two
        image = self.resize(image, rows, columns)
        image = image.narrow(2, middle(rows - self.size), self.size).narrow(3, middle(columns - self.size), self.size)
        # An exporter cannot know what it measures: saying it keeps everything after this free of open sizes.
        image = image.reshape(1, 3, self.size, self.size)
        return (image - self.mean) / self.std

    def resize(self, image: Tensor, rows: Any, columns: Any) -> Tensor:
        """[1, 3, height, width] -> [1, 3, rows, columns], values kept within those of bytes."""
        return F.interpolate(image, size=(rows, columns), mode=self.interpolation, antialias=True).clamp(0, 255)


def _three_numbers(name: str, given: Any) -> tuple[float, float, float]:
    values = tuple(given) if isinstance(given, list | tuple) else ()  # from JSON they come as a list
    if len(values) != 3 or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError(f"{name} must be three numbers, got {given!r}")
    return values


def middle(excess: Any) -> Any:
    """round(excess / 2), halves to the even number, in integers only: where torchvision cuts."""
    return (excess + excess // 2 % 2) // 2
