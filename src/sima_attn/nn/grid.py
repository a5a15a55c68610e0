"""Tokens as a grid, for modules that use the position of a token.

A block passes tokens [B, N, C] to its attention, and N does not say how many rows they have. `follow_image_grid` lets
the patch embedding of a model tell the modules that need it.
"""

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Grid = tuple[int, int]  # rows and columns of patch tokens
MOST_PREFIX_TOKENS = 8  # that are inferred: a class token, a distillation token, registers


class ImageGrid:
    """The grid of the last image that a patch embedding has seen; None before the first."""

    def __init__(self) -> None:
        self.shape: Grid | None = None

    def keep(self, module: nn.Module, inputs: Any, feature_map: Tensor) -> None:
        """A forward hook of the convolution that makes patch tokens."""
        rows, columns = feature_map.shape[-2:]
        if not torch.compiler.is_exporting():  # while exporting, they may stand for any size
            rows, columns = operator.index(rows), operator.index(columns)  # as in `token_layout`
        self.shape = (rows, columns)


class OnGrid:
    """Mixin of modules that need the grid of their tokens.

    Attributes:
        grid: Of all images; None for the grid of each image, or a square one where it is not known.
        image_grid: That of the last image, in a model for which `follow_image_grid` was called.
    """

    grid: Grid | None = None
    image_grid: ImageGrid | None = None

    @property
    def likely_grids(self) -> list[Grid | None]:
        """What to pass to `token_grid` and `token_layout`. The last image may be another one than that of a call."""
        seen = None if self.image_grid is None else self.image_grid.shape
        return [self.grid] if self.grid or seen is None else [seen, None]


def follow_image_grid(model: nn.Module) -> list[RemovableHandle]:
    """Let the modules on a grid know that of each image; returns the handles of the new hooks.

    The grid is the map of the last convolution of the patch embedding: of the nearest `patch_embed` around a module, or
    else of the first convolution with non-overlapping patches. Where there is none, nothing changes.
    """
    handles = []
    for path, module in model.named_modules():
        if not isinstance(module, OnGrid) or (conv := _patch_convolution(model, path)) is None:
            continue
        hooked = (getattr(hook, "__self__", None) for hook in conv._forward_hooks.values())
        image_grid = next((owner for owner in hooked if isinstance(owner, ImageGrid)), None)
        if image_grid is None:
            image_grid = ImageGrid()
            handles.append(conv.register_forward_hook(image_grid.keep))
        module.image_grid = image_grid
    return handles


def _patch_convolution(model: nn.Module, path: str) -> nn.Conv2d | None:
    """The convolution whose map has the grid of the tokens of a module."""
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:depth])) for depth in reversed(range(len(names)))]  # inside out
    for parent in around:
        embedding: Any = getattr(parent, "patch_embed", None)
        if isinstance(embedding, nn.Module):
            return next((m for m in reversed(list(embedding.modules())) if isinstance(m, nn.Conv2d)), None)
    for parent in around:
        for module in parent.modules():
            if isinstance(module, nn.Conv2d) and module.stride == module.kernel_size != (1, 1):
                return module
    return None


def token_grid(N: int, grids: list[Grid | None], who: str) -> Grid:
    """(rows, columns) of N tokens: the first of the grids that fits, where None stands for a square."""
    if torch.compiler.is_exporting() and grids[0]:
        return grids[0]  # of the image that is traced; its sizes may be symbols, which cannot be compared
    N = operator.index(N)  # under torch.compile a plain number: one graph per image size
    for grid in grids:
        rows, columns = grid or (math.isqrt(N), math.isqrt(N))
        if rows * columns == N:
            return rows, columns
    expected = f"grid={grids[-1]}" if grids[-1] else "a square grid"
    raise ValueError(
        f"{who} needs its tokens on a grid, and {N} tokens do not fill {expected}; pass grid=(rows, columns) "
        "and use no class token"
    )


class TokenLayout(NamedTuple):
    """Prefix tokens (class token, registers) first, then the patch tokens, row by row."""

    prefix: int
    rows: int
    columns: int


def token_layout(N: int, grids: list[Grid | None], prefix_tokens: int | None, who: str) -> TokenLayout:
    """The layout of N tokens: the first of the grids that fits, where None stands for a square.

    Without `prefix_tokens` it is the one with the fewest, at most 8. The layout with a square is unique from 4 x 4
    patch tokens on: the next larger square is then more than 8 tokens away.
    """
    if torch.compiler.is_exporting() and grids[0] and prefix_tokens is not None:
        return TokenLayout(prefix_tokens, *grids[0])  # as in `token_grid`
    N = operator.index(N)
    for grid in grids:
        for prefix in range(MOST_PREFIX_TOKENS + 1) if prefix_tokens is None else (prefix_tokens,):
            patches = N - prefix
            if patches < 1:
                break
            rows, columns = grid or (math.isqrt(patches), math.isqrt(patches))
            if rows * columns == patches:
                return TokenLayout(prefix, rows, columns)
    grid = grids[-1]
    expected = f"a grid of {grid[0]} x {grid[1]}" if grid else "a square grid"
    allowed = f"0 to {MOST_PREFIX_TOKENS}" if prefix_tokens is None else str(prefix_tokens)
    raise ValueError(
        f"{who} needs its patch tokens on a grid, and {N} tokens are not {expected} plus {allowed} prefix tokens "
        "(class token, registers); set grid=(rows, columns) to the grid of the patch tokens, and prefix_tokens to the "
        "number of the other tokens"
    )


def as_grid(name: str, grid: Grid | None) -> Grid | None:
    """An option that is a grid, given as a pair or, as in recipes, as a list of two."""
    if grid is None:
        return None
    if isinstance(grid, tuple | list) and len(grid) == 2 and all(type(side) is int and side > 0 for side in grid):
        return grid[0], grid[1]
    raise ValueError(f"{name} must be None or a pair (rows, columns) of positive integers, got {grid!r}")


def check_prefix_tokens(prefix_tokens: int | None) -> None:
    """Raise unless it is None or an integer from 0 on."""
    if prefix_tokens is not None and (type(prefix_tokens) is not int or prefix_tokens < 0):
        raise ValueError(
            f"prefix_tokens must be None or the number of tokens before the patch tokens, got {prefix_tokens!r}"
        )


class OnPatches(OnGrid):
    """Mixin of modules that need the grid of the patch tokens, where other tokens may come first.

    Attributes:
        prefix_tokens: Number of tokens before the patch tokens; None for the smallest from 0 to 8 that fits.
    """

    prefix_tokens: int | None = None
    user: str  # what needs the grid, for errors

    def set_layout(self, grid: Grid | None, prefix_tokens: int | None) -> None:
        """Set both; raises unless they are None, or a pair of positive integers and an integer from 0 on."""
        check_prefix_tokens(prefix_tokens)
        self.grid = as_grid("grid", grid)
        self.prefix_tokens = prefix_tokens

    def layout(self, N: int) -> TokenLayout:
        """Prefix tokens, rows and columns of N tokens."""
        return token_layout(N, self.likely_grids, self.prefix_tokens, self.user)


@contextmanager
def on_grid(model: nn.Module, grid: Grid) -> Iterator[None]:
    """A context in which all `OnPatches` modules of a model take this grid; afterwards each `grid` is restored."""
    before = [(module, module.grid) for module in model.modules() if isinstance(module, OnPatches)]
    try:
        for module, _ in before:
            module.grid = grid
        yield
    finally:
        for module, old in before:
            module.grid = old
