"""Makes our models known to timm and transformers as soon as these are imported, and imports neither by itself."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# module of the other library -> our module that registers with it. Of transformers the Auto classes are enough: other
# programs import the package for other reasons, and should not wait for us.
REGISTRATIONS = {
    "timm": "sima_attn.models",
    "transformers.models.auto.configuration_auto": "sima_attn.conversion.saved",
}


def register_with_other_libraries() -> None:
    """Register now where the other library is there, otherwise when it comes."""
    for theirs, ours in REGISTRATIONS.items():
        if theirs in sys.modules:
            import_module(ours)
        else:
            sys.meta_path.insert(0, _WhenItComes(theirs, ours))


class _WhenItComes(MetaPathFinder):
    """Finds a module where Python finds it anyway, and adds one step after its import.

    It stays until the module is really imported: others ask for the spec only to see whether it is there.
    """

    def __init__(self, theirs: str, ours: str) -> None:
        self.theirs, self.ours = theirs, ours
        self.asking = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.theirs or self.asking:
            return None
        self.asking = True
        try:
            spec = find_spec(self.theirs)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(Loader):
    def __init__(self, their_loader: Loader, finder: _WhenItComes) -> None:
        self.their_loader = their_loader
        self.finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.their_loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self.finder)
        self.their_loader.exec_module(module)
        import_module(self.finder.ours)

    def __getattr__(self, name: str):
        return getattr(self.their_loader, name)  # get_data and the like, for importlib.resources
