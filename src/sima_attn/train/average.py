"""The moving average of the weights of a run."""

from __future__ import annotations

import torch
from timm.utils import ModelEmaV3
from torch import nn

from sima_attn.train.sharding import local_parts


class Average(ModelEmaV3):
    """timm's moving average of the weights, of the unwrapped model, which shares its parameters with the wrapped one.

    timm builds two state dicts at every step while the device waits. Here the pairs of tensors are collected once; they
    share memory with the weights.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool) -> None:
        super().__init__(model, decay=decay, use_warmup=warmup)

    def track(self, model: nn.Module) -> None:
        """Collect the pairs of tensors of average and model, once both are where they stay, and sharded alike."""
        averages, weights = (local_parts(module.state_dict().values()) for module in (self.module, model))
        pairs = list(zip(averages, weights, strict=True))
        self.moved = [pair for pair in pairs if pair[0].is_floating_point()]
        self.copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Update the average after `step` optimizer steps."""
        averages, weights = zip(*self.moved, strict=True)
        torch._foreach_lerp_(averages, weights, weight=1 - self.get_decay(step if self.use_warmup else None))
        for average, weight in self.copied:  # counters
            average.copy_(weight)
