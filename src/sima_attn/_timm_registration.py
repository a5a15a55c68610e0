"""Registers our models with timm once both packages are imported, in either order.

timm has no plugin mechanism: a model is known after the module that calls `register_model` is imported. That module
needs timm and torch, which take seconds to import, so `import sima_attn` does not import it while timm is not imported.
An import hook does so right after timm itself is imported.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

MODELS = "sima_attn.models"


def register_with_timm() -> None:
    """Register the models now if timm is imported, otherwise right after it is imported."""
    if "timm" in sys.modules:
        import_module(MODELS)
    else:
        sys.meta_path.insert(0, TimmFinder())


class TimmFinder(MetaPathFinder):
    """Finds timm with the other finders and makes its loader register our models.

    It is removed only when timm is loaded, because `importlib.util.find_spec("timm")` finds timm without loading it.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec of timm, or None for other modules."""
        if fullname != "timm":
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load: Any = spec.loader.exec_module

            def load_and_register(module: Any) -> None:
                sys.meta_path.remove(self)
                load(module)
                import_module(MODELS)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
