"""A detector behind the page: photo -> objects, and the photo with them drawn on it."""

import base64
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from PIL.Image import Image

from sima_attn.detect.predict import detect, draw
from sima_attn.detect.weights import LoadedDetector
from sima_attn.serve.photos import shrink

OnPhoto = Callable[[Request, Callable[[Image], Any], Callable[[Any], Any]], Awaitable[Any]]


@dataclass(frozen=True)
class DetectorFacts:
    """The detector and the classes that it knows."""

    name: str
    kind: str
    masks: bool
    params: int
    classes: list[str]


@dataclass(frozen=True)
class FoundObject:
    """An object: its class, its score, and its box (x0, y0, x1, y1) in pixels of the picture."""

    name: str
    score: float
    box: list[float]


@dataclass(frozen=True)
class FoundObjects:
    """The objects on a photo, best first, and a JPEG in base64 of the photo with boxes, names and masks."""

    width: int
    height: int
    objects: list[FoundObject]
    picture: str


def add_detection(app: FastAPI, detector: LoadedDetector, on_photo: OnPhoto, **route: Any) -> None:
    """Add the routes of a detector; `on_photo` reads the photo of a request, prepares it and runs a function on it."""

    @app.get("/api/model")
    async def model() -> DetectorFacts:
        """The detector."""
        return detector_facts(detector)

    @app.post("/api/detect", **route)
    async def find(request: Request, threshold: Annotated[float, Query(ge=0, le=1)] = 0.5) -> FoundObjects:
        """The objects with at least this score; the body is the photo file."""
        return await on_photo(request, shrink, lambda photo: find_objects(detector, photo, threshold))


def detector_facts(detector: LoadedDetector) -> DetectorFacts:
    """Facts about the detector."""
    masks = detector.model.has_masks
    params = sum(p.numel() for p in detector.model.parameters())
    kind = "Mask R-CNN" if masks else "Faster R-CNN"
    return DetectorFacts(detector.recipe.model.name, kind, masks, params, detector.classes)


def find_objects(detector: LoadedDetector, photo: Image, threshold: float) -> FoundObjects:
    """Detect, and draw what was found."""
    found = detect(detector.model, photo, threshold)
    rows = zip(found.labels.tolist(), found.scores.tolist(), found.boxes.tolist(), strict=True)
    objects = [
        FoundObject(detector.classes[label - 1], round(score, 4), [round(x, 1) for x in box])
        for label, score, box in rows
    ]
    buffer = io.BytesIO()
    draw(photo, found, detector.classes).save(buffer, "JPEG", quality=88)
    return FoundObjects(photo.width, photo.height, objects, base64.b64encode(buffer.getvalue()).decode("ascii"))
