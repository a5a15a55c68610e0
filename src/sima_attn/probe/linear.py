"""A linear classifier on frozen features, trained by SGD with a cosine schedule as in the paper.

Shapes: n images, W width of the features, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn._settings import check_value
from sima_attn.data.loader import mixed_seed
from sima_attn.probe.features import Features, check_labels
from sima_attn.probe.settings import Probe

BLOCK = 4096  # images that are evaluated at a time


@dataclass(frozen=True)
class LinearRow:
    """One epoch: mean training loss, and accuracy on the val images in percent where it was evaluated."""

    epoch: int
    lr: float
    loss: float
    top1: float
    top5: float


class LinearResult(NamedTuple):
    """The classifier after its last epoch, its accuracy in percent, and one row per evaluated epoch."""

    classifier: nn.Linear
    top1: float
    top5: float
    rows: list[LinearRow]


def train_linear(
    train: Features,
    val: Features,
    probe: Probe | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    eval_epochs: int = 10,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> LinearResult:
    """Train a linear classifier on features and evaluate it on others; the features may be on disk.

    The learning rate is that of the probe, not scaled with the batch, and falls as a cosine from epoch to epoch.
    """
    probe = probe or Probe()
    classes, n = len(train.classes), len(train.values)
    labels = check_labels(train.labels, n, classes, "training")
    truth = check_labels(val.labels, len(val.values), classes, "val")
    check_value(probe, Probe, "probe")
    device = torch.device(device)
    generator = torch.Generator().manual_seed(mixed_seed(seed))
    classifier = nn.Linear(train.values.shape[1], classes)
    nn.init.normal_(classifier.weight, std=0.01, generator=generator)
    nn.init.zeros_(classifier.bias)
    classifier.to(device)
    optimizer = torch.optim.SGD(
        classifier.parameters(), lr=probe.lr, momentum=probe.momentum, weight_decay=probe.weight_decay
    )
    values, val_values = _Rows(train.values, device), _Rows(val.values, device)
    labels, truth = labels.to(device), truth.to(device)
    rows = []
    for epoch in range(probe.epochs):
        rate = probe.lr * (1 + math.cos(math.pi * epoch / probe.epochs)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        order = np.random.default_rng([seed, epoch]).permutation(n)
        loss = _one_epoch(classifier, optimizer, values, labels, order, probe.batch)
        if not math.isfinite(loss):
            raise ValueError(f"the loss of epoch {epoch + 1} is not finite; use a lower lr than {probe.lr}")
        if (epoch + 1) % eval_epochs == 0 or epoch + 1 == probe.epochs:
            rows.append(LinearRow(epoch + 1, rate, loss, *linear_accuracy(classifier, val_values, truth)))
        on_step(epoch + 1, probe.epochs)
    return LinearResult(classifier, rows[-1].top1, rows[-1].top5, rows)


class _Rows:
    """Features on the device if they fit into half of its free memory, otherwise read from where they are."""

    def __init__(self, values: np.ndarray, device: torch.device) -> None:
        self.values, self.device = values, device
        # No gain on a CPU: the system caches what was read from a file.
        fits = device.type == "cuda" and values.nbytes < torch.cuda.mem_get_info(device)[0] // 2
        self.here = torch.from_numpy(np.array(values)).to(device) if fits else None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        """The rows at indices [B] of the device, in float32."""
        if self.here is not None:
            return self.here[chosen].float()
        return torch.from_numpy(np.asarray(self.values[chosen.cpu().numpy()])).to(self.device).float()


def _one_epoch(
    classifier: nn.Linear,
    optimizer: torch.optim.Optimizer,
    values: _Rows,
    labels: Tensor,
    order: np.ndarray,
    batch: int,
) -> float:
    """The mean loss of an epoch, the one number the host waits for; the last batch may be smaller."""
    starts = range(0, len(order), batch)
    in_order_of_file = np.concatenate([np.sort(order[start : start + batch]) for start in starts])
    on_device = torch.from_numpy(in_order_of_file).to(labels.device)
    total = torch.zeros((), device=labels.device)
    for start in starts:
        chosen = on_device[start : start + batch]
        loss = F.cross_entropy(classifier(values[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(chosen)
    return float(total) / len(order)


@torch.no_grad()
def linear_accuracy(classifier: nn.Linear, values: _Rows, truth: Tensor) -> tuple[float, float]:
    """Top-1 and top-5 in percent."""
    one = five = 0
    for start in range(0, len(values), BLOCK):
        rows = torch.arange(start, min(start + BLOCK, len(values)), device=truth.device)
        best = classifier(values[rows]).topk(min(5, classifier.out_features), dim=1).indices  # [B, 5]
        right = best == truth[rows, None]
        one, five = one + int(right[:, 0].sum()), five + int(right.sum())
    return 100 * one / len(values), 100 * five / len(values)
