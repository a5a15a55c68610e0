"""Tracing of modules that branch on the shapes of their inputs."""

from typing import Any

from torch import nn
from torch.fx import Proxy, Tracer


class LeafModule(nn.Module):
    """A module that torch.fx records as one node, with any tracer, and that torch.jit.script does not support.

    torch.fx traces without shapes, so it cannot follow a forward that branches on them. A list of leaf modules would do
    the same, but timm, torchvision and torch.fx each have their own.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As for any module; while torch.fx traces, one node, which runs the hooks too."""
        proxies = (value for value in (*args, *kwargs.values()) if isinstance(value, Proxy))
        tracer: Any = getattr(next(proxies, None), "tracer", None)
        path = tracer.path_of_module(self) if isinstance(tracer, Tracer) else ""
        if not path:
            return super().__call__(*args, **kwargs)

        def one_node(*args: Any, **kwargs: Any) -> Any:
            return tracer.create_proxy("call_module", path, args, kwargs)

        # Through the tracer's call_module, in which timm and torchvision name the node.
        return tracer.call_module(self, one_node, args, kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script on each module before it compiles anything."""
        raise ValueError(
            f"{type(self).__name__} is not supported by torch.jit.script, because it branches on the properties of its "
            "inputs; use torch.compile or torch.export instead"
        )
