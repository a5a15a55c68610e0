"""Watches which operations a computation runs and what tensors it makes."""

from dataclasses import dataclass

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Call:
    operation: str
    shape: tuple[int, ...]


class Recorder(TorchDispatchMode):
    """`calls` lists every aten operation with the shape of its result, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.calls.append(Call(func.overloadpacket.__name__, tuple(out.shape)))
        return out

    def shapes(self, *operations: str) -> list[tuple[int, ...]]:
        return [call.shape for call in self.calls if not operations or call.operation in operations]
