"""A recipe or a file -> a detector: weights of a classifier for its backbone, or of a whole trained detector."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
from torch import Tensor, nn

from sima_attn.detect.mask_rcnn import SimaMaskRCNN, build_mask_rcnn
from sima_attn.detect.recipes import DetectRecipe
from sima_attn.models.weights import read_state_dict
from sima_attn.train.checkpoint import checkpoints, load_checkpoint
from sima_attn.train.evaluate import read_weights
from sima_attn.train.recipe_files import check_size, class_names_in, recipe_from_file, without_sources


def build_detector(recipe: DetectRecipe, num_classes: int, *, start: bool = False, **kwargs: Any) -> SimaMaskRCNN:
    """The detector of a recipe; with `start`, its backbone has the weights that training starts from."""
    model = recipe.model
    settings = {**model.kwargs, **kwargs}
    if not start:
        settings.pop("pretrained", None)
    weights = model.weights if start else None
    return build_mask_rcnn(
        model.name,
        num_classes,
        blocks=model.blocks,
        drop_path=model.drop_path,
        norm_maps=model.norm_maps,
        freeze_statistics=model.freeze_statistics,
        side=recipe.data.side,
        longest=recipe.data.longest,
        proposals=model.proposals,
        prepare=(lambda backbone: load_backbone(backbone, weights)) if weights else (lambda backbone: None),
        **settings,
    )


def load_backbone(model: nn.Module, what: str | Path) -> None:
    """Load a classifier's weights, its head left out: a run's folder, its weights, a checkpoint, or a state dict."""
    path = Path(what)
    path = path / "weights.safetensors" if path.is_dir() else path
    state = {key: value for key, value in read_state_dict(path).items() if not key.startswith(("head.", "head_dist."))}
    wanted = {key: value for key, value in model.state_dict().items() if not key.startswith(("head.", "head_dist."))}
    wrong = [key for key in sorted(state.keys() | wanted.keys()) if _shape(state, key) != _shape(wanted, key)]
    if wrong:
        raise ValueError(
            f"{path} does not fit the backbone: {wrong[0]} is {_shape(state, wrong[0])} in the file and "
            f"{_shape(wanted, wrong[0])} in the model, and {len(wrong) - 1} more such keys; give model.name and "
            "model.kwargs as they were in its training"
        )
    model.load_state_dict(state, strict=False)  # all but the head, which the detector does not have


def _shape(tensors: Mapping[str, Tensor], key: str) -> tuple[int, ...] | str:
    return tuple(tensors[key].shape) if key in tensors else "missing"


class LoadedDetector(NamedTuple):
    """A trained detector, in evaluation, the names of its classes, and the recipe of its run."""

    model: SimaMaskRCNN
    classes: list[str]
    recipe: DetectRecipe


def load_detector(what: str | Path, **kwargs: Any) -> LoadedDetector:
    """From a run's folder, a checkpoint (.pt) or weights (.safetensors) of `sima detect train`.

    Args:
        what: A folder stands for its weights, or its newest checkpoint while it runs.
        kwargs: Arguments of `build_mask_rcnn`: score_threshold, detections.
    """
    path = Path(what)
    if path.is_dir():
        found = [file for file in [path / "weights.safetensors", *checkpoints(path / "checkpoints")] if file.is_file()]
        if not found:
            raise FileNotFoundError(f"{path} holds no weights and no checkpoint of a detection run")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"there are no weights {path}")
    if path.suffix == ".safetensors":
        about, weights = read_weights(path)
    else:
        state = load_checkpoint(path)
        about, weights = state["about"], state["model"]
    if "detector" not in about:
        raise ValueError(f"{path} was not written by `sima detect train`: it holds no detector")
    recipe = without_sources(recipe_from_file(DetectRecipe, about["detector"], path))
    classes = class_names_in(about, path)
    check_size(partial(timm.create_model, recipe.model.name, **recipe.model.kwargs), weights, path)
    model = build_detector(recipe, len(classes), **kwargs)
    model.load_state_dict(weights)
    return LoadedDetector(model.eval(), classes, recipe)
