"""A linear classifier on frozen features: SGD with a cosine, as the paper has it.

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

from sima_attn.train.data.loader import mixed_seed
from sima_attn.train.dino_recipes import Probe
from sima_attn.train.features import Features, check_labels, check_same_width


@dataclass(frozen=True)
class LinearRow:
    """One epoch: mean training loss, and accuracy on the val images in percent where it was taken."""

    epoch: int
    lr: float
    loss: float
    top1: float
    top5: float


class LinearResult(NamedTuple):
    """The classifier after its last epoch, its accuracy in percent, and a row an epoch that was evaluated."""

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
    """A linear classifier trained on features and judged on others; the features may lie on disk.

    The learning rate is that of the probe, not scaled with the batch, and falls as a cosine from epoch to epoch.
    """
    probe = probe or Probe()
    classes, n = len(train.classes), len(train.values)
    check_same_width(val.values, train.values)
    labels = check_labels(train.labels, n, classes, "training")
    truth = check_labels(val.labels, len(val.values), classes, "val")
    for name, number in (("epochs", probe.epochs), ("batch", probe.batch), ("eval_epochs", eval_epochs)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    device = torch.device(device)
    generator = torch.Generator().manual_seed(mixed_seed(seed))
    classifier = nn.Linear(train.values.shape[1], classes)
    nn.init.normal_(classifier.weight, std=0.01, generator=generator)
    nn.init.zeros_(classifier.bias)
    classifier.to(device)
    optimizer = torch.optim.SGD(
        classifier.parameters(), lr=probe.lr, momentum=probe.momentum, weight_decay=probe.weight_decay
    )
    rows = []
    for epoch in range(probe.epochs):
        rate = probe.lr * (1 + math.cos(math.pi * epoch / probe.epochs)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        order = np.random.default_rng([seed, epoch]).permutation(n)
        loss = _one_epoch(classifier, optimizer, train.values, labels, order, probe.batch, device)
        if not math.isfinite(loss):
            raise ValueError(f"the loss of epoch {epoch + 1} is not finite; use a lower lr than {probe.lr}")
        if (epoch + 1) % eval_epochs == 0 or epoch + 1 == probe.epochs:
            rows.append(LinearRow(epoch + 1, rate, loss, *linear_accuracy(classifier, val.values, truth, device)))
        on_step(epoch + 1, probe.epochs)
    return LinearResult(classifier, rows[-1].top1, rows[-1].top5, rows)


def _one_epoch(
    classifier: nn.Linear,
    optimizer: torch.optim.Optimizer,
    values: np.ndarray,
    labels: Tensor,
    order: np.ndarray,
    batch: int,
    device: torch.device,
) -> float:
    """The mean loss of an epoch; the last batch may be smaller."""
    total = torch.zeros((), device=device)
    for start in range(0, len(order), batch):
        chosen = np.sort(order[start : start + batch])  # in the order of the file
        logits = classifier(_rows(values, chosen, device))  # [B, K]
        loss = F.cross_entropy(logits, labels[chosen].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(chosen)
    return float(total) / len(order)


@torch.no_grad()
def linear_accuracy(
    classifier: nn.Linear, values: np.ndarray, truth: Tensor, device: torch.device, block: int = 4096
) -> tuple[float, float]:
    """Top-1 and top-5 in percent."""
    one = five = 0
    for start in range(0, len(values), block):
        rows = np.arange(start, min(start + block, len(values)))
        logits = classifier(_rows(values, rows, device))  # [B, K]
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices.cpu()
        right = best == truth[rows, None]
        one, five = one + int(right[:, 0].sum()), five + int(right.sum())
    return 100 * one / len(values), 100 * five / len(values)


def _rows(values: np.ndarray, chosen: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(values[chosen])).to(device).float()
