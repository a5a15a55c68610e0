"""The rules of the layout: imports go downward only, the lower layers need torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sima_attn

SOURCE = Path(sima_attn.__file__).parent
# Lowest first. A package may import those before it, so two packages cannot import each other.
PACKAGES = (
    "ops nn conversion models parallel report data auditing train probe dino detect explain distill gigapixel "
    "export reproduce bench serve cli"
).split()
FILES = sorted(SOURCE.rglob("*.py"))


def package(module: str) -> str | None:
    """The package of a module; None for sima_attn itself and its private modules, which all may import."""
    parts = module.split(".")
    return None if parts[0] != "sima_attn" or len(parts) < 2 or parts[1].startswith("_") else parts[1]


def imports(code: Path | ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(code.read_text()) if isinstance(code, Path) else code):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def name_of(path: Path) -> str:
    return ".".join(("sima_attn", *path.relative_to(SOURCE).with_suffix("").parts))


def test_every_package_has_a_place_in_the_order():
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == set(PACKAGES)


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != SOURCE], ids=name_of)
def test_imports_go_downward_only(path):
    mine = package(name_of(path))
    imported = {package(module) for module in imports(path)} - {None, mine}
    assert not [name for name in imported if PACKAGES.index(name) > PACKAGES.index(mine)]


@pytest.mark.parametrize("path", [p for p in SOURCE.glob("_*.py") if p.name != "__init__.py"], ids=name_of)
def test_private_modules_import_no_package_at_import(path):
    at_import = ast.Module(
        [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.FunctionDef)], []
    )
    assert not {package(module) for module in imports(at_import)} - {None}


@pytest.mark.parametrize("path", [p for p in FILES if package(name_of(p)) in ("ops", "nn")], ids=name_of)
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
    assert not set(PACKAGES) & set(sima_attn.__all__)  # importing such a package would hide the public name
    with pytest.raises(AttributeError, match="no attribute 'sima_atention'"):
        _ = sima_attn.sima_atention


def test_settings_of_recipes_import_without_torch():
    """So that a wrong setting of a command is reported at once."""
    code = "import sys, sima_attn.train.recipes, sima_attn.dino.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
