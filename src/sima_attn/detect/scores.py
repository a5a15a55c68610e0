"""Detections -> COCO's result format, and their AP, which pycocotools computes.

Without masks in the annotations, or in the detections, there is box AP only.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sima_attn._files import atomic_write
from sima_attn.detect.coco import CocoData, encode_mask

BOX, MASK = "box", "mask"
KINDS = {BOX: "bbox", MASK: "segm"}  # kind of AP -> its name in pycocotools


def to_results(image_id: int, detections: Mapping[str, Tensor], category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Detections of an image in COCO's result format, with masks, if there are any, as run-length codes."""
    boxes = detections["boxes"].float().cpu()
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
    rows = zip(boxes.tolist(), detections["labels"].tolist(), detections["scores"].tolist(), strict=True)
    results: list[dict[str, Any]] = [
        {
            "image_id": image_id,
            "category_id": category_ids[label - 1],
            "bbox": [round(x, 2) for x in box],
            "score": round(score, 5),
        }
        for box, label, score in rows
    ]
    if "masks" in detections:
        binary = (detections["masks"][:, 0] > 0.5).to(torch.uint8).cpu().numpy()
        for result, pixels in zip(results, binary, strict=True):
            result["segmentation"] = encode_mask(pixels)
    return results


def write_results(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write a prediction file in COCO's result format."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(results))


class Precision(NamedTuple):
    """Average precision in percent, as defined by pycocotools; NaN if there are no objects."""

    ap: float
    ap50: float
    ap75: float
    small: float
    medium: float
    large: float


@dataclass(frozen=True)
class CategoryRow:
    """The AP of one category in percent; NaN if it has no objects, and for masks if there are none."""

    id: int
    name: str
    objects: int
    box_ap: float
    box_ap50: float
    mask_ap: float
    mask_ap50: float


class CocoScores(NamedTuple):
    """Box and mask AP over all categories, and per category; `mask` is None without masks."""

    box: Precision
    mask: Precision | None
    categories: list[CategoryRow]
    images: int

    def by_kind(self) -> dict[str, Precision]:
        """The AP of boxes, and of masks if there are any."""
        return {BOX: self.box} | ({} if self.mask is None else {MASK: self.mask})

    def metrics(self) -> dict[str, float]:
        """The metrics of the paper's Table 4: three of boxes, and three of masks if there are any."""
        return {
            f"{kind}_{name}": getattr(precision, name)
            for kind, precision in self.by_kind().items()
            for name in ("ap", "ap50", "ap75")
        }


def coco_scores(
    data: CocoData,
    results: Sequence[Mapping[str, Any]],
    image_ids: Iterable[int] | None = None,
    *,
    masks: bool = True,
) -> CocoScores:
    """pycocotools' AP of results in COCO's format.

    Args:
        data: The annotations.
        results: See `to_results`.
        image_ids: The images to evaluate on. Default: all.
        masks: Whether the detector has masks. Mask AP needs them in `data` too.
    """
    truth = data.ground_truth()
    ids = sorted(image_ids if image_ids is not None else truth.getImgIds())
    objects = [a for a in truth.loadAnns(truth.getAnnIds(imgIds=ids)) if not a["iscrowd"]]
    if not objects:
        raise ValueError(f"{data.file} has no objects on these {len(ids)} images, so there is no AP")
    kinds = [BOX, MASK] if masks and data.has_masks else [BOX]
    found = {kind: _evaluate(truth, results, ids, KINDS[kind]) for kind in kinds}
    counts = {id_: sum(a["category_id"] == id_ for a in objects) for id_ in data.category_ids}
    rows = []
    for k, (id_, name) in enumerate(zip(data.category_ids, data.classes, strict=True)):
        ap = {kind: (_mean(precision[:, :, k]), _mean(precision[:1, :, k])) for kind, (_, precision) in found.items()}
        rows.append(CategoryRow(id_, name, counts[id_], *ap[BOX], *ap.get(MASK, (math.nan, math.nan))))
    return CocoScores(found[BOX][0], found[MASK][0] if MASK in found else None, rows, len(ids))


def _evaluate(
    truth: Any, results: Sequence[Mapping[str, Any]], ids: list[int], code: str
) -> tuple[Precision, np.ndarray]:
    """The six AP values, and the precision [10 IoU thresholds, 101 recalls, K] for all areas and 100 detections."""
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        if results:
            found = truth.loadRes([dict(result) for result in results])  # loadRes modifies its input
        else:
            found = type(truth)()  # loadRes fails for an empty list
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
        evaluation = COCOeval(truth, found, code)
        evaluation.params.imgIds = ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    numbers = [100 * x if x >= 0 else math.nan for x in evaluation.stats[:6].tolist()]
    return Precision(*numbers), evaluation.eval["precision"][:, :, :, 0, 2]


def _mean(precision: np.ndarray) -> float:
    """Mean in percent over the valid entries; pycocotools marks missing ones by -1."""
    valid = precision[precision > -1]
    return 100 * float(valid.mean()) if valid.size else math.nan
