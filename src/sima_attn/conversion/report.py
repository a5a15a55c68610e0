"""What a conversion did, what it left alone and why, and the way back."""

from collections.abc import Callable, Sequence
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


def grouped(skipped: Sequence[Skipped]) -> list[str]:
    """One line per reason and class: the attention, or their number with the first and the last one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in skipped:
        groups.setdefault((one.kind, one.reason), []).append(one.path)
    return [
        f"{paths[0]} ({kind}): {reason}"
        if len(paths) == 1
        else f"{len(paths)} attentions, {paths[0]} to {paths[-1]} ({kind}): {reason}"
        for (kind, reason), paths in groups.items()
    ]


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
        lines += [f"  left alone: {line}" for line in grouped(self.skipped)]
        if not self.proven:
            lines.append(
                "Not run: no input of this model is known. Pass example_inputs, and one forward proves the rest."
            )
        return "\n".join([*lines, self.note])
