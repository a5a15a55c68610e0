"""What a conversion did, what it left alone and why, and the way back."""

from collections.abc import Callable
from dataclasses import dataclass, field

NOTE = (
    "The weights were carried over, the accuracy was not: this attention computes another function than the one the "
    "weights were trained for. Fine-tune the converted model before you use it."
)
SAME_NOTE = "The weights were carried over, and this attention computes the function that they were trained for."


@dataclass(frozen=True)
class Converted:
    """One attention that was exchanged: where, what it was and is, and which of its parameters went along."""

    path: str
    old: str
    new: str
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class Skipped:
    """One attention that was left as it is, and why."""

    path: str
    kind: str
    reason: str


@dataclass
class ConversionReport:
    """Lists every attention of the model. `undo()` gives the model back with its own attentions."""

    model: str
    attention: str
    converted: list[Converted] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    note: str = NOTE
    proven: bool = False  # the converted attentions were seen to run in one forward
    _checks: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the original attentions back, the same objects, with the weights, modes and device they have now.

        Raises:
            ValueError: A converted attention was replaced, or adapters, pruning or layers were put on it, which would
                be lost. Nothing is put back then.
        """
        for check in self._checks:
            check()
        self._checks.clear()
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.converted)} attentions -> {self.attention}, {len(self.skipped)} left alone"]
        for one in self.converted:
            dropped = f", dropped {', '.join(one.dropped)}" if one.dropped else ""
            lines.append(f"  {one.path}: {one.old} -> {one.new}{dropped}")
        lines += [f"  {one.path}: {one.kind} left alone, {one.reason}" for one in self.skipped]
        if not self.proven:
            lines.append(
                "Not run: no input of this model is known. Pass example_inputs, and one forward proves the rest."
            )
        return "\n".join([*lines, self.note])
