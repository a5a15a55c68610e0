"""Modules that choose what to compute by the shapes of their inputs, and what tracers make of them."""

from typing import Any

from torch import nn
from torch.fx import Proxy, Tracer


class LeafModule(nn.Module):
    """A module that torch.fx records as one node, whatever tracer is used, and that torch.jit.script refuses.

    torch.fx traces without shapes, so it cannot follow a forward that branches on them. Tracers that are told
    about leaf modules would not need this, but timm, torchvision and torch.fx each have their own way to be told.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; for values that torch.fx traces, one node, at which the hooks run too."""
        proxies = (value for value in (*args, *kwargs.values()) if isinstance(value, Proxy))
        tracer: Any = getattr(next(proxies, None), "tracer", None)
        path = tracer.path_of_module(self) if isinstance(tracer, Tracer) else ""
        if not path:
            return super().__call__(*args, **kwargs)

        def one_node(*args: Any, **kwargs: Any) -> Any:
            return tracer.create_proxy("call_module", path, args, kwargs)

        # Through the tracer's own way to call a module, in which timm and torchvision name the node.
        return tracer.call_module(self, one_node, args, kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script calls on each module before it compiles anything."""
        raise ValueError(
            f"{type(self).__name__} is not supported by torch.jit.script, because it branches on the shapes of its "
            "inputs; use torch.compile or torch.export instead"
        )
