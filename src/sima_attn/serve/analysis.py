"""Model and photo -> the contents of the page. Each answer is a dataclass, from which FastAPI derives its schema.

Shapes: K classes; maps are lists of rows.
"""

import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor, nn

from sima_attn.auditing import audit
from sima_attn.conversion import convert
from sima_attn.conversion.huggingface import AttentionCore
from sima_attn.explain.answer import Answer, answer, prepare
from sima_attn.explain.effects import effect_scores
from sima_attn.explain.maps import unit_range
from sima_attn.explain.photo_model import PhotoModel
from sima_attn.explain.reading import Layer, Reading, read_attention
from sima_attn.models.huggingface import TimmInterface
from sima_attn.nn.attention import Attention, SimAttention
from sima_attn.nn.local_values import LocalAttention
from sima_attn.nn.rotation import RotatedAttention
from sima_attn.report.timing import time_interleaved
from sima_attn.serve.limits import Limits, Refusal
from sima_attn.serve.photos import shrink

SIZES = (64, 96, 128, 192, 224, 256, 384, 512)
TIMED_SECONDS = 1.0


@dataclass(frozen=True)
class ModelFacts:
    """The model and its cost for one image of its default size."""

    name: str
    trained: bool
    size: int
    sizes: list[int]
    crop_ratio: float
    layers: int
    params: int
    macs: int | None
    exps_in_attention: int | None
    exps_elsewhere: int | None
    summary: str
    classes: list[str]
    unsure_below: float | None


