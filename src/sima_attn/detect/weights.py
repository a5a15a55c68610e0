"""A recipe or a file -> a detector: weights of a classifier for its backbone, or of a whole trained detector."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
from torch import nn

from sima_attn.detect.rcnn import SimaRCNN, build_rcnn
from sima_attn.detect.recipes import DetectRecipe
from sima_attn.models.building import check_size
from sima_attn.models.loading import class_names_in, is_detector
from sima_attn.models.weight_files import check_fits, read_state_dict, read_weights, weights_of_run
from sima_attn.train.recipe_files import recipe_from_file, without_sources


def build_detector(
    recipe: DetectRecipe, num_classes: int, *, masks: bool, start: bool = False, **kwargs: Any
) -> SimaRCNN:
    """The detector of a recipe; with `start`, its backbone has the weights that training starts from."""
    model = recipe.model
    settings = {**model.kwargs, **kwargs}
    if not start:
        settings.pop("pretrained", None)
    elif model.weights:
        settings["prepare"] = partial(load_backbone, what=model.weights)
    return build_rcnn(
        model.name,
        num_classes,
        masks=masks,
        blocks=model.blocks,
        drop_path=model.drop_path,
        norm_maps=model.norm_maps,
        freeze_statistics=model.freeze_statistics,
        side=recipe.data.side,
        longest=recipe.data.longest,
        proposals=model.proposals,
        **settings,
    )


def load_backbone(model: nn.Module, what: str | Path) -> None:
    """Load a classifier's weights, its head left out: a run's folder, its weights, a checkpoint, or a state dict."""
    if is_detector(what):
        raise ValueError(f"{what} is a detector, and a backbone starts from the weights of a classifier")
    path = Path(what)
    path = weights_of_run(path) if path.is_dir() else path
    state, wanted = (
        {key: value for key, value in tensors.items() if not key.startswith(("head.", "head_dist."))}
        for tensors in (read_state_dict(path), model.state_dict())
    )
    hint = "; give model.name and model.kwargs as they were in its training"
    check_fits(state, wanted, f"{path} does not fit the backbone", hint)
    model.load_state_dict(state, strict=False)  # all but the head, which the detector does not have


class LoadedDetector(NamedTuple):
    """A trained detector, in evaluation, the names of its classes, and the recipe of its run."""

    model: SimaRCNN
    classes: list[str]
    recipe: DetectRecipe


def load_detector(what: str | Path, **kwargs: Any) -> LoadedDetector:
    """From a run's folder, a checkpoint (.pt) or weights (.safetensors) of `sima detect train`.

    Args:
        what: A folder stands for its weights, or its newest checkpoint while it runs.
        kwargs: Arguments of `build_rcnn`: score_threshold, detections.
    """
    path = Path(what)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; give a run of `sima detect train`, a checkpoint or weights")
    path = weights_of_run(path) if path.is_dir() else path
    about, weights = read_weights(path)
    if about.get("task") == "dino":
        raise ValueError(f"{what} has features and no detector: use `sima knn` or `sima linear`")
    if "recipe" in about:
        raise ValueError(f"{what} is a classifier: use `sima classify` or `sima eval`")
    if "detector" not in about:
        raise ValueError(f"{path} was not written by `sima detect train`: it holds no detector")
    recipe = without_sources(recipe_from_file(DetectRecipe, about["detector"], path))
    classes = class_names_in(about, path)
    check_size(partial(timm.create_model, recipe.model.name, **recipe.model.kwargs), weights, path)
    masks = about.get("masks", True)  # runs of earlier versions all have them
    if not isinstance(masks, bool):
        raise ValueError(f"{path} does not say whether its detector has masks: `masks` must be true or false")
    model = build_detector(recipe, len(classes), masks=masks, **kwargs)
    check_fits(weights, model.state_dict(), f"the weights in {path} do not fit the model of its recipe")
    model.load_state_dict(weights)
    return LoadedDetector(model.eval(), classes, recipe)
