"""Recipes as they stand in files: of a run's folder, in a checkpoint, in the metadata of weights.

Anybody may have written such a file. Its values are checked here, before any of them reaches timm: nothing in a file
makes timm download weights or open another file, and no file has a model built that is larger than its own weights.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from timm.models import build_model_with_cfg
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sima_attn._settings import check, from_dict

AnyRecipe = TypeVar("AnyRecipe")
# Arguments of timm that say where weights come from. A user may start a run with them; whoever loads its weights, or
# resumes it, has the weights.
SOURCES = {
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_strict",
    "pretrained_filter_fn",
    "pretrained_model_args",
    "checkpoint_path",
    "cache_dir",
}
# What else is timm's own and no argument of a model.
FACTORY = {
    *inspect.signature(timm.create_model).parameters,
    *inspect.signature(build_model_with_cfg).parameters,
    *("pruned", "features_only", "out_indices", "feature_cls", "device", "dtype"),
} - {*SOURCES, "kwargs"}
WORD = re.compile(r"[A-Za-z0-9_.+-]{0,100}")  # neither an address nor a path into another folder
MOST = 2**16  # of any number that is an argument of a model
MOST_ITEMS = 100
MOST_OF_DATA = {"size": 2**13, "side": 2**13, "longest": 2**13, "eval_batch": 2**10, "workers": 2**8}


def recipe_from_file(kind: type[AnyRecipe], values: Any, where: Path) -> AnyRecipe:
    """The recipe of that kind in a file, its values checked.

    Args:
        values: What `to_dict` made of it, as JSON or YAML gives it back.
        where: The file, for messages.
    """
    try:
        recipe: Any = from_dict(kind, values)
        check_arguments(recipe.model)
        for name, most in MOST_OF_DATA.items():
            if getattr(recipe.data, name, 0) > most:
                raise ValueError(f"data.{name} may be {most} at most in a file, got {getattr(recipe.data, name)}")
        check(recipe)
    except ValueError as error:
        raise ValueError(f"the recipe in {where} cannot be used: {error}") from error
    return recipe


def check_arguments(settings: Any) -> None:
    """Raise unless the name and the arguments of a model are words and bounded numbers, `SOURCES` aside."""
    if not WORD.fullmatch(settings.name):
        raise ValueError(f"model.name must be the name of a model, got {settings.name[:200]!r}")
    for name, value in settings.kwargs.items():
        if name in FACTORY:
            raise ValueError(f"model.kwargs.{name} is not an argument of a model; remove it")
        if name not in SOURCES and not _is_plain(value):
            raise ValueError(
                f"model.kwargs.{name} must be a number from -{MOST} to {MOST}, true, false, a word without / and :, or "
                f"a list or table of these, got {str(value)[:200]}"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= MOST_ITEMS and all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return len(value) <= MOST_ITEMS and all(map(_is_plain, [*value.keys(), *value.values()]))
    if isinstance(value, str):
        return WORD.fullmatch(value) is not None
    return value is None or (isinstance(value, bool | int | float) and -MOST <= value <= MOST)


def sources_in(recipe: Any) -> list[str]:
    """The settings of a recipe that have weights downloaded or read from another file.

    The weights of our own models come with the package.
    """
    model = recipe.model
    elsewhere = SOURCES - {"pretrained"} if model.name.startswith("sima_") else SOURCES
    found = [f"model.kwargs.{name}" for name in model.kwargs if name in elsewhere]
    return found + (["model.weights"] if getattr(model, "weights", None) else [])


def without_sources(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe of the same model, whose weights are at hand."""
    model = recipe.model  # type: ignore[attr-defined]
    changed: dict[str, Any] = {"kwargs": {name: v for name, v in model.kwargs.items() if name not in SOURCES}}
    if hasattr(model, "weights"):
        changed["weights"] = None
    return replace(recipe, model=replace(model, **changed))  # type: ignore[type-var]


def check_size(create: Callable[[], nn.Module], weights: Mapping[str, Tensor], where: Path) -> None:
    """Raise where a model has far more parameters than there are weights for, without building it.

    It is made without memory, and no further than that.
    """
    tensors, numbers = 2 * len(weights) + 100, 2 * sum(tensor.numel() for tensor in weights.values()) + 10**6
    try:
        with torch.device("meta"), _at_most(tensors, numbers):
            create()
    except ValueError as error:
        raise ValueError(f"the model in {where} cannot be built: {error}") from error
    except Exception as error:  # what timm's models say of arguments that they cannot take
        raise ValueError(f"the model in {where} cannot be built: {type(error).__name__}: {error}") from error


@contextmanager
def _at_most(tensors: int, numbers: int) -> Iterator[None]:
    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal tensors, numbers
        if parameter is not None:
            tensors, numbers = tensors - 1, numbers - parameter.numel()
        if tensors < 0 or numbers < 0:
            raise ValueError("its recipe describes a far larger model than its weights are for")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def class_names_in(about: Mapping[str, Any], where: Path) -> list[str]:
    """The names of the classes that a file of weights says it has."""
    names = about.get("classes")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where} does not list the names of its classes: `classes` must be a list of words")
    return names
