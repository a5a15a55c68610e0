"""The wheel that people install: complete, and working where there is no source tree."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from test_architecture import PACKAGES

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The output of a command that must succeed; this process's PYTHONPATH is not passed on."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=inherited | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    hatchling = pytest.importorskip("hatchling", reason="building needs hatchling, of the dependency group `test`")
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    backend = str(Path(hatchling.__file__).parents[1])
    return folder / run(sys.executable, "-c", build, folder, cwd=REPOSITORY, PYTHONPATH=backend).splitlines()[-1]


def test_the_wheel_holds_every_file_of_the_package(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    ignored = {"__pycache__"}
    files = [path for path in (SOURCE / "sima_attn").rglob("*") if path.is_file() and not ignored & set(path.parts)]
    assert {path.relative_to(SOURCE).as_posix() for path in files} <= held
    assert {f"sima_attn/{package}/__init__.py" for package in PACKAGES} <= held
    assert "sima_attn/weights/sima_xcit_mini_p4_64_relu.safetensors" in held
    assert {f"sima_attn/serve/page/{name}" for name in ("index.html", "page.js", "browser.html")} <= held


def test_the_wheel_holds_nothing_else(wheel):
    others = [name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("sima_attn/")]
    assert [name for name in others if ".dist-info/" not in name] == []


def test_the_installed_command_runs_without_the_source_tree(wheel, tmp_path):
    import sima_attn

    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # What the package depends on comes from this environment. An editable install of the package itself does not:
    # it is a .pth file, which Python does not read in a folder of PYTHONPATH.
    dependencies = sysconfig.get_path("purelib")
    where = "import sima_attn; print(sima_attn.__file__)"
    imported = Path(run(python, "-c", where, cwd=tmp_path, PYTHONPATH=dependencies))
    assert imported.is_relative_to(tmp_path)
    said = run(tmp_path / "venv" / "bin" / "sima", "--version", cwd=tmp_path, PYTHONPATH=dependencies)
    assert sima_attn.__version__ in said
