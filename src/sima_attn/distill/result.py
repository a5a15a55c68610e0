"""What a linearization has found out: values that its checkpoints keep, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from sima_attn.distill.keeping import Kept, Metrics
from sima_attn.train.task import RunSummary


class Block(NamedTuple):
    """One attention: its path, its relative error given the teacher's input, before and after, and if it was kept."""

    path: str
    error_before: float
    error_after: float
    kept: bool = False


@dataclass
class Record:
    """Measurements that a run cannot repeat once its weights have changed.

    Attributes:
        errors_before: Attention -> its relative error after conversion, before anything is fitted.
        stages: (name, metrics) after the conversion and after each stage.
        ranking: Attentions in the order in which they are best kept, measured after the first stage.
        kept: Attentions that the student keeps from its teacher.
    """

    errors_before: dict[str, float] = field(default_factory=dict)
    stages: list[tuple[str, Metrics]] = field(default_factory=list)
    ranking: list[Kept] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "errors_before": self.errors_before,
            "stages": [list(each) for each in self.stages],
            "ranking": [list(each) for each in self.ranking],
            "kept": self.kept,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """Inverse of `to_dict`."""
        stages = [(name, metrics) for name, metrics in values["stages"]]
        ranking = [Kept(path, metrics) for path, metrics in values["ranking"]]
        return cls(values["errors_before"], stages, ranking, list(values["kept"]))


class Linearized(NamedTuple):
    """The best student, its metrics on held-out images, the errors of its attentions, and what was measured on the way.

    `record` has the metrics of each stage, and the attentions that were kept.
    """

    model: nn.Module
    metrics: Metrics
    blocks: list[Block]
    summary: RunSummary
    record: Record
