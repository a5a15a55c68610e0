"""Runs commands of `sima` as after `pip install sima-attn`, without any extra; a test starts it as a program.

Arguments: one JSON list of commands, each a list of words. Output: one JSON list of [exit code, output].
"""

import json
import sys
import tomllib
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def bare_distributions():
    """The distributions that the package needs without extras, and those that they need."""
    waiting = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    found = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            waiting += requires(name) or []
        except PackageNotFoundError:
            continue  # not on this system
    return found


def hide_the_rest():
    """Let Python find no module that only an extra would bring."""
    bare = bare_distributions()
    hidden = {
        module
        for module, distributions in packages_distributions().items()
        if not bare & {canonicalize_name(name) for name in distributions} and module != "sima_attn"
    }

    class BareFinder(PathFinder):
        @classmethod
        def find_spec(cls, fullname, path=None, target=None):
            return None if fullname.partition(".")[0] in hidden else super().find_spec(fullname, path, target)

    sys.meta_path[sys.meta_path.index(PathFinder)] = BareFinder


if __name__ == "__main__":
    hide_the_rest()
    from typer.testing import CliRunner

    from sima_attn import cli

    results = []
    for words in json.loads(sys.argv[1]):
        result = CliRunner().invoke(cli.app, words)
        error = f" {type(result.exception).__name__}: {result.exception}" if result.exception else ""
        results.append((result.exit_code, result.output + error))
    print(json.dumps(results))
