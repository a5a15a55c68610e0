"""Images without a named recipe -> the detection recipe for images of one's own, adapted to their number."""

from __future__ import annotations

import math
from dataclasses import replace

from sima_attn.detect.folders import count_images
from sima_attn.detect.recipes import Data, own_images
from sima_attn.train.recipe_choice import Choice

LEAST_EPOCHS, MOST_EPOCHS = 12, 100


def choose_detector(data: Data, device: str) -> Choice:
    """The recipe of `sima detect train` for the images at `data.path`.

    Args:
        device: "cpu" or "cuda".
    """
    count = count_images(data.path, data.train_split)
    recipe = own_images()
    epochs = min(MOST_EPOCHS, max(LEAST_EPOCHS, round(3000 / math.sqrt(max(1, count)))))
    schedule = replace(recipe.schedule, epochs=epochs, drops=(round(0.75 * epochs), round(0.92 * epochs)))
    run = replace(recipe.run, eval_epochs=math.ceil(epochs / 20))
    if device == "cpu":
        run = replace(run, precision="fp32")
    images = replace(recipe.data, path=data.path)
    note = (
        f"{count} train images: the recipe is {recipe.name} ({recipe.model.name} with the weights of the package, "
        f"{images.side} px, {epochs} epochs, batch {run.batch}); choose another with --recipe, see "
        "`sima detect recipes`"
    )
    return Choice(replace(recipe, data=images, schedule=schedule, run=run), [note])
