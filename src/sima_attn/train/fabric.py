"""The processes of a run: Fabric, which torchrun has started one or several times."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from sima_attn._devices import resolve_device

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MIXED: dict[str, Any] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def start_fabric(device: str, precision: str, strategy: str = "ddp", timeout_minutes: float = 10.0) -> Fabric:
    """Launch Fabric on "auto", "cpu" or "cuda"; under torchrun, as one of its processes, with a strategy of `Run`."""
    # Imported here so that evaluation and prediction work without lightning.
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import MixedPrecision, Precision

    from sima_attn.train.strategies import strategy_of

    class Autocast(MixedPrecision):
        def forward_context(self) -> Any:
            # The cache would keep the converted weights of all blocks, and so more than what sharding saves.
            return torch.autocast(device, dtype=self._desired_input_dtype, cache_enabled=strategy != "fsdp")

        def convert_input(self, data: Any) -> Any:  # Fabric would round inputs, too, even the coordinates of boxes
            return data

    device = resolve_device(device)
    if precision == "fp16" and device == "cpu":
        raise ValueError("fp16 training needs a GPU; use --precision bf16 or fp32 on the CPU")
    if device == "cuda" and precision in MIXED:
        torch.set_float32_matmul_precision("high")  # TF32 is enough for what autocast keeps in float32
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda" and local > torch.cuda.device_count():
        raise ValueError(
            f"torchrun started {local} processes on a machine with {torch.cuda.device_count()} GPUs; each needs one of "
            "its own: start fewer, or use --device cpu"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(
        accelerator=device,
        devices=local,
        num_nodes=max(1, world // local),
        strategy=strategy_of(strategy, timeout_minutes) if world > 1 else "auto",
        plugins=Autocast(MIXED[precision], device) if precision in MIXED else Precision(),
    )
    fabric.launch()
    return fabric
