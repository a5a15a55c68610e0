"""torch.compile for models of many equal blocks, which share one compilation."""

from itertools import chain
from typing import Any

import torch
from timm.layers import DropPath
from torch import nn

BLOCK_LISTS = ("blocks", "cls_attn_blocks")  # names of the lists of blocks in timm's models and ours
LAST_BEFORE_BLOCKS = "pos_drop"  # name of the module before the first block


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, in their order; empty if it has no list of them."""
    lists = [
        part
        for name, part in model.named_modules()
        if name.rsplit(".", 1)[-1] in BLOCK_LISTS and isinstance(part, nn.Sequential | nn.ModuleList)
    ]
    return list(chain.from_iterable(lists))


def compile_blocks(model: nn.Module, **options: Any) -> Any:
    """The compiled model: its blocks are compiled in place if they are equal, otherwise the whole model is.

    Blocks that differ only in their weights share one compilation: seconds instead of a minute for twelve blocks.
    Stochastic depth with a different rate per block prevents that, because the rates are constants of the compiled
    code. `options` are those of torch.compile.
    """
    options = {"dynamic": False, **options}
    blocks = blocks_of(model)
    rates = {module.drop_prob for module in model.modules() if isinstance(module, DropPath)}
    if not blocks or len(rates) > 1:
        return torch.compile(model, **options)
    for block in blocks:
        block.compile(**options)
    if next(model.parameters()).dtype == torch.float32:
        # In mixed precision the stem outputs half precision and the first block float32. With float32 for all blocks,
        # one compilation is enough.
        for name, module in model.named_modules():
            if name.rsplit(".", 1)[-1] == LAST_BEFORE_BLOCKS:
                module.register_forward_hook(lambda module, inputs, tokens: tokens.float())
    return model
