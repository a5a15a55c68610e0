"""Errors with one wording: what was given, what is allowed, what to do."""

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, given: object, known: Iterable[str]) -> ValueError:
    """The error for an unknown name, with the closest known name if one is similar."""
    known = sorted(known)
    message = f"unknown {kind} {given!r}; known: {', '.join(known)}"
    near = difflib.get_close_matches(str(given), known, n=1)
    return ValueError(f"{message}; did you mean {near[0]!r}?" if near else message)
