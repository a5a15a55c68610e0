"""Settings of a recipe that describe how frozen features are evaluated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """How frozen features are judged: k-NN while a run goes and after it, the linear classifier after it.

    Attributes:
        k, temperature: Of the k-NN.
        bank: Training images that the k-NN of a run's evaluations looks among; 0: no k-NN, no val images needed.
        epochs, batch, lr, momentum, weight_decay: Of the linear classifier.
    """

    k: int = 20
    temperature: float = 0.07
    bank: int = 50_000
    epochs: int = 100
    batch: int = 1024
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
