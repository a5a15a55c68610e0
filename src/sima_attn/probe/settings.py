"""Settings of a recipe that describe how frozen features are evaluated."""

from dataclasses import dataclass

from sima_attn._settings import Decay, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class Probe:
    """How frozen features are judged: k-NN while a run goes and after it, the linear classifier after it.

    Attributes:
        k, temperature: Of the k-NN.
        bank: Training images that the k-NN of a run's evaluations looks among; 0: no k-NN, no val images needed.
        epochs, batch, lr, momentum, weight_decay: Of the linear classifier.
    """

    k: PositiveInt = 20
    temperature: PositiveFloat = 0.07
    bank: NonNegativeInt = 50_000
    epochs: PositiveInt = 100
    batch: PositiveInt = 1024
    lr: PositiveFloat = 1e-3
    momentum: Decay = 0.9
    weight_decay: NonNegativeFloat = 0.0

    def check_relations(self) -> None:
        """Raise where the bank is too small for k neighbors."""
        if 0 < self.bank < self.k:
            raise ValueError(f"probe.bank must be 0 or at least probe.k={self.k}, got {self.bank}")
