"""The device a command runs on."""


def resolve_device(device: str) -> str:
    """ "cpu" or "cuda". "auto" is the GPU if torch finds one; "cuda" raises without a GPU."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda is not available: torch finds no GPU; use --device cpu")
    return device
