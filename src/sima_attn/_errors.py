"""Errors with one wording: what was given, what is allowed, what to do."""

import difflib
from collections.abc import Iterable

MOST_LISTED = 100


def unknown_name(kind: str, given: object, known: Iterable[str]) -> ValueError:
    """The error for an unknown name: the known names if they are few, and the most similar ones."""
    known = sorted(known)
    few = len(known) <= MOST_LISTED
    listed = f"; known: {', '.join(known)}" if few else ""
    near = " or ".join(map(repr, difflib.get_close_matches(str(given), known, n=1 if few else 3)))
    return ValueError(f"unknown {kind} {given!r}{listed}" + (f"; did you mean {near}?" if near else ""))
