"""How a photo becomes the input of a model: size, mean, std, crop and interpolation, carried by one class.

`data.loader.evaluation_transform` is the transform for PIL images, `export.photo_graph` the same inside an ONNX graph.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

MAX_SIZE = 2**13
CROP_MODES = ("center", "squash")


@dataclass(frozen=True)
class Preprocessing:
    """Resize the shorter side, or both of them, to size / crop_ratio, crop the center, normalize.

    Attributes:
        size: Side of the square input in pixels.
        mean, std: Of the channels, in [0, 1].
        crop_ratio: Share of the resized image that the center crop keeps.
        interpolation: bicubic or bilinear.
        crop_mode: As in timm: "center" resizes the shorter side and crops the longer one, "squash" resizes both sides,
            whatever the aspect ratio.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop_ratio: float = 1.0
    interpolation: str = "bicubic"
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size <= MAX_SIZE:
            raise ValueError(f"size must be a whole number from 1 to {MAX_SIZE} pixels, got {self.size!r}")
        for name in ("mean", "std"):
            object.__setattr__(self, name, _three_numbers(name, getattr(self, name)))
        if min(self.std) <= 0:
            raise ValueError(f"std must be above 0, got {self.std}")
        if self.interpolation not in ("bicubic", "bilinear"):
            raise ValueError(f"interpolation must be bicubic or bilinear, got {self.interpolation!r}")
        if self.crop_mode not in CROP_MODES:
            raise ValueError(f"crop_mode must be {' or '.join(CROP_MODES)}, got {self.crop_mode!r}")
        if not isinstance(self.crop_ratio, int | float) or not 0 < self.crop_ratio <= 1:
            raise ValueError(f"crop_ratio must lie in (0, 1], got {self.crop_ratio!r}")
        if self.size / self.crop_ratio > MAX_SIZE:
            raise ValueError(f"size / crop_ratio must be at most {MAX_SIZE} pixels, got {self.size / self.crop_ratio}")

    @classmethod
    def of_model(cls, model: nn.Module, size: int | None = None) -> Preprocessing | None:
        """From timm's configuration of a model, at its own size or another; None for a model without one."""
        config: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
        if "mean" not in config or not (size or config.get("input_size")):
            return None
        return cls(
            size or config["input_size"][-1],
            config["mean"],
            config["std"],
            config.get("crop_pct") or 1.0,
            config.get("interpolation") or "bicubic",
            # timm's third mode, "border", crops the center too, with a border where crop_pct is above 1.
            "squash" if config.get("crop_mode") == "squash" else "center",
        )

    @property
    def resized(self) -> int:
        """The side in pixels to which images are resized before the crop, rounded down as timm does."""
        return int(self.size / self.crop_ratio)

    def to_timm(self) -> dict[str, Any]:
        """As fields of timm's configuration of a model."""
        return {
            "input_size": (3, self.size, self.size),
            "mean": self.mean,
            "std": self.std,
            "crop_pct": self.crop_ratio,
            "interpolation": self.interpolation,
            "crop_mode": self.crop_mode,
        }

    @classmethod
    def from_recipe(cls, data: Mapping[str, Any]) -> Preprocessing:
        """From the group `data` of a recipe, as `to_dict` writes it; anyone may have written the file it comes from."""
        try:
            return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})
        except (TypeError, ValueError) as error:
            raise ValueError(f"its data settings do not describe images: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Preprocessing:
        """From the metadata of an ONNX file, which anyone may have written."""
        try:
            return cls(**json.loads(text))
        except (json.JSONDecodeError, RecursionError, TypeError) as error:
            raise ValueError(f"this is not the pre-processing of an exported model: {str(text)[:200]!r}") from error

    def to_json(self) -> str:
        """For the metadata of an ONNX file."""
        return json.dumps(asdict(self))


def _three_numbers(name: str, given: Any) -> tuple[float, float, float]:
    values = tuple(given) if isinstance(given, list | tuple) else ()  # JSON has lists
    if len(values) != 3 or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError(f"{name} must be three numbers, got {given!r}")
    return values
