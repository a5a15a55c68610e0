"""Checkpoints of the authors' code, of XCiT and of DeiT, into our models and back.

The three code bases name a few parameters differently; every key is accounted for, or the load is an error.

    official                                timm and here
    pos_embeder.*                           pos_embed.*
    cls_attn_blocks.i.attn.qkv              cls_attn_blocks.i.attn.{q, k, v}
    blocks.i.gamma{1,2} of a DeiT           blocks.i.ls{1,2}.gamma
    blocks.i.attn.temperature of an XCiT    has no place in SimA: dropped, and said so
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit
from torch import Tensor, nn

from sima_attn._files import atomic_write
from sima_attn.models.weight_files import StateDict, check_fits, read_state_dict


@dataclass(frozen=True)
class LoadReport:
    """Result of `load_official`: number of loaded tensors, and what was dropped or changed and why."""

    loaded: int
    dropped: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"loaded {self.loaded} tensors"]
        lines += [f"dropped {key}: {why}" for key, why in self.dropped.items()]
        lines += [f"changed {key}: {how}" for key, how in self.changed.items()]
        return "\n".join(lines)


def load_official(model: nn.Module, path: str | Path) -> LoadReport:
    """Load a checkpoint of the official SimA, XCiT or DeiT code (or of timm) into a DeiT or XCiT of ours.

    A softmax or XCA checkpoint warm-starts the SimA twin: its accuracy comes back with fine-tuning only.
    """
    _check_family(model)
    return load_any(model, read_state_dict(Path(path)), f"{path} does not fit this model")


def load_any(model: nn.Module, state: StateDict, error: str) -> LoadReport:
    """Load weights under the names of timm or of the official code; where they do not fit, raise with this text."""
    dropped: dict[str, str] = {}
    changed: dict[str, str] = {}
    wanted = model.state_dict()
    renamed: StateDict = {}
    for key, tensor in state.items():
        if key.endswith(".attn.temperature") and key not in wanted:
            dropped[key] = "the temperature of XCA has no counterpart in this attention"
            continue
        for new_key, part in _to_ours(key, tensor, model):
            renamed[new_key] = part
    if isinstance(model, VisionTransformer):
        _resample_positions(model, renamed, changed)
    check_fits(renamed, wanted, error)
    model.load_state_dict(renamed)
    return LoadReport(len(renamed), dropped, changed)


def save_official(model: nn.Module, path: str | Path) -> None:
    """Write the weights of a DeiT or XCiT of ours as the official code names them.

    The file holds {"model": state dict}; one that ends in .safetensors holds the tensors alone.
    """
    _check_family(model)
    with atomic_write(Path(path)) as temporary:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file({key: tensor.contiguous() for key, tensor in _to_official(model).items()}, temporary)
        else:
            torch.save({"model": _to_official(model)}, temporary)


def _check_family(model: nn.Module) -> None:
    if not isinstance(model, VisionTransformer | Xcit):
        raise ValueError(f"official checkpoints exist for DeiT and XCiT models, got a {type(model).__name__}")


def _to_ours(key: str, tensor: Tensor, model: nn.Module) -> list[tuple[str, Tensor]]:
    if key.startswith("pos_embeder."):
        return [(key.replace("pos_embeder.", "pos_embed.", 1), tensor)]
    found = re.fullmatch(r"(cls_attn_blocks\.\d+\.attn)\.qkv\.(weight|bias)", key)
    if found and tensor.dim():
        parts = tensor.tensor_split(3)  # a wrong number of rows is an error of the shape check
        return [(f"{found[1]}.{name}.{found[2]}", part) for name, part in zip("qkv", parts, strict=True)]
    if isinstance(model, VisionTransformer) and (found := re.fullmatch(r"(blocks\.\d+)\.gamma([12])", key)):
        return [(f"{found[1]}.ls{found[2]}.gamma", tensor)]
    return [(key, tensor)]


def _to_official(model: nn.Module) -> StateDict:
    state, official = model.state_dict(), {}
    for key, tensor in state.items():
        if isinstance(model, Xcit) and key.startswith("pos_embed."):
            official[key.replace("pos_embed.", "pos_embeder.", 1)] = tensor
        elif found := re.fullmatch(r"(cls_attn_blocks\.\d+\.attn)\.([qkv])\.(weight|bias)", key):
            if found[2] == "q":
                parts = [state[f"{found[1]}.{name}.{found[3]}"] for name in "qkv"]
                official[f"{found[1]}.qkv.{found[3]}"] = torch.cat(parts)
        elif found := re.fullmatch(r"(blocks\.\d+)\.ls([12])\.gamma", key):
            official[f"{found[1]}.gamma{found[2]}"] = tensor
        else:
            official[key] = tensor
    return official


def _resample_positions(model: VisionTransformer, state: StateDict, changed: dict[str, str]) -> None:
    """Position embeddings of another image size are resampled, as in timm; other mismatches are errors."""
    wanted, given = model.pos_embed, state.get("pos_embed")
    if wanted is None or given is None or given.shape == wanted.shape:
        return
    patches = given.shape[1] - model.num_prefix_tokens if given.dim() == 3 else 0
    if patches < 1 or math.isqrt(patches) ** 2 != patches or given.shape != (1, given.shape[1], wanted.shape[2]):
        return
    grid = model.patch_embed.grid_size
    state["pos_embed"] = resample_abs_pos_embed(given, new_size=list(grid), num_prefix_tokens=model.num_prefix_tokens)
    changed["pos_embed"] = f"resampled from {given.shape[1]} to {wanted.shape[1]} tokens"
