"""Make `torch.manual_seed` faster: inside pytest it spends a millisecond on the stack of its caller."""

from types import SimpleNamespace

import torch


def install() -> None:
    """Leave the stack out of the seeds that torch keeps for devices it has not initialized.

    It would be a part of the error message if such a device, once there is one, refused its seed. Data loaders seed
    for each image, so that a training in a test spent up to a third of its time on it.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if hasattr(device, "traceback"):
            device.traceback = SimpleNamespace(format_stack=list)
