"""Registers our models with timm and transformers once both packages are imported, in either order.

timm has no plugin mechanism: a model is known after the module that calls `register_model` is imported. That module
needs timm and torch, which take seconds to import, so `import sima_attn` does not import it while timm is not imported.
An import hook does so right after timm itself is imported. The same holds for the Auto classes of transformers.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

# Module of the other library -> our modules that register with it. Of transformers the Auto classes are enough: many
# programs import the package for other reasons and should not wait for us.
REGISTRATIONS = {
    "timm": tuple(f"sima_attn.models.{family}" for family in ("cvt", "deit", "miniature", "xcit")),
    "transformers.models.auto.configuration_auto": ("sima_attn.conversion.saved",),
}


def register_with_other_libraries() -> None:
    """Register now with libraries that are imported, and with the others right after they are imported."""
    for module, ours in REGISTRATIONS.items():
        if module in sys.modules:
            _import_all(ours)
        else:
            sys.meta_path.insert(0, RegisteringFinder(module, ours))


def _import_all(modules: tuple[str, ...]) -> None:
    for module in modules:
        import_module(module)


class RegisteringFinder(MetaPathFinder):
    """Finds a module with the other finders and makes its loader import our modules afterwards.

    It is removed only when the module is loaded, because `importlib.util.find_spec` finds modules without loading them.
    """

    def __init__(self, module: str, ours: tuple[str, ...]) -> None:
        self.module, self.ours = module, ours

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec of the module, or None for other modules."""
        if fullname != self.module:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load: Any = spec.loader.exec_module

            def load_and_register(module: Any) -> None:
                sys.meta_path.remove(self)
                load(module)
                _import_all(self.ours)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
