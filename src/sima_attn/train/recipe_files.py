"""Recipes in files: in a run folder, in a checkpoint, in the metadata of weights.

Anyone may have written such a file, so its values are checked before any of them is used; see `models.building`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sima_attn._settings import check, from_dict
from sima_attn.models import building

AnyRecipe = TypeVar("AnyRecipe")


def recipe_from_file(kind: type[AnyRecipe], values: Any, where: Path) -> AnyRecipe:
    """The recipe of that kind in a file, its values checked.

    Args:
        values: What `to_dict` made of it, as JSON or YAML gives it back.
        where: The file, for messages.
    """
    try:
        recipe: Any = from_dict(kind, values)
        building.check_arguments(recipe.model)
        check(recipe)
    except ValueError as error:
        raise ValueError(f"the recipe in {where} cannot be used: {error}") from error
    return recipe


def sources_in(recipe: Any) -> list[str]:
    """The settings of a recipe that have weights downloaded or read from another file.

    The weights of our own models come with the package.
    """
    model = recipe.model
    elsewhere = building.SOURCES - {"pretrained"} if model.name.startswith("sima_") else building.SOURCES
    found = [f"model.kwargs.{name}" for name in model.kwargs if name in elsewhere]
    return found + (["model.weights"] if getattr(model, "weights", None) else [])


def without_sources(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe of the same model, for weights that are at hand."""
    return replace(recipe, model=building.without_sources(recipe.model))  # type: ignore[attr-defined, type-var]
