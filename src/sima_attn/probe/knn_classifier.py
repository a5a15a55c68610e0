"""A model of features and labeled images -> a classifier, without training: the vote of the nearest images.

Shapes: B batch, m labeled images, W width of the features, K classes.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.data.settings import Data
from sima_attn.data.sources import class_words
from sima_attn.data.splits import open_data, whole_folder
from sima_attn.models.loading import LoadedModel
from sima_attn.probe.features import Features, extract, with_workers
from sima_attn.probe.knn import votes

NEIGHBORS = 20


class KnnClassifier(nn.Module):
    """Images -> logits [B, K], whose softmax is the share of each class in the vote of the nearest images."""

    bank: Tensor
    labels: Tensor

    def __init__(self, backbone: Any, features: Features, *, k: int = NEIGHBORS, temperature: float = 0.07) -> None:
        super().__init__()
        self.backbone, self.temperature = backbone, temperature
        self.k = min(k, len(features.values))
        self.num_classes = len(features.classes)
        self.feature_info = getattr(backbone, "feature_info", None)
        bank = F.normalize(torch.from_numpy(np.array(features.values)).float(), dim=1)
        self.register_buffer("bank", bank)  # [m, W]
        self.register_buffer("labels", torch.from_numpy(np.array(features.labels)).long())  # [m]

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, height, width] -> logits [B, K]; -inf for classes that no neighbor has."""
        features = F.normalize(self.backbone(images).float(), dim=1)  # [B, W]
        cosines, nearest = (features @ self.bank.mT).topk(self.k, dim=1)  # [B, k]
        return votes(cosines, self.labels[nearest], self.num_classes, self.temperature).log()


def knn_classifier(
    loaded: LoadedModel,
    data: str | None,
    folder: Path,
    *,
    device: str = "cpu",
    say: Callable[[str], None] = print,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """A loaded model of features as a classifier of the classes of labeled images.

    Args:
        loaded: Without classifier.
        data: Folder of the labeled images: train/CLASS/ or CLASS/; None for those of the run.
        folder: Where the features of these images are kept.
    """
    settings = Data.of_model(loaded)
    path = data or settings.path
    if not path:
        raise ValueError(
            f"{loaded.name} gives features: it classifies by the nearest of labeled images; "
            "give a folder of them with --data"
        )
    try:
        source = open_data(path) if path == "digits" else whole_folder(path)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"{loaded.name} gives features: it classifies by the nearest labeled images, and these cannot be read: "
            f"{error}; give a folder with one folder per class with --data"
        ) from error
    settings = with_workers(settings, len(source))
    features = extract(loaded.model, source, settings, folder, device=device, say=say, on_step=on_step)
    classifier = KnnClassifier(loaded.model, features).to(device).eval()
    # A threshold of the model was measured for its own classifier.
    return replace(loaded, model=classifier, classes=source.classes, words=class_words(path), unsure_below=None)
