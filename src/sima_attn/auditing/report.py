"""Result of an audit: counts of one forward pass, as text and tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sima_attn.report.tables import TextTable

Shape = tuple[int | str, ...]  # a str is a dynamic size of an ONNX file
SHOWN = {"gelu": "GELU", "elu": "ELU", "celu": "CELU", "selu": "SELU", "silu": "SiLU", "glu": "GLU"}


@dataclass(frozen=True)
class ExpCall:
    """All calls of one exp-like function in one module (or one node of an ONNX file)."""

    module: str
    kind: str
    count: int | None  # elements it is evaluated on; None if shapes of an ONNX file are dynamic
    in_attention: bool

    @property
    def part(self) -> str:
        """The part of the model: attention or rest."""
        return "attention" if self.in_attention else "rest"

    @property
    def shown_count(self) -> str:
        """The count as text."""
        return _number(self.count)


@dataclass(frozen=True)
class AuditReport:
    """Cost of one forward pass and its exp-like functions.

    Attributes:
        name: Class of the model, or name of the file.
        input_size: Shapes of the inputs.
        params: Number of parameters (ONNX file: elements of its initializers, without int64 shapes and indices and
            without the scales and zero points of int8).
        macs: Multiply-adds of matrix products and convolutions; None if shapes of an ONNX file are dynamic.
        activation_bytes: Peak memory of intermediate tensors without autograd. Parameters, buffers, inputs and
            scratch memory of kernels are not included; softmax attention runs fused where torch supports it. None for
            an ONNX file, where it depends on the runtime.
        calls: One entry per module and kind, in the order of the forward pass.
        in_paper: exp() in attention in the paper's symbols ("HN^2", "HD^2", "0"), one per attention class that ran;
            "?" for an unknown class that evaluates exp(). Empty if there is no attention.
    """

    name: str
    input_size: tuple[Shape, ...]
    params: int
    macs: int | None
    activation_bytes: int | None
    calls: tuple[ExpCall, ...]
    in_paper: tuple[str, ...]

    @property
    def exps(self) -> int | None:
        """Elements that exp-like functions are evaluated on; None if a count is unknown."""
        return _total(self.calls)

    @property
    def attention_exps(self) -> int | None:
        """The part of `exps` inside attention."""
        return _total(call for call in self.calls if call.in_attention)

    @property
    def other_exps(self) -> int | None:
        """The part of `exps` outside attention."""
        return _total(call for call in self.calls if not call.in_attention)

    @property
    def is_exp_free(self) -> bool:
        """Whether nothing in the whole network is exp-like, in attention or elsewhere."""
        return not self.calls

    def facts(self) -> str:
        """Input, parameters, MACs and memory in one line."""
        facts = [f"input {show_shapes(self.input_size)}", f"{self.params:,} parameters", f"{_macs(self.macs)} MACs"]
        if self.activation_bytes is not None:
            facts.append(f"{self.activation_bytes / 2**20:.2f} MiB of activations at most")
        if self.in_paper:
            facts.append(f"exp() in attention, in the paper's symbols: {', '.join(self.in_paper)}")
        return "; ".join(facts)

    def summary(self) -> str:
        """Exp-like calls in attention and elsewhere, in one line."""
        if self.is_exp_free:
            return "no exp-like call in the whole network"
        inside = _in_words(call for call in self.calls if call.in_attention)
        elsewhere = _in_words(call for call in self.calls if not call.in_attention)
        if not self.in_paper:
            return f"{elsewhere}; no attention recognized"
        first = f"{inside} in attention" if inside else "no exp() in attention"
        return f"{first}, {elsewhere} elsewhere" if elsewhere else f"{first}, no exp-like call elsewhere"

    def table(self, by_module: bool = False) -> TextTable:
        """The calls grouped by kind and part, attention first; or one line per module."""
        if by_module:
            lines = [[call.module or "(model)", call.kind, call.part, call.shown_count] for call in self.calls]
            return TextTable(["module", "kind", "part", "elements"], lines)
        groups: dict[tuple[str, str], list[ExpCall]] = {}
        for call in sorted(self.calls, key=lambda call: not call.in_attention):
            groups.setdefault((call.kind, call.part), []).append(call)
        lines = [[*group, str(len(calls)), _number(_total(calls))] for group, calls in groups.items()]
        return TextTable(["kind", "part", "modules", "elements"], lines)


def show_shapes(shapes: Iterable[Shape]) -> str:
    """Shapes as text: 1x3x224x224."""
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _total(calls: Iterable[ExpCall]) -> int | None:
    counts = [call.count for call in calls]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _in_words(calls: Iterable[ExpCall]) -> str:
    """ "3,631,104 GELU elements", largest count first; empty without calls."""
    by_kind: dict[str, list[ExpCall]] = {}
    for call in calls:
        by_kind.setdefault(SHOWN.get(call.kind, call.kind), []).append(call)
    totals: Sequence[tuple[str, int | None]] = [(kind, _total(found)) for kind, found in by_kind.items()]
    known = sorted(((kind, n) for kind, n in totals if n is not None), key=lambda pair: -pair[1])
    words = [f"{n:,} {kind}" for kind, n in known]
    if unknown := [kind for kind, n in totals if n is None]:
        words.append(f"an unknown number of {', '.join(unknown)}")
    return " and ".join(words) + " elements" if words else ""


def _macs(macs: int | None) -> str:
    if macs is None:
        return "unknown"
    return f"{macs / 1e9:.3f} G" if macs >= 1e8 else f"{macs / 1e6:.3f} M"


def _number(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"
