"""The weights with the best evaluation of a run so far, which its checkpoints hold."""

import copy
import math
from collections.abc import Mapping
from typing import Any

from torch import nn


class Best(nn.Module):
    """A copy of the model with the best weights so far.

    Attributes:
        network: The copy.
        score: Its score; scores are compared number by number.
        metrics: Its metrics; empty before the first evaluation.
        step: The number of steps after which it was evaluated.
        waited: Evaluations since then, none of which was better.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.network = copy.deepcopy(model).requires_grad_(False)
        self.score: tuple[float, ...] = (-math.inf,)
        self.metrics: dict[str, float] = {}
        self.step = self.waited = 0

    def offer(self, model: nn.Module, metrics: Mapping[str, float], score: tuple[float, ...], step: int) -> None:
        """Keep the weights of the model if its score is higher."""
        if not score > self.score:
            self.waited += 1
            return
        self.network.load_state_dict(model.state_dict())
        self.score, self.metrics, self.step, self.waited = score, dict(metrics), step, 0

    def get_extra_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the weights."""
        return {name: getattr(self, name) for name in ("score", "metrics", "step", "waited")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        vars(self).update(state)
