"""How many channels the images of a model have."""

from torch import nn


def image_channels(model: nn.Module) -> int:
    """The input channels of the first convolution; 3 without one."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels
