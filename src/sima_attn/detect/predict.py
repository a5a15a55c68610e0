"""Detect objects on photos; write pictures with boxes and masks, and JSON.

Shapes: n detections; boxes (x0, y0, x1, y1) in pixels of the photo.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from sima_attn._files import atomic_write
from sima_attn.data.images import check_not_over, open_photos, to_rgb, unique_name
from sima_attn.detect.coco import encode_mask
from sima_attn.detect.drawing import draw_objects, resized_mask
from sima_attn.detect.rcnn import SimaRCNN
from sima_attn.detect.weights import LoadedDetector


class Detections(NamedTuple):
    """The objects on a photo, best first.

    Attributes:
        boxes: [n, 4].
        labels: [n], from 1.
        scores: [n].
        masks: Bool [n, height, width], at the size of the photo, or smaller for a large photo, see `mask_at`; None of
            a detector without masks.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor | None

    def mask_at(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """The mask of one object at the size (width, height) of the photo, bool [height, width]."""
        assert self.masks is not None
        return resized_mask(self.masks[i], size)


@torch.no_grad()
def detect(model: SimaRCNN, image: Image.Image, threshold: float = 0.5) -> Detections:
    """The objects on a photo with a score of at least `threshold`.

    A photo at least twice as large as the detector's input is reduced first. Without that, the masks of a photo of
    12 megapixels would take 48 MB per object.
    """
    factor = max(1, max(image.size) // model.transform.max_size)
    reduced = ImageOps.scale(to_rgb(image), 1 / factor, Image.Resampling.BOX)
    device = next(model.parameters()).device
    found = model([pil_to_tensor(reduced).to(device).float() / 255])[0]
    kept = found["scores"] >= threshold
    boxes, labels, scores = (found[name][kept].cpu() for name in ("boxes", "labels", "scores"))
    masks = (found["masks"][kept, 0] > 0.5).cpu() if model.has_masks else None
    scale = torch.tensor([image.width / reduced.width, image.height / reduced.height]).repeat(2)
    return Detections(boxes * scale, labels, scores, masks)


def draw(image: Image.Image, found: Detections, classes: Sequence[str]) -> Image.Image:
    """A copy of the photo with boxes, class names, scores and, if there are any, masks."""
    rows = zip(found.labels.tolist(), found.scores.tolist(), strict=True)
    captions = [f"{classes[label - 1]} {score:.0%}" for label, score in rows]
    return draw_objects(image, found.boxes, found.labels, captions, found.masks)


def as_json(path: Path, image: Image.Image, found: Detections, classes: Sequence[str]) -> dict[str, Any]:
    """The detections on a photo as plain values, with masks, if there are any, as COCO's run-length codes."""
    rows = zip(found.boxes.tolist(), found.labels.tolist(), found.scores.tolist(), strict=True)
    objects: list[dict[str, Any]] = [
        {
            "class": classes[label - 1],
            "score": round(score, 4),
            "box": [round(x, 1) for x in box],  # x0, y0, x1, y1
        }
        for box, label, score in rows
    ]
    for i, one in enumerate(objects if found.masks is not None else ()):
        one["mask"] = encode_mask(found.mask_at(i, image.size).astype(np.uint8))
    return {"photo": str(path), "width": image.width, "height": image.height, "objects": objects}


def predict_photos(
    loaded: LoadedDetector,
    photos: Sequence[Path],
    out: Path,
    *,
    threshold: float = 0.5,
    say: Callable[[str], object] = print,
    on_photo: Callable[[Path], object] = lambda path: None,
) -> list[dict[str, Any]]:
    """Write each photo with its detections to `out`/NAME.png, and all detections to `out`/detections.json.

    Unreadable photos among several are reported by `say` and skipped. Returns the content of detections.json.
    """
    check_not_over(photos, out)
    names: list[str] = []
    entries = []
    for photo, image in open_photos(photos, say=say, on_photo=on_photo):
        found = detect(loaded.model, image, threshold)
        name = unique_name(photo.stem, names)
        with atomic_write(out / f"{name}.png") as temporary:
            draw(image, found, loaded.classes).save(temporary, format="PNG")
        entries.append({**as_json(photo, image, found, loaded.classes), "picture": f"{name}.png"})
    with atomic_write(out / "detections.json") as temporary:
        temporary.write_text(json.dumps(entries, indent=1))
    return entries
