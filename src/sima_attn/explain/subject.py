"""A model to look into: by name, run or file, with what it takes to show it a photo.

Shapes: K classes; images [1, 3, height, width].
"""

from __future__ import annotations

import difflib
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

import sima_attn.models  # noqa: F401  registers our names with timm
from sima_attn.conversion.huggingface import is_pretrained_model
from sima_attn.data.images import to_rgb
from sima_attn.explain.reading import Reading, read_attention
from sima_attn.models.weights import read_state_dict
from sima_attn.nn.token_ref import sima_modules, trained_at

if TYPE_CHECKING:
    from PIL.Image import Image

UNTRAINED = "has no trained weights: what it shows is chance"
DEFAULT = "sima_xcit_mini_p4_64_relu"
DEFAULT_UNTRAINED = "sima_deit_tiny_patch16_224"


@dataclass(frozen=True)
class Subject:
    """A model, and how a photo is made ready for it.

    Attributes:
        size: Side in pixels of the square images it was trained on.
        mean: What is taken from the channels, in [0, 1].
        std: What they are then divided by.
        multiple: What the sides of an image should be multiples of.
        any_size: It takes images of other sizes than `size`.
        any_shape: It takes images that are not square; for others a photo is squeezed.
        classes: Their names in the data, None where they are not known.
        trained: False where the weights are random.
        words: Class -> what to call it, where that is another word.
    """

    name: str
    model: nn.Module
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    multiple: int
    any_size: bool
    any_shape: bool
    classes: list[str] | None
    trained: bool
    words: dict[str, str] = field(default_factory=dict)

    def input_size(self, width: int, height: int, size: int | None = None) -> tuple[int, int]:
        """(height, width) at which a photo enters: about as many tokens as in training, the shape of the photo.

        SimA's output depends on the number of tokens, so it is that number which is kept, not a side.
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

    def prepare(self, photo: Image, size: int | None = None) -> Tensor:
        """A photo -> normalised image [1, 3, height, width], on the CPU; `size` as that of a square photo."""
        from PIL import Image

        height, width = self.input_size(*photo.size, size)
        resized = to_rgb(photo).resize((width, height), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255).permute(2, 0, 1)[None]  # [1, 3, h, w]
        mean, std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (self.mean, self.std))
        return (pixels - mean) / std

    def read(self, photo: Image, size: int | None = None) -> Reading:
        """What one forward of a photo shows.

        SimA's output shrinks with the number of tokens, so at another size than that of training `token_ref` brings it
        back to what the later layers know.
        """
        image = self.prepare(photo, size)
        shrinks = size not in (None, self.size) and sima_modules(self.model)
        with trained_at(self.model, self.size) if shrinks else nullcontext():
            return read_attention(self.model, image)

    def class_name(self, k: int) -> str:
        """What to call a class: its word, its name, or its number."""
        if self.classes is None:
            return f"class {k}"
        return self.words.get(self.classes[k], self.classes[k])


def shipped_models() -> list[str]:
    """Our models whose weights come with the package: those that timm says it has weights for."""
    return timm.list_models("sima_*", pretrained=True)


def default_model() -> str:
    """The model that is meant for it, else the first one with weights, else a small one without."""
    shipped = shipped_models()
    return DEFAULT if DEFAULT in shipped else next(iter(shipped), DEFAULT_UNTRAINED)


def load_subject(what: str | Path | None = None, *, device: str = "cpu") -> Subject:
    """A model by what a user calls it.

    - None: the model that comes with the package.
    - A name that timm knows. Ours have their weights where the package has them; others start at random, because
      nothing is downloaded here.
    - `NAME=FILE`: a name and its weights, in timm's form (.safetensors, or .pth holding tensors alone).
    - A run's folder, a checkpoint (.pt) or weights (.safetensors) that `sima train` wrote.
    """
    what = str(what) if what is not None else default_model()
    name, _, file = what.partition("=")
    if file:
        subject = _with_weights(name, Path(file))
    elif Path(what).exists():
        subject = _from_run(Path(what))
    else:
        check_name(what)
        trained = what in shipped_models()
        subject = subject_of(timm.create_model(what, pretrained=trained), name=what, trained=trained)
    subject.model.to(device).eval()
    return subject


def check_name(name: str) -> None:
    """Raise unless timm knows the name."""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"{name} is neither a model that timm knows nor a run's folder, checkpoint or weights{hint}")


def _with_weights(name: str, file: Path) -> Subject:
    check_name(name)
    state = read_state_dict(file)
    heads = [tensor for key, tensor in state.items() if key in ("head.weight", "head.fc.weight")]
    classes: dict[str, Any] = {"num_classes": heads[0].shape[0]} if heads else {}
    model = timm.create_model(name, **classes)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{file} does not fit {name}: {' '.join(str(error).split())[:300]}") from None
    return subject_of(model, name=name, trained=True)


def _from_run(path: Path) -> Subject:
    from sima_attn.train.evaluate import load_trained  # needs the extra `train`

    loaded = load_trained(path)
    facts = {"input_size": (3, loaded.data.size, loaded.data.size), "mean": loaded.data.mean, "std": loaded.data.std}
    return subject_of(loaded.model, name=path.name, trained=True, classes=loaded.classes, facts=facts)


def subject_of(
    model: Any,
    *,
    name: str | None = None,
    trained: bool = True,
    classes: list[str] | None = None,
    facts: dict[str, Any] | None = None,
) -> Subject:
    """A subject from a model at hand; its preparation is what timm's configuration says, or `facts` in its place."""
    name = name or type(model).__name__
    if is_pretrained_model(model):
        raise ValueError(
            f"{name} does not say how a photo is made ready for it: give a tensor [1, 3, height, width] that its "
            "image processor made"
        )
    cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **(facts or {})}
    if not cfg.get("input_size"):
        raise ValueError(
            f"{name} has no timm configuration that says how a photo is made ready for it: give a normalised tensor "
            "[1, 3, height, width]"
        )
    info = getattr(model, "feature_info", None) or [{}]
    multiple = int(info[-1].get("reduction", 16)) if isinstance(info, list) else 16
    return Subject(
        name=name,
        model=model,
        size=cfg["input_size"][-1],
        mean=tuple(cfg["mean"]),
        std=tuple(cfg["std"]),
        multiple=multiple,
        any_size=_runs(model, 3 * multiple, 3 * multiple),
        any_shape=_runs(model, 4 * multiple, 3 * multiple),
        classes=classes or _class_names(cfg, getattr(model, "num_classes", 0)),
        trained=trained,
        words=cfg.get("label_descriptions") or {},
    )


@torch.no_grad()
def _runs(model: nn.Module, height: int, width: int) -> bool:
    """Whether the model takes images of a size, by trying it on a small one: no attribute says so for all models."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()(torch.zeros(1, 3, height, width).to(next(model.parameters())))
    except (AssertionError, RuntimeError, ValueError):
        return False
    finally:
        for module, training in modes.items():
            module.training = training
    return True


def _class_names(cfg: dict[str, Any], K: int) -> list[str] | None:
    """Names that the configuration has, or ImageNet's where there are its thousand."""
    names = cfg.get("label_names")
    if names and len(names) == K:
        return list(names)
    if K == 1000:
        from timm.data import ImageNetInfo

        info = ImageNetInfo("imagenet-1k")
        return [info.index_to_description(k).split(",")[0] for k in range(K)]
    return None
