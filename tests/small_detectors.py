"""A detector without training, fast enough for a test of the page."""

import pytest
import torch

from sima_attn.detect import pyramid
from sima_attn.detect.rcnn import build_rcnn
from sima_attn.detect.recipes import named_recipe
from sima_attn.detect.weights import LoadedDetector

CLASSES = ["square", "disc"]


def small_detector(*, masks: bool) -> LoadedDetector:
    """One layer, a narrow pyramid, random weights, five objects per photo."""
    sizes = {"side": 64, "longest": 96, "detections": 5, "proposals": 20, "score_threshold": 0.0, "depth": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyramid, "CHANNELS", 32)
        torch.manual_seed(0)
        model = build_rcnn("sima_xcit_nano_12_p16_224", len(CLASSES), masks=masks, **sizes).eval()
    return LoadedDetector(model, CLASSES, named_recipe("coco_mini"))
