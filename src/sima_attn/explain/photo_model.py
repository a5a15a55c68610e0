"""A model for photos of any aspect ratio.

Shapes: images [1, 3, height, width].
"""

import math
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sima_attn.conversion.huggingface import is_pretrained_model
from sima_attn.data.images import to_rgb
from sima_attn.explain.reading import Reading, read_attention
from sima_attn.models.huggingface import with_timm_interface
from sima_attn.models.loading import LoadedModel, classes_of, load_model
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.nn.token_ref import sima_modules, trained_at

UNTRAINED = "has no trained weights: what it shows is chance"


class PhotoModel(LoadedModel):
    """A loaded model, and how a photo enters it. Unlike in evaluation, nothing of the photo is cropped."""

    @property
    def size(self) -> int:
        """Side in pixels of the square images it was trained on."""
        return self.preprocessing.size

    @cached_property
    def multiple(self) -> int:
        """The sides of an image should be multiples of this."""
        info: Any = getattr(self.model, "feature_info", None) or [{}]
        return int(info[-1].get("reduction", 16)) if isinstance(info, list) else 16

    @cached_property
    def any_size(self) -> bool:
        """Whether it accepts images of other sizes than `size`."""
        return _runs(self.model, 3 * self.multiple, 3 * self.multiple)

    @cached_property
    def any_shape(self) -> bool:
        """Whether it accepts images that are not square; otherwise photos are resized to a square."""
        return _runs(self.model, 4 * self.multiple, 3 * self.multiple)

    @cached_property
    def has_maps(self) -> bool:
        """Whether attentions of it can be read, tested by a forward pass."""
        image = torch.zeros(1, 3, self.size, self.size)
        try:
            return bool(read_attention(self.model, image).layers)
        except ValueError:
            return False

    def input_size(self, width: int, height: int, size: int | None = None) -> tuple[int, int]:
        """(height, width) at which a photo enters: about as many tokens as in training, the shape of the photo.

        SimA's output depends on the number of tokens, so that number is kept, not a side.
        """
        size = size or self.size
        if size != self.size and not self.any_size:
            raise ValueError(f"{self.name} takes images of {self.size} px only, got size={size}")
        if size < self.multiple:
            raise ValueError(f"size must be {self.multiple} px or more for {self.name}, got {size}")
        if not self.any_shape:
            return size, size
        tokens = (size // self.multiple) ** 2
        rows = min(tokens, max(1, round(math.sqrt(tokens * height / width))))
        return rows * self.multiple, max(1, round(tokens / rows)) * self.multiple

    def prepare(self, photo: Image.Image, size: int | None = None) -> Tensor:
        """A photo -> normalized image [1, 3, height, width], on the CPU; `size` as that of a square photo."""
        height, width = self.input_size(*photo.size, size)
        resized = to_rgb(photo).resize((width, height), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255).permute(2, 0, 1)[None]  # [1, 3, h, w]
        how = self.preprocessing
        mean, std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (how.mean, how.std))
        return (pixels - mean) / std

    def read(self, photo: Image.Image, size: int | None = None) -> Reading:
        """Attention maps of one forward pass of a photo.

        SimA's output shrinks with the number of tokens, so at another size than that of training `token_ref` brings it
        back to the scale that the later layers were trained with.
        """
        image = self.prepare(photo, size)
        shrinks = size not in (None, self.size) and sima_modules(self.model)
        with trained_at(self.model, self.size) if shrinks else nullcontext():
            return read_attention(self.model, image)


def load_photo_model(what: str | Path | None = None, *, device: str = "cpu") -> PhotoModel:
    """Load a model by name, run or file; see `load_model`."""
    return PhotoModel(**vars(load_model(what, features=None, device=device)))


def photo_model(
    model: nn.Module,
    *,
    name: str | None = None,
    trained: bool = True,
    classes: list[str] | None = None,
    size: int | None = None,
) -> PhotoModel:
    """Wrap a model; what is not given is read from its timm configuration, or its image processor (transformers)."""
    name = name or type(model).__name__
    if is_pretrained_model(model):
        model = with_timm_interface(model)
    preprocessing = Preprocessing.of_model(model, size)
    if preprocessing is None:
        raise ValueError(
            f"{name} has no timm configuration that says how a photo is made ready for it: give a normalized tensor "
            "[1, 3, height, width]"
        )
    known, words = classes_of(model)
    return PhotoModel(name, model, preprocessing, classes or known, words, trained)


@torch.no_grad()
def _runs(model: nn.Module, height: int, width: int) -> bool:
    """Whether the model accepts images of a size, tested by a forward pass: no attribute tells for all models."""
    try:
        with eval_mode(model):
            model(torch.zeros(1, 3, height, width).to(next(model.parameters())))
    except (AssertionError, RuntimeError, ValueError):
        return False
    return True
