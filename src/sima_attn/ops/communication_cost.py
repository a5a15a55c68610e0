"""What the processes of a group send for one attention layer whose tokens are split over them, from its shape.

    SimA         one all-reduce of K^T V, |K|_1 and |Q|_1: D Dv + 2 D numbers per head, whatever the number of tokens
    ring         ring attention (Liu et al., 2023), exact softmax: the keys and values of every process visit all others
    Ulysses      DeepSpeed-Ulysses (Jacobs et al., 2023), exact softmax: an all-to-all from split tokens to split heads

Bytes are those that one process sends. An all-reduce of m bytes over P processes sends 2 m (P - 1) / P from each, in
the algorithm that sends least. N of the shape counts the tokens of all processes, which hold the same number each.
"""

from dataclasses import dataclass

from sima_attn.ops.cost import AttentionShape

ACCUMULATOR = 4  # bytes of a float32, in which SimA adds up


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process sends in the forward and in the backward pass of one layer."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Bytes of a training step."""
        return self.forward + self.backward


def sima_message(shape: AttentionShape, *, token_ref: bool = False) -> int:
    """Bytes of the tensor that SimA adds up over the processes, in each direction."""
    gains = shape.B if token_ref else 0
    return ACCUMULATOR * (shape.heads * shape.D * (shape.Dv + 2) + gains)


def sima_traffic(shape: AttentionShape, processes: int) -> Traffic:
    """One all-reduce in the forward pass, one of the same size in the backward pass."""
    sent = 2 * sima_message(shape) * (processes - 1) / processes
    return Traffic(sent, sent)


def ring_traffic(shape: AttentionShape, processes: int, itemsize: int = 2) -> Traffic:
    """Keys and values make P - 1 hops; in the backward pass again, with their gradients, which return home: P hops."""
    part = itemsize * shape.heads * shape.M * (shape.D + shape.Dv) / processes  # keys and values of one process
    hops = processes - 1
    return Traffic(part * hops, part * (hops + (processes if hops else 0)))


def ulysses_traffic(shape: AttentionShape, processes: int, itemsize: int = 2) -> Traffic:
    """q, k, v and o change from split tokens to split heads or back, and so do their gradients."""
    if shape.H % processes:
        raise ValueError(
            f"Ulysses gives whole heads to each process: the number of processes must divide {shape.H} heads, "
            f"got {processes}"
        )
    sent = itemsize * shape.inputs_and_output * (processes - 1) / processes**2
    return Traffic(sent, sent)
