"""Selection of the cases of a benchmark."""

from collections.abc import Callable, Collection
from typing import TypeVar

Case = TypeVar("Case")


def select(
    cases: list[Case], what: str, wanted: Collection[object] | None, value_of: Callable[[Case], object]
) -> list[Case]:
    """The cases whose value is in `wanted`, or all if `wanted` is empty or None; `what` names the value in errors."""
    known = list(dict.fromkeys(value_of(case) for case in cases))
    for value in wanted or ():
        if value not in known:
            raise ValueError(f"no selected case has the {what} {value!r}; choose from: {', '.join(map(str, known))}")
    return [case for case in cases if not wanted or value_of(case) in wanted]
