"""Errors with one wording: what was given, what is allowed, what to do."""

import difflib
from collections.abc import Collection, Iterable
from importlib.util import find_spec

MOST_LISTED = 100


def unknown_name(kind: str, given: object, known: Iterable[str]) -> ValueError:
    """The error for an unknown name: the known names if they are few, and the most similar ones."""
    known = sorted(known)
    few = len(known) <= MOST_LISTED
    listed = f"; known: {', '.join(known)}" if few else ""
    near = " or ".join(map(repr, difflib.get_close_matches(str(given), known, n=1 if few else 3)))
    return ValueError(f"unknown {kind} {given!r}{listed}" + (f"; did you mean {near}?" if near else ""))


def check_known(kind: str, given: object, known: Collection[str]) -> None:
    """Raise if a name is unknown."""
    if given not in known:
        raise unknown_name(kind, given, known)


def check_installed(what: str, *packages: str, extra: str) -> None:
    """Raise if a package that something needs is missing; the message names the extra that installs it."""
    missing = ", ".join(name for name in packages if find_spec(name) is None)
    if missing:
        from sima_attn._install import install_command  # not needed where nothing is missing

        raise ValueError(f"{what} needs {missing}, which is not installed: {install_command(extra)}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
