"""The rules of the layout: imports go downward only, the lower layers need torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sima_attn

SOURCE = Path(sima_attn.__file__).parent
LAYERS = {"ops": 0, "nn": 1, "models": 2, "conversion": 2}
LAYERS |= dict.fromkeys(("detect", "train", "explain", "export", "bench"), 3)
TOP = 4  # serve, cli
FILES = sorted(SOURCE.rglob("*.py"))


def layer(module: str) -> int:
    parts = module.split(".")
    if len(parts) < 2 or parts[1].startswith("_"):
        return -1  # the package itself and its private helpers may be imported from everywhere
    return LAYERS.get(parts[1], TOP)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def name_of(path: Path) -> str:
    return ".".join(("sima_attn", *path.relative_to(SOURCE).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_downward_only(path):
    if path == SOURCE / "__init__.py":
        return  # the public names, imported when they are used
    mine = layer(name_of(path))
    upward = {m for m in imports(path) if m.startswith("sima_attn") and layer(m) > max(mine, -1) and mine >= 0}
    assert not upward


@pytest.mark.parametrize("path", [p for p in FILES if layer(name_of(p)) in (0, 1)], ids=name_of)
def test_ops_and_nn_import_torch_alone(path):
    allowed = {"torch", "sima_attn"} | ({"triton"} if path.name.startswith("triton_") else set())
    assert not {m.split(".")[0] for m in imports(path)} - allowed - set(sys.stdlib_module_names)


def test_triton_is_imported_only_when_it_runs():
    code = "import sys, torch, sima_attn.nn; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, sima_attn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_is_there_and_a_wrong_one_is_an_attribute_error():
    for name in sima_attn.__all__:
        assert getattr(sima_attn, name) is not None
    assert set(dir(sima_attn)) == set(sima_attn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sima_atention'"):
        _ = sima_attn.sima_atention
