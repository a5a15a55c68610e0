"""Which device a command runs on."""


def resolve_device(device: str) -> str:
    """ "cpu" or "cuda": auto is the GPU where there is one, and one that is asked for must be there."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no GPU here; use --device cpu")
    return device
