"""torch.compile for models of many blocks: the blocks alone, which share one compilation."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import DropPath
from torch import nn

LISTS = ("blocks", "cls_attn_blocks")  # what timm's models and ours call their lists of blocks
LAST_BEFORE = "pos_drop"  # and what they call the module before the first block


def compile_blocks(model: nn.Module, **options: Any) -> Any:
    """The model, compiled: its blocks one by one and in place where they are alike, otherwise as a whole.

    Blocks that differ in nothing but their weights share one compilation: seconds instead of a minute for twelve of
    them. Rates of stochastic depth that grow from block to block are compiled in, so they would share none.
    `options` are torch.compile's.
    """
    options = {"dynamic": False, **options}
    blocks = [
        block
        for name, part in model.named_modules()
        if name.rsplit(".", 1)[-1] in LISTS and isinstance(part, nn.Sequential | nn.ModuleList)
        for block in part
    ]
    rates = {module.drop_prob for module in model.modules() if isinstance(module, DropPath)}
    if not blocks or len(rates) > 1:
        return torch.compile(model, **options)
    for block in blocks:
        block.compile(**options)
    if next(model.parameters()).dtype == torch.float32:
        # In mixed precision the stem hands half precision to the first block, and that float32 to the others: with
        # float32 for all, one compilation serves all.
        for name, module in model.named_modules():
            if name.rsplit(".", 1)[-1] == LAST_BEFORE:
                module.register_forward_hook(lambda module, inputs, tokens: tokens.float())
    return model
