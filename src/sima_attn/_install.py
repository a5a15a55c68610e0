"""The command that installs an extra here: by name, or from where the package itself came from."""

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shutil import which
from urllib.parse import unquote, urlparse


def install_command(extra: str = "") -> str:
    """The command that adds an extra to this installation; without one, that brings required packages up to date."""
    extras = f"[{extra}]" if extra else ""
    tool, origin = _tool(), _origin()
    if origin is None:
        return f"{tool} {shlex.quote(f'sima-attn{extras}')}"
    url = origin["url"]
    if "dir_info" not in origin:  # a wheel, or an address of version control
        return f"{tool} {shlex.quote(f'sima-attn{extras} @ {url}')}"
    folder = unquote(urlparse(url).path)
    editable = "-e " * bool(origin["dir_info"].get("editable"))
    return f"{tool} {editable}{shlex.quote(f'{folder}{extras}')}"


def _tool() -> str:
    """pip; where this environment has none, as those of uv, uv or the pip of another environment."""
    if _is_installed("pip"):
        return "pip install"
    return "uv pip install" if which("uv") else f"pip --python {shlex.quote(sys.executable)} install"


def _is_installed(name: str) -> bool:
    """Whether a distribution is installed.

    Its metadata are asked, not `importlib.util.find_spec`: with Python 3.11 the finder of setuptools takes a search for
    the module pip as a sign that pip runs. Importing setuptools then fails in this process, and torch.compile with it.
    """
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _origin() -> dict | None:
    """Where the package was installed from (PEP 610); None if by its name."""
    try:
        text = distribution("sima-attn").read_text("direct_url.json")
    except PackageNotFoundError:  # a source tree that was not installed
        root = Path(__file__).parents[2]
        return {"url": root.as_uri(), "dir_info": {"editable": True}}
    return json.loads(text) if text else None