@dataclass(frozen=True)
class Guess:
    """A class and its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class LayerMaps:
    """Scores of the queries and keys of a layer, scaled to [0, 1], as rows of the token grid."""

    path: str
    q: list[list[float]]
    k: list[list[float]]


@dataclass(frozen=True)
class Analysis:
    """Classes and maps of a photo; height and width in pixels are those at which the maps were made."""

    height: int
    width: int
    guesses: list[Guess]
    unsure: bool
    layers: list[LayerMaps]


@dataclass(frozen=True)
class Effect:
    """Contribution of the other patches to one patch, scaled to [-1, 1], as rows of the grid of keys."""

    layer: int
    row: int
    column: int
    values: list[list[float]]
    negative_share: float


@dataclass(frozen=True)
class Times:
    """Median milliseconds of a forward pass with SimA and with softmax, on the same image."""

    size: int
    tokens: int
    sima_ms: float
    softmax_ms: float


class Prepared(NamedTuple):
    """What is kept of a photo: the middle square to classify [1, 3, size, size], and the whole in small for maps."""

    image: Tensor
    whole: Image


class Analyzer:
    """The model behind the page. Its methods are not thread-safe."""

    def __init__(self, photo_model: PhotoModel, limits: Limits) -> None:
        self.photo_model, self.limits = photo_model, limits
        fitting = [size for size in SIZES if 1 <= (size // photo_model.multiple) ** 2 <= limits.tokens]
        self.sizes = sorted({*fitting, photo_model.size}) if photo_model.any_size else [photo_model.size]
        # Raises for a model without attention now, not at each request.
        blank = torch.zeros(1, 3, photo_model.size, photo_model.size)
        self._layers = len(read_attention(photo_model.model, blank).layers)

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts about the model, computed when they are first asked for."""
        model, size = self.photo_model.model, self.photo_model.size
        report = audit(model, size)
        return ModelFacts(
            name=self.photo_model.name,
            trained=self.photo_model.trained,
            size=size,
            sizes=self.sizes,
            crop_ratio=self.photo_model.preprocessing.crop_ratio,
            layers=self._layers,
            params=report.params,
            macs=report.macs,
            exps_in_attention=report.attention_exps,
            exps_elsewhere=report.other_exps,
            summary=report.summary(),
            classes=self.photo_model.class_names(),
            unsure_below=self.photo_model.unsure_below,
        )

    def prepare(self, photo: Image) -> Prepared:
        """What `analyze` needs of a photo."""
        return Prepared(prepare(self.photo_model, photo), shrink(photo))

    def analyze(self, photo: Prepared, size: int | None = None) -> Analysis:
        """The five most probable classes, none for a model of features, and the maps of all layers."""
        found = answer(self.photo_model, photo.image) if self.photo_model.has_classes else Answer([], unsure=False)
        guesses = [Guess(name, round(probability, 5)) for name, probability in found.classes]
        reading, (height, width) = self._read(photo.whole, size)
        layers = [LayerMaps(one.path, _map(one, "q"), _map(one, "k")) for one in reading.layers]
        return Analysis(height, width, guesses, found.unsure, layers)

    def effect(self, photo: Image, layer: int, row: int, column: int, size: int | None = None) -> Effect:
        """Contribution of the other patches to one patch in a layer."""
        reading, _ = self._read(photo, size)
        try:
            scores = effect_scores(reading.layer(layer), (row, column))
        except ValueError as error:
            raise Refusal(422, str(error)) from None
        largest = float(scores.abs().max()) or 1.0
        values = (scores / largest).cpu().numpy().round(4).tolist()
        return Effect(layer, row, column, values, round(float((scores < 0).float().mean()), 4))

    def times(self, photo: Image, size: int) -> Times:
        """Time of the model with both attentions."""
        self._check_size(size)
        sima, softmax = self._sima_and_softmax
        image = self.photo_model.prepare(photo, size).to(next(sima.parameters()))

        def forward(model: nn.Module) -> None:
            with torch.inference_mode():
                model(image)
                if image.is_cuda:
                    torch.cuda.synchronize()

        timings = time_interleaved(
            {"sima": lambda: forward(sima), "softmax": lambda: forward(softmax)},
            seconds=TIMED_SECONDS,
            least_samples=3,
        )
        tokens = image.shape[2] * image.shape[3] // self.photo_model.multiple**2
        return Times(size, tokens, *(round(1e3 * timings[name].p50, 2) for name in ("sima", "softmax")))

    def _read(self, photo: Image, size: int | None) -> tuple[Reading, tuple[int, int]]:
        if size is not None:
            self._check_size(size)
        return self.photo_model.read(photo, size), self.photo_model.input_size(*photo.size, size)

    def _check_size(self, size: int) -> None:
        if size not in self.sizes:
            raise Refusal(422, f"size must be one of {', '.join(map(str, self.sizes))}, got {size}")

    @cached_property
    def _sima_and_softmax(self) -> tuple[nn.Module, nn.Module]:
        """The model and its converted copy, whose weights do not affect the time."""
        model = self.photo_model.model
        if any(isinstance(module, SimAttention) for module in model.modules()):
            return model, softmax_twin(model)
        refusal = Refusal(422, f"{self.photo_model.name} cannot be converted to SimA, so there is nothing to compare")
        if any(isinstance(module, Attention) for module in model.modules()):  # a conversion would leave them
            raise refusal
        other = copy.deepcopy(model)
        try:
            convert(other.used if isinstance(other, TimmInterface) else other, "sima")
        except ValueError:
            raise refusal from None
        return other.eval(), model


class SoftmaxCore(nn.Module):
    """A SimA attention with softmax as its core, for timing: its weights are not trained for softmax."""

    def __init__(self, attention: SimAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *tokens: Any, **masks: Any) -> Tensor:
        """Tokens (CvT: and their grid) -> tokens [B, N, C]."""
        return self.attention.join(softmax_core(self.attention, *self.attention.split(*tokens), **masks))


def softmax_core(attention: SimAttention, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
    """q, k, v [B, H, N, D] -> o [B, H, N, D] by softmax, with the rotation and the local branch of the attention."""
    if isinstance(attention, RotatedAttention):
        q, k = attention.rotation(q), attention.rotation(k)
    o = F.scaled_dot_product_attention(q, k, v, **masks)
    return o + attention.local(v) if isinstance(attention, LocalAttention) else o


def softmax_twin(model: nn.Module) -> nn.Module:
    """A copy of the model with softmax in place of SimA's self-attention."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if isinstance(child, AttentionCore):  # of transformers, without projections
                child.core = partial(softmax_core, child)  # type: ignore[assignment, arg-type]
            elif isinstance(child, SimAttention):
                setattr(parent, name, SoftmaxCore(child))
    return twin.eval()


def _map(layer: Layer, of: str) -> list[list[float]]:
    """Scores scaled to [0, 1], four digits. The input has whole patches, so there is no padding to remove."""
    return unit_range(layer.scores(of)[0].cpu().numpy()).round(4).tolist()
