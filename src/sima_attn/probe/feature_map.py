"""Features -> a picture of some classes as points in two dimensions. Shapes: n images, W width of the features."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sima_attn._errors import check_installed, check_known
from sima_attn.probe.features import Features, evenly
from sima_attn.report.figures import check_can_plot, figure

MAPS = ("pca", "tsne")
CLASSES, PER_CLASS = 10, 100  # in a picture, at most


def principal_components(values: np.ndarray) -> np.ndarray:
    """Features [n, W] -> their coordinates [n, 2] along the directions of greatest variance."""
    u, s, _ = np.linalg.svd(values - values.mean(0), full_matrices=False)
    return u[:, :2] * s[:2]


def two_dimensions(values: np.ndarray, method: str = "pca") -> np.ndarray:
    """Features [n, W], made of length 1 -> points [n, 2], by principal components or t-SNE (scikit-learn)."""
    check_known("map", method, MAPS)
    unit = np.asarray(values, dtype=np.float64)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    if method == "pca":
        return principal_components(unit)
    check_installed("t-SNE", "sklearn", extra="data")
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(unit) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit.astype(np.float32))


def plot_feature_map(features: Features, path: Path, *, method: str = "pca", title: str = "") -> None:
    """A picture of the features of some classes, evenly chosen, as points in two dimensions."""
    check_can_plot()
    from matplotlib import colormaps

    chosen = evenly(len(features.classes), CLASSES)
    rows = np.concatenate([np.flatnonzero(features.labels == label)[:PER_CLASS] for label in chosen])
    points, labels = two_dimensions(features.values[rows], method), features.labels[rows]
    colors = colormaps["tab10"]
    with figure(path, figsize=(7.5, 6)) as (_, axes):
        for i, label in enumerate(chosen):
            x, y = points[labels == label].T
            axes.scatter(x, y, s=14, color=colors(i), label=features.classes[label], alpha=0.8)
        axes.set(xticks=[], yticks=[], title=title)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
