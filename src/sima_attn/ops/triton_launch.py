"""Launches the Triton kernels of SimA: which kernels, on what grid, with which scratch memory.

A head with few tokens is one program, one launch. With many tokens there are three launches: sums over shares of
the tokens, their addition, the outputs. Tensors come as [B, H, tokens, channels] with any strides but the last.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sima_attn.ops import triton_kernels as kernels
from sima_attn.ops.triton_op import fits_one_tile, padded
from sima_attn.ops.triton_tuning import Problem, Tile, launch_with_best_tile, multiprocessors, power_of_two

# A head is one program up to this many tokens, whatever the batch: splitting would cost two more launches.
FEW_TOKENS = 256
# Where the heads alone fill the chip, forward stays one program a head up to this many.
FEW_TOKENS_OF_MANY_HEADS = 2048
# The whole state of a head must fit the registers of one program, by bytes a number of the inputs.
LARGEST_STATE = {2: 128 * 128, 4: 64 * 64}
SMALLEST_SHARE = 128  # tokens that are worth a program of their own
PROGRAMS = 1.25  # that share the tokens, for every multiprocessor; more would write more shares
FINISHING_ROWS = 4  # rows of the state that one program adds up, half as many where heads are few
MOST_READY = 4096  # launches that are remembered
PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "tf32x3"}
NARROW = 32  # so few channels a head multiply in full float32 without tensor cores, which is a little more accurate


class Options(NamedTuple):
    """What is not a tensor of tokens: masks [B, tokens] or None, and the factor on the output."""

    query_mask: Tensor | None
    key_mask: Tensor | None
    gains: Tensor | None  # [B] float32, or None for the one number `gain`
    gain: float
    eps: float


class Sizes(NamedTuple):
    """The letters of the module, and the padded channel counts the kernels work with."""

    B: int
    H: int
    N: int
    M: int
    D: int
    DV: int
    block_d: int
    block_v: int
    itemsize: int

    @property
    def heads(self) -> int:
        """Attentions computed side by side."""
        return self.B * self.H

    @property
    def tokens(self) -> int:
        """Queries or keys, whichever are more."""
        return max(self.N, self.M)

    @property
    def fit_one_tile(self) -> bool:
        """True where (Q diag(s) K^T) V and its gradient are one program a head."""
        return fits_one_tile(self.N, self.M, self.D, self.DV, self.itemsize)


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    B, H, N, D = q.shape
    return Sizes(B, H, N, k.shape[2], D, v.shape[3], padded(D), padded(v.shape[3]), q.element_size())


def parts(total: int, size: int) -> int:
    """How many parts of a size cover the total. triton.cdiv takes 2 us a call, and a launch has several."""
    return -(-total // size)


def scratch(*shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that a kernel fills completely before another one reads it."""
    return torch.empty(shape, dtype=dtype, device=like.device)


_ready: dict[tuple, tuple[Any, tuple]] = {}  # a launch -> the compiled kernel, and its constants in order


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, tile: Tile | None = None, **constants: Any) -> None:
    """Launch kernel[grid](*arguments, **constants) with the compiler options of a tile.

    Triton looks anew at every argument to find the compiled kernel, 40 us a launch. What it looks at is the key here:
    numbers as they are, the type of a tensor and whether it begins at 16 bytes. float arguments are of one type.
    """
    key = (
        kernel.fn, arguments[0].device, tile, *constants.values(),
        *[a if type(a) is int else (a.dtype, a.data_ptr() % 16 == 0) for a in arguments if type(a) is not float],
    )  # fmt: skip
    ready = _ready.get(key)
    if ready is not None:
        compiled, in_order = ready
        compiled[grid](*arguments, *in_order)
        return
    options = {} if tile is None else tile.compiler_options()
    compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_ready) >= MOST_READY:
            _ready.clear()
        _ready[key] = compiled, tuple(constants[name] for name in kernel.arg_names if name in constants)


def is_one_program(sizes: Sizes, few_tokens: int) -> bool:
    """True where Q (diag(s) K^T V), or its gradient, is one program a head."""
    return sizes.tokens <= few_tokens and sizes.block_d * sizes.block_v <= LARGEST_STATE[sizes.itemsize]


def forward_is_one_program(sizes: Sizes, device: torch.device) -> bool:
    fills_chip = sizes.heads >= multiprocessors(device)
    return is_one_program(sizes, FEW_TOKENS_OF_MANY_HEADS if fills_chip else FEW_TOKENS)


def forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, options: Options, *, order: str, keep: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Fill o. Returns what the gradient needs, (state [B, H, D, DV], norms [2, B, H, D]), complete if `keep`."""
    sizes = sizes_of(q, k, v)
    if order == "qk":
        return None, _forward_qk(q, k, v, o, options, sizes, keep)
    if forward_is_one_program(sizes, q.device):
        return _forward_head(q, k, v, o, options, sizes, keep)
    return _forward_split(q, k, v, o, options, sizes)


def state_of(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """W = diag(s) K^T V [B, H, D, DV], float32."""
    return _sums_forward(q, k, v, options, sizes_of(q, k, v))[0]


def backward(tensors: tuple[Tensor, ...], state: Tensor | None, norms: Tensor, options: Options) -> None:
    """Fill dq, dk and dv of (q, k, v, do, dq, dk, dv).

    Without a state (the order was qk) tokens that do not fit one tile make it again.
    """
    q, k, v = tensors[:3]
    sizes = sizes_of(q, k, v)
    if state is None:
        if sizes.fit_one_tile:
            _backward_qk(tensors, norms, options, sizes)
            return
        # The gradient does not depend on the order of the products, and this way it is linear in the tokens.
        state, norms = _sums_forward(q, k, v, options, sizes)
    if is_one_program(sizes, FEW_TOKENS):
        _backward_head(tensors, state, norms, options, sizes)
    else:
        _backward_split(tensors, state, norms, options, sizes)


def _forward_head(q, k, v, o, options: Options, sizes: Sizes, keep: bool) -> tuple[Tensor | None, Tensor | None]:
    state = scratch(sizes.B, sizes.H, sizes.D, sizes.DV, like=q) if keep else None
    norms = scratch(2, sizes.B, sizes.H, sizes.D, like=q) if keep else None

    def launch(tile: Tile) -> None:
        start(
            kernels.forward_head, (sizes.heads, 1, 1),
            q, k, v, o, state if keep else q, norms if keep else q, *_masks_and_gain(q, options),
            options.gain, options.eps, sizes.heads, sizes.H, sizes.N, sizes.M, *_strides(q, k, v, o),
            D=sizes.D, DV=sizes.DV, BLOCK_D=sizes.block_d, BLOCK_V=sizes.block_v, BLOCK_N=tile.rows,
            SUM_ROWS=_sum_rows(sizes, tile), STAGES=tile.stages, WHOLE=sizes.tokens <= tile.rows, KEEP=keep,
            **_flags(q, options, sizes), tile=tile,
        )  # fmt: skip

    launch_with_best_tile("forward_head", _problem(sizes, q.device), q.device, launch)
    return state, norms


def _forward_split(q, k, v, o, options: Options, sizes: Sizes) -> tuple[Tensor, Tensor]:
    state, norms = _sums_forward(q, k, v, options, sizes)

    def launch(tile: Tile) -> None:
        start(
            kernels.apply_forward, _apply_grid(sizes, sizes.N, tile, sizes.DV),
            q, o, state, _mask(options.query_mask, q), sizes.H, sizes.N, tile.tiles, *_strides(q, o),
            D=sizes.D, DV=sizes.DV, BLOCK_D=sizes.block_d, BLOCK_V=min(sizes.block_v, tile.columns),
            BLOCK_N=tile.rows, QUERY_MASKED=options.query_mask is not None, PRECISION=_precision(q, sizes),
            tile=tile,
        )  # fmt: skip

    launch_with_best_tile("apply_forward", _problem(sizes, q.device), q.device, launch)
    return state, norms


def _sums_forward(q, k, v, options: Options, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """W = diag(s) K^T V [B, H, D, DV] and the norms [2, B, H, D]: two launches."""
    shares, norm_shares, splits = _outer_products(
        k, v, q, sizes, norms=True, x_mask=options.key_mask, z_mask=options.query_mask
    )
    state = scratch(sizes.B, sizes.H, sizes.D, sizes.DV, like=q)
    norms = scratch(2, sizes.B, sizes.H, sizes.D, like=q)
    constants = _finishing(sizes, splits, options, q.device)
    start(
        kernels.finish_forward, (sizes.heads, parts(sizes.D, constants["ROWS"]), 1),
        shares, norm_shares, state, norms, q if options.gains is None else options.gains,
        options.gain, options.eps, sizes.heads, sizes.H, splits, **constants,
    )  # fmt: skip
    return state, norms


def _outer_products(
    x, y, z, sizes: Sizes, *, norms: bool, x_mask: Tensor | None, z_mask: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """Shares of X^T Y and of the norms of x and z, and how many there are."""
    rows = max(x.shape[2], z.shape[2])
    splits = min(parts(rows, SMALLEST_SHARE), parts(int(PROGRAMS * multiprocessors(x.device)), sizes.heads))
    shares = scratch(splits, sizes.heads, sizes.D, sizes.DV, like=x)
    norm_shares = scratch(splits, sizes.heads, 2, sizes.D, like=x) if norms else shares

    def launch(tile: Tile) -> None:
        columns = min(sizes.block_v, tile.columns)
        start(
            kernels.outer_products, (sizes.heads, splits, parts(sizes.DV, columns)),
            x, y, z, shares, norm_shares, _mask(x_mask, x), _mask(z_mask, x),
            sizes.heads, sizes.H, x.shape[2], z.shape[2], splits, *_strides(x, y, z),
            D=sizes.D, DV=sizes.DV, BLOCK_D=sizes.block_d, BLOCK_V=columns, BLOCK_N=tile.rows,
            SUM_ROWS=_sum_rows(sizes, tile), STAGES=tile.stages, NORMS=norms,
            X_MASKED=x_mask is not None, Z_MASKED=z_mask is not None, PRECISION=_precision(x, sizes),
            tile=tile,
        )  # fmt: skip

    launch_with_best_tile("outer_products", _problem(sizes, x.device), x.device, launch)
    return shares, norm_shares, splits


def _backward_head(tensors, state: Tensor, norms: Tensor, options: Options, sizes: Sizes) -> None:
    q = tensors[0]

    def launch(tile: Tile) -> None:
        start(
            kernels.backward_head, (sizes.heads, 1, 1),
            *tensors, state, norms, *_masks_and_gain(q, options),
            options.gain, options.eps, sizes.heads, sizes.H, sizes.N, sizes.M, *_strides(*tensors),
            D=sizes.D, DV=sizes.DV, BLOCK_D=sizes.block_d, BLOCK_V=sizes.block_v, BLOCK_N=tile.rows,
            WHOLE=tile.rows >= sizes.N, **_flags(q, options, sizes), tile=tile,
        )  # fmt: skip

    launch_with_best_tile("backward_head", _problem(sizes, q.device), q.device, launch)


def _backward_split(tensors, state: Tensor, norms: Tensor, options: Options, sizes: Sizes) -> None:
    q, do = tensors[0], tensors[3]
    mask = options.query_mask
    shares, _, splits = _outer_products(q, do, q, sizes, norms=False, x_mask=mask, z_mask=mask)
    z = scratch(sizes.heads, sizes.D, sizes.DV, like=q)
    pulls = scratch(2, sizes.heads, sizes.D, like=q)
    constants = _finishing(sizes, splits, options, q.device)
    start(
        kernels.finish_backward, (sizes.heads, parts(sizes.D, constants["ROWS"]), 1),
        shares, state, norms, z, pulls, q if options.gains is None else options.gains,
        options.gain, options.eps, sizes.heads, sizes.H, splits, **constants,
    )  # fmt: skip

    def launch(tile: Tile) -> None:
        columns = min(max(sizes.block_d, sizes.block_v), tile.columns)
        start(
            kernels.apply_backward, _apply_grid(sizes, sizes.tokens, tile, max(sizes.D, sizes.DV)),
            *tensors, state, z, pulls, _mask(options.query_mask, q), _mask(options.key_mask, q),
            sizes.heads, sizes.H, sizes.N, sizes.M, tile.tiles, *_strides(*tensors),
            D=sizes.D, DV=sizes.DV, BLOCK_D=sizes.block_d, BLOCK_V=sizes.block_v, BLOCK_C=columns,
            BLOCK_N=tile.rows, QUERY_MASKED=options.query_mask is not None,
            KEY_MASKED=options.key_mask is not None, PRECISION=_precision(q, sizes), tile=tile,
        )  # fmt: skip

    launch_with_best_tile("apply_backward", _problem(sizes, q.device), q.device, launch)


def _forward_qk(q, k, v, o, options: Options, sizes: Sizes, keep: bool) -> Tensor | None:
    whole = sizes.fit_one_tile
    norms = scratch(2, sizes.B, sizes.H, sizes.D, like=q) if keep or not whole else None
    if not whole:
        start(
            kernels.token_norms, (sizes.heads, 1, 1),
            q, k, norms, _mask(options.query_mask, q), _mask(options.key_mask, q),
            sizes.heads, sizes.H, sizes.N, sizes.M, *_strides(q, k),
            D=sizes.D, BLOCK_D=sizes.block_d, BLOCK_N=32, SUM_ROWS=32,
            QUERY_MASKED=options.query_mask is not None, KEY_MASKED=options.key_mask is not None,
        )  # fmt: skip

    def launch(tile: Tile) -> None:
        rows_q, rows_k = (padded(sizes.N), padded(sizes.M)) if whole else (tile.rows, tile.rows)
        start(
            kernels.attend, (sizes.heads, parts(sizes.N, rows_q), 1),
            q, k, v, o, q if norms is None else norms, *_masks_and_gain(q, options),
            options.gain, options.eps, sizes.heads, sizes.H, sizes.N, sizes.M, *_strides(q, k, v, o),
            D=sizes.D, DV=sizes.DV, BLOCK_D=sizes.block_d, BLOCK_V=sizes.block_v, BLOCK_N=rows_q, BLOCK_M=rows_k,
            WHOLE=whole, KEEP=keep, **_flags(q, options, sizes), tile=tile,
        )  # fmt: skip

    launch_with_best_tile("attend", _problem(sizes, q.device), q.device, launch)
    return norms


def _backward_qk(tensors, norms: Tensor, options: Options, sizes: Sizes) -> None:
    q = tensors[0]

    def launch(tile: Tile) -> None:
        start(
            kernels.attend_backward, (sizes.heads, 1, 1),
            *tensors, norms, *_masks_and_gain(q, options),
            options.gain, options.eps, sizes.heads, sizes.H, sizes.N, sizes.M, *_strides(*tensors),
            D=sizes.D, DV=sizes.DV, BLOCK_D=sizes.block_d, BLOCK_V=sizes.block_v,
            BLOCK_N=padded(sizes.N), BLOCK_M=padded(sizes.M), **_flags(q, options, sizes), tile=tile,
        )  # fmt: skip

    launch_with_best_tile("attend_backward", _problem(sizes, q.device), q.device, launch)


def _precision(q: Tensor, sizes: Sizes) -> str:
    narrow = q.dtype == torch.float32 and max(sizes.block_d, sizes.block_v) <= NARROW
    return "ieee" if narrow else PRECISION[q.dtype]


@functools.lru_cache(maxsize=1024)
def _problem(sizes: Sizes, device: torch.device) -> Problem:
    fills_chip = sizes.heads >= 2 * multiprocessors(device)
    return Problem(sizes.tokens, sizes.heads, max(sizes.block_d, sizes.block_v), sizes.itemsize, fills_chip)


def _apply_grid(sizes: Sizes, rows: int, tile: Tile, width: int) -> tuple[int, int, int]:
    columns = min(padded(width), tile.columns)
    return sizes.heads, parts(rows, tile.rows * tile.tiles), parts(width, columns)


def _finishing(sizes: Sizes, splits: int, options: Options, device: torch.device) -> dict[str, Any]:
    few = sizes.heads * parts(sizes.D, FINISHING_ROWS) < multiprocessors(device)
    return {
        "D": sizes.D,
        "DV": sizes.DV,
        "ROWS": FINISHING_ROWS // 2 if few else FINISHING_ROWS,
        "BLOCK_V": sizes.block_v,
        "AT_ONCE": min(16, power_of_two(splits)),
        "GAIN_BY_IMAGE": options.gains is not None,
    }


def _sum_rows(sizes: Sizes, tile: Tile) -> int:
    """Rows of a tile that one pass of all threads covers, 16 bytes a thread."""
    return min(tile.rows, max(16, tile.warps * 256 // sizes.block_d))


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in t.stride()[:3]]


def _mask(mask: Tensor | None, any_tensor: Tensor) -> Tensor:
    """The mask as bytes, or any pointer at all where there is none."""
    return any_tensor if mask is None else mask.contiguous().view(torch.uint8)


def _masks_and_gain(q: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    return _mask(options.query_mask, q), _mask(options.key_mask, q), q if options.gains is None else options.gains


def _flags(q: Tensor, options: Options, sizes: Sizes) -> dict[str, Any]:
    return {
        "QUERY_MASKED": options.query_mask is not None,
        "KEY_MASKED": options.key_mask is not None,
        "GAIN_BY_IMAGE": options.gains is not None,
        "PRECISION": _precision(q, sizes),
    }
