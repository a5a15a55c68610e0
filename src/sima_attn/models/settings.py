"""Settings of a recipe that describe the model. Light to import: `models.loading` builds the model."""

from dataclasses import dataclass, field
from typing import Any

from sima_attn._settings import PositiveInt, Probability


@dataclass(frozen=True)
class ModelSettings:
    """Any model in timm's registry, including the models of this package.

    Attributes:
        name: Name in timm's registry.
        attention: Name of an attention in our registry; None keeps the model's own. Models of other packages are
            converted.
        num_classes: None uses the number of classes of the data; any other number is an error.
        drop_path: Rate of stochastic depth.
        constant_drop_path: Use the same rate in every block, as in the authors' code, instead of one that grows with
            depth.
        kwargs: Further arguments of the model.
    """

    name: str
    attention: str | None = None
    num_classes: PositiveInt | None = None
    drop_path: Probability = 0.0
    constant_drop_path: bool = True
    kwargs: dict[str, Any] = field(default_factory=dict)

    def check_relations(self) -> None:
        """Raise where a model argument would be overwritten by a setting."""
        for argument, setting, overwrites in (
            ("num_classes", "num_classes", True),
            ("drop_path_rate", "drop_path", self.drop_path > 0),
            ("attention", "attention", self.attention is not None),
        ):
            if overwrites and argument in self.kwargs:
                raise ValueError(f"model.kwargs.{argument} would be overwritten by model.{setting}; set that instead")
