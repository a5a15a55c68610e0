"""Features -> colors: their three principal components as red, green and blue. Shapes: C channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHOWN_RANGE = (0.01, 0.99)  # quantiles of the values that are shown as 0 and as full color


class FeatureColors:
    """Features [..., C] -> colors [..., 3] in [0, 1], by the principal components of a sample [n, C].

    Equal features have equal colors, in whatever picture.
    """

    def __init__(self, sample: Tensor) -> None:
        points = sample.double()
        self.mean = points.mean(0)
        _, _, directions = torch.linalg.svd(points - self.mean, full_matrices=False)
        missing = max(0, 3 - len(directions))  # of a sample of one or two
        self.directions = F.pad(directions[:3].mT, (0, missing))  # [C, 3]
        places = (points - self.mean) @ self.directions
        quantiles = torch.tensor(SHOWN_RANGE, dtype=places.dtype)
        self.low, self.high = torch.quantile(places, quantiles, dim=0)

    def __call__(self, features: Tensor) -> Tensor:
        """The colors."""
        places = (features.double() - self.mean) @ self.directions
        return ((places - self.low) / (self.high - self.low).clamp_min(1e-12)).clamp(0, 1)
