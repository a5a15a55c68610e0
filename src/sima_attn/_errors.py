"""How this package words its errors: what was given, what is allowed, what to do."""

import difflib
from collections.abc import Iterable

MOST_LISTED = 100


def unknown_name(kind: str, given: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is not in a table: the known names where they are few, and those close to it."""
    known = sorted(known)
    few = len(known) <= MOST_LISTED
    listed = f"; known: {', '.join(known)}" if few else ""
    near = " or ".join(map(repr, difflib.get_close_matches(str(given), known, n=1 if few else 3)))
    return ValueError(f"unknown {kind} {given!r}{listed}" + (f"; did you mean {near}?" if near else ""))
