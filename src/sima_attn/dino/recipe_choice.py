"""Images without a named recipe -> the DINO recipe that suits them."""

from dataclasses import replace

from sima_attn.data.any_images import open_any
from sima_attn.data.settings import Data
from sima_attn.dino.recipes import named_dino_recipe
from sima_attn.train.recipe_choice import Choice, SuitedRecipes, choose_recipe

SUITED = SuitedRecipes("miniature", "photos", "xcit_small_12")


def choose_dino(data: Data, device: str) -> Choice:
    """The recipe of `sima dino` for the images at `data.path`; the k-NN gets no more neighbors than images."""
    source = open_any(data.path)
    recipe, notes = choose_recipe(named_dino_recipe, SUITED, source, device)
    probe = replace(recipe.probe, k=min(recipe.probe.k, len(source)))
    return Choice(replace(recipe, data=replace(recipe.data, path=data.path), probe=probe), notes)
