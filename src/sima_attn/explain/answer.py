"""Photo -> the most likely classes, or "unsure": one answer for the command line, the page and the demo.

The page that runs a model in the browser does the same in JavaScript, with what `sima export` stores in the file.
"""

from typing import NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor

from sima_attn.data.loader import evaluation_transform
from sima_attn.models.loading import LoadedModel


class Answer(NamedTuple):
    """The most likely classes with their probabilities, and whether the photo may be of none of the model's classes."""

    classes: list[tuple[str, float]]
    unsure: bool


def prepare(loaded: LoadedModel, photo: Image) -> Tensor:
    """A photo -> image [1, 3, size, size], as in evaluation: its middle square, normalized."""
    return evaluation_transform(loaded.preprocessing)(photo)[None]


@torch.no_grad()
def answer(loaded: LoadedModel, image: Tensor, count: int = 5) -> Answer:
    """The `count` most likely classes of a prepared image.

    It is unsure where the most likely class is less probable than `loaded.unsure_below`, which was measured on photos
    of other classes. Models for which it was not measured are never unsure.
    """
    likely = loaded.model(image.to(next(loaded.model.parameters()).device))[0].float().softmax(0)  # [K]
    values, places = likely.topk(min(count, len(likely)))
    classes = [(loaded.class_name(k), value) for k, value in zip(places.tolist(), values.tolist(), strict=True)]
    return Answer(classes, loaded.unsure_below is not None and classes[0][1] < loaded.unsure_below)


def classify(loaded: LoadedModel, photo: Image, count: int = 5) -> Answer:
    """The `count` most likely classes of a photo."""
    return answer(loaded, prepare(loaded, photo), count)
