"""Makes our models known to timm as soon as both are imported, in either order, and imports neither by itself."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

FAMILIES = ("cvt", "deit", "miniature", "xcit")  # modules of sima_attn.models that register models when imported


def register_with_timm() -> None:
    """Register now if timm is there, otherwise when it comes."""
    if "timm" in sys.modules:
        _import_families()
    else:
        sys.meta_path.insert(0, _WhenTimmComes())


def _import_families() -> None:
    for name in FAMILIES:
        import_module(f"sima_attn.models.{name}")


class _WhenTimmComes(MetaPathFinder):
    """Finds timm where Python finds it anyway, and adds one step after its import.

    It stays until timm is really imported: others ask for the spec only to see whether timm is there.
    """

    asking = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "timm" or self.asking:
            return None
        self.asking = True
        try:
            spec = find_spec("timm")
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(Loader):
    def __init__(self, timm_loader: Loader, finder: MetaPathFinder) -> None:
        self.timm_loader = timm_loader
        self.finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.timm_loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self.finder)
        self.timm_loader.exec_module(module)
        _import_families()

    def __getattr__(self, name: str):
        return getattr(self.timm_loader, name)  # get_data and the like, for importlib.resources
