"""What an audit found: the counts of one forward, and how they are said in words and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sima_attn.report.tables import TextTable

Shape = tuple[int | str, ...]  # a str is a size that an ONNX file leaves open
SHOWN = {"gelu": "GELU", "elu": "ELU", "celu": "CELU", "selu": "SELU", "silu": "SiLU", "glu": "GLU"}


@dataclass(frozen=True)
class ExpCall:
    """All calls of one exp-like function in one module (or one node of an ONNX file)."""

    module: str
    kind: str
    count: int | None  # numbers it is evaluated on; None where an ONNX file does not fix the shape
    in_attention: bool

    @property
    def part(self) -> str:
        """Where the call is: attention or rest."""
        return "attention" if self.in_attention else "rest"

    @property
    def shown_count(self) -> str:
        """The count as people read it."""
        return _number(self.count)


@dataclass(frozen=True)
class AuditReport:
    """What one forward costs and which exp-like functions it evaluates.

    Attributes:
        name: Class of the model, or name of the file.
        input_size: Shape of every input.
        params: Numbers in the parameters (of an ONNX file: in its initialisers, without int64 shapes and indices and
            without the scales and zero points of int8).
        macs: Multiply-adds inside matrix products and convolutions; None where an ONNX file leaves shapes open.
        activation_bytes: Most bytes of intermediate tensors alive at one time without autograd. Parameters,
            buffers and inputs do not count, nor does what a kernel uses inside; softmax attention runs as torch
            runs it here, fused where it can. None for an ONNX file: there the runtime decides.
        calls: One entry for each module and kind, in the order of the forward.
        in_paper: exp() in attention in the paper's symbols ("HN^2", "HD^2", "0"), one for each distinct
            attention class that ran; "?" for a class that evaluates exp() and is not known. Empty: no attention.
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
        """Numbers that exp-like functions are evaluated on; None where one count is unknown."""
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
        """True where nothing in the whole network is exp-like; no exp() in attention is not enough."""
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
        """One honest line: what is exp-like inside attention, and what elsewhere."""
        if self.is_exp_free:
            return "no exp-like call in the whole network"
        inside = _in_words(call for call in self.calls if call.in_attention)
        elsewhere = _in_words(call for call in self.calls if not call.in_attention)
        if not self.in_paper:
            return f"{elsewhere}; no attention recognised"
        first = f"{inside} in attention" if inside else "no exp() in attention"
        return f"{first}, {elsewhere} elsewhere" if elsewhere else f"{first}, no exp-like call elsewhere"

    def table(self, by_module: bool = False) -> TextTable:
        """The calls grouped by kind and part, attention first; or one line for each module."""
        if by_module:
            lines = [[call.module or "(model)", call.kind, call.part, call.shown_count] for call in self.calls]
            return TextTable(["module", "kind", "part", "elements"], lines, bold=set())
        groups: dict[tuple[str, str], list[ExpCall]] = {}
        for call in sorted(self.calls, key=lambda call: not call.in_attention):
            groups.setdefault((call.kind, call.part), []).append(call)
        lines = [[*group, str(len(calls)), _number(_total(calls))] for group, calls in groups.items()]
        return TextTable(["kind", "part", "modules", "elements"], lines, bold=set())


def show_shapes(shapes: Iterable[Shape]) -> str:
    """Shapes as people write them: 1x3x224x224."""
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _total(calls: Iterable[ExpCall]) -> int | None:
    total = 0
    for call in calls:
        if call.count is None:
            return None
        total += call.count
    return total


def _in_words(calls: Iterable[ExpCall]) -> str:
    """ "3,631,104 GELU elements", most first; empty without calls."""
    by_kind: dict[str, list[ExpCall]] = {}
    for call in calls:
        by_kind.setdefault(SHOWN.get(call.kind, call.kind), []).append(call)
    totals: Sequence[tuple[str, int | None]] = [(kind, _total(found)) for kind, found in by_kind.items()]
    known = sorted(((kind, n) for kind, n in totals if n is not None), key=lambda pair: -pair[1])
    words = [f"{n:,} {kind}" for kind, n in known]
    words += [f"an unknown number of {kind}" for kind, n in totals if n is None]
    return " and ".join(words) + " elements" if words else ""


def _macs(macs: int | None) -> str:
    if macs is None:
        return "unknown"
    return f"{macs / 1e9:.3f} G" if macs >= 1e8 else f"{macs / 1e6:.3f} M"


def _number(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"
