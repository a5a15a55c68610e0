"""What the Triton kernels share: products, tiles of tokens, the matrices of a head, and shares of its sums.

triton_kernels.py has the letters and the layout of the buffers.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def larger(a, b):
    return max(a, b)


@triton.constexpr_function
def exceeds_width(width, block, covered):
    """True where blocks of columns reach past `width`; the grid covers `covered` columns."""
    return width % block != 0 or covered > width


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b of one type, with float32 sums; PRECISION concerns float32 operands only."""
    if INTERPRETED:  # the interpreter has no bfloat16 products; these are the same, exact in float32
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def raw_product(a, b, PRECISION: tl.constexpr):
    """a @ b of two inputs, not rounded: tensor cores multiply half precision exactly."""
    return dot(a, b, "tf32" if PRECISION == "bf16" else PRECISION)


@triton.jit
def nearest_tf32(x):
    """x in float32, rounded to the nearest tf32: tensor cores cut the last 13 bits off, which is twice the error."""
    if x.dtype == tl.float16:
        x = x.to(tl.float32)  # exact in tf32
    else:
        rounded = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # the bits of a NaN may overflow
    return x


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b where one factor is a computed result, rounded to the type named by PRECISION.

    float16 inputs use tf32, which represents every float16 exactly and, unlike float16, values near 1/N^2 too.
    """
    if PRECISION == "bf16":
        out = dot(a.to(tl.bfloat16), b.to(tl.bfloat16), "tf32")
    elif PRECISION == "tf32":
        out = dot(nearest_tf32(a), nearest_tf32(b), "tf32")
    else:
        out = dot(a.to(tl.float32), b.to(tl.float32), PRECISION)
    return out


@triton.jit
def wait_for(x):
    """x, a running sum of products, complete before the loop continues. For loops that also read a factor by itself.

    Triton (3.6 to 3.9) lets Hopper's tensor cores continue while the loop fetches the next tiles. A tile that is only
    a factor has one more buffer in shared memory for that. A tile that is also read by itself, as k is for its norm,
    has none, so the next tile may overwrite it while it is still being multiplied. An operation on the sum, here an
    empty one that costs nothing, makes the loop wait for it.
    """
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def real_rows(mask, b, rows, count):
    """True where a row of image b exists and is not padding."""
    real = rows < count
    if mask is not None:
        real = real & (tl.load(mask + b.to(tl.int64) * count + rows, mask=real, other=0) != 0)
    return real


@triton.jit
def load_tile(x, rows, real, stride, columns, WIDTH: tl.constexpr, COVERED: tl.constexpr = 0):
    """x[rows, columns], zero where a row is not real or a column is past WIDTH.

    COVERED is the number of columns that the grid covers, where it can be more than WIDTH.
    """
    wanted = real[:, None]
    if exceeds_width(WIDTH, columns.shape[0], COVERED):
        wanted = wanted & (columns < WIDTH)[None, :]
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=wanted, other=0.0)


@triton.jit
def load_pair(x, y, mask, b, rows, count, x_n, y_n, d, e, D: tl.constexpr, DV: tl.constexpr):
    """x[rows, d] and y[rows, e] of image b, zero where a row is not real."""
    real = real_rows(mask, b, rows, count)
    return load_tile(x, rows, real, x_n, d, D), load_tile(y, rows, real, y_n, e, DV)


@triton.jit
def store_tile(x, value, rows, count, stride, columns, WIDTH: tl.constexpr, COVERED: tl.constexpr = 0):
    wanted = (rows < count)[:, None]
    if exceeds_width(WIDTH, columns.shape[0], COVERED):
        wanted = wanted & (columns < WIDTH)[None, :]
    tl.store(x + rows[:, None] * stride + columns[None, :], value.to(x.dtype.element_ty), mask=wanted)


@triton.jit
def partial_l1(x, SUM_ROWS: tl.constexpr):
    """Sums of |x| [BLOCK, W] -> [SUM_ROWS, W]. The added rows are in one thread, so no thread waits."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.sum(tl.reshape(magnitude, [x.shape[0] // SUM_ROWS, SUM_ROWS, x.shape[1]]), axis=0)


@triton.constexpr_function
def root_of_scale(D):
    """relu2 multiplies its squares by 1 / sqrt(D)."""
    return D**-0.25


@triton.jit
def features(x, KIND: tl.constexpr, D: tl.constexpr):
    """phi(x), in float32, or x itself for SimA."""
    if KIND == "relu2":
        x = x.to(tl.float32) * root_of_scale(D)
        x = tl.where(x < 0, 0.0, x)
        x = x * x
    return x


@triton.jit
def key_products(k_tile, v_tile, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """K'^T V of a tile [D, DV]."""
    if KIND == "relu2":
        kv = product(tl.trans(k_tile), v_tile, PRECISION)
    else:
        kv = raw_product(tl.trans(k_tile), v_tile, PRECISION)
    return kv


@triton.jit
def output_tile(q_tile, w, z, eps, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """O = Q W of a tile, divided by the sums of the weights for relu2."""
    o = product(q_tile, w, PRECISION)
    if KIND == "relu2":
        o = o / tl.maximum(tl.sum(q_tile * z[None, :], axis=1), eps)[:, None]
    return o


@triton.jit
def as_float32(gain, eps):
    """Both as float32: torch.compile passes them as float64, and so would be all that is computed with them."""
    return tl.cast(gain, tl.float32), tl.cast(eps, tl.float32)


@triton.jit
def scaled_rows(x, norm_q, norm_k, gain, eps):
    """diag(s) x [D, DV] with s = gain / (|Q|_1 |K|_1).

    One norm after the other: their product overflows float32 where q and k are near 1e18.
    """
    return x * (gain / tl.maximum(norm_q, eps))[:, None] * (1.0 / tl.maximum(norm_k, eps))[:, None]


@triton.jit
def head_matrix(kv, norm_q, norm_k, gain, gains, b, eps, KIND: tl.constexpr):
    """W [D, DV] from K'^T V: diag(s) K^T V, or itself for relu2."""
    if KIND == "sima":
        kv = scaled_rows(kv, norm_q, norm_k, load_gain(gain, gains, b), eps)
    return kv


@triton.jit
def scaled_columns(x, norm_q, norm_k, gain, eps):
    """x diag(s) [tokens, D], see `scaled_rows`."""
    return x * (gain / tl.maximum(norm_q, eps))[None, :] * (1.0 / tl.maximum(norm_k, eps))[None, :]


@triton.jit
def load_gain(gain, gains, b):
    """The factor on the output: one number, or one per image."""
    if gains is not None:
        gain = tl.load(gains + b)
    return gain


@triton.jit
def sign(x):
    x = x.to(tl.float32)
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def norm_gradient(t, norm, eps):
    """The factor of sign(x) in the gradient of x: t / |x|_1, zero where the norm is clamped to eps."""
    return tl.where(norm >= eps, t / tl.maximum(norm, eps), 0.0)


@triton.jit
def backward_sums(a, w, norm_q, norm_k, gain, gains, b, eps):
    """Z = diag(s) A [D, DV], t/|Q|_1 and t/|K|_1 [D]."""
    t = tl.sum(a * w, axis=1)
    slope_q, slope_k = norm_gradient(t, norm_q, eps), norm_gradient(t, norm_k, eps)
    return scaled_rows(a, norm_q, norm_k, load_gain(gain, gains, b), eps), slope_q, slope_k


@triton.jit
def at_head(x, packed, offset, head, H, x_b, x_h):
    """Pointer to the first token of a head. If x is None, it is in `packed`, `offset` elements from the start."""
    base = packed if x is None else x
    return base + offset + (head // H).to(tl.int64) * x_b + (head % H).to(tl.int64) * x_h


@triton.jit
def output_at_head(x, head, H, tokens, width, x_n):
    """As `at_head` for an output [B, tokens, ...] with `x_n` numbers per token and heads of `width` numbers."""
    return x + (head // H).to(tl.int64) * tokens * x_n + (head % H) * width


@triton.jit
def inputs_at_head(q, k, v, k_offset, v_offset, head, H, q_b, q_h, k_b, k_h, v_b, v_h):
    """Pointers to the first token of a head in q, k and v."""
    k = at_head(k, q, k_offset, head, H, k_b, k_h)
    v = at_head(v, q, v_offset, head, H, v_b, v_h)
    return at_head(q, q, 0, head, H, q_b, q_h), k, v


@triton.jit
def grads_at_head(grads, dk_offset, dv_offset, head, H, N, M, D, DV, dq_n, dk_n, dv_n):
    """Pointers to the first token of a head in dq, dk and dv, which lie in one flat tensor."""
    dq = output_at_head(grads, head, H, N, D, dq_n)
    dk = output_at_head(grads + dk_offset, head, H, M, D, dk_n)
    return dq, dk, output_at_head(grads + dv_offset, head, H, M, DV, dv_n)


@triton.jit
def matrix_row(x, row, D: tl.constexpr, DV: tl.constexpr):
    """Where a row of D * DV + 2 D numbers begins: a matrix [D, DV] and two vectors [D]."""
    return x + row.to(tl.int64) * (D * DV + 2 * D)


@triton.jit
def matrix_offsets(rows, columns, DV: tl.constexpr):
    return rows[:, None] * DV + columns[None, :]


@triton.jit
def inside_matrix(rows, columns, D: tl.constexpr, DV: tl.constexpr):
    return (rows < D)[:, None] & (columns < DV)[None, :]


@triton.jit
def load_matrix(x, rows, columns, D: tl.constexpr, DV: tl.constexpr):
    return tl.load(x + matrix_offsets(rows, columns, DV), mask=inside_matrix(rows, columns, D, DV), other=0.0)


@triton.jit
def store_matrix(x, value, rows, columns, D: tl.constexpr, DV: tl.constexpr):
    tl.store(x + matrix_offsets(rows, columns, DV), value, mask=inside_matrix(rows, columns, D, DV))


@triton.jit
def load_vectors(x, d, D: tl.constexpr, DV: tl.constexpr):
    """The two vectors behind the matrix; 1 past D, so that norms can be divided by."""
    first = tl.load(x + D * DV + d, mask=d < D, other=1.0)
    return first, tl.load(x + D * DV + D + d, mask=d < D, other=1.0)


@triton.jit
def store_vectors(x, first, second, d, D: tl.constexpr, DV: tl.constexpr):
    tl.store(x + D * DV + d, first, mask=d < D)
    tl.store(x + D * DV + D + d, second, mask=d < D)


@triton.jit
def store_row(x, row, matrix, first, second, d, e, D: tl.constexpr, DV: tl.constexpr):
    x = matrix_row(x, row, D, DV)
    store_matrix(x, matrix, d, e, D, DV)
    store_vectors(x, first, second, d, D, DV)


# --- one launch ------------------------------------------------------------------------------------------------


@triton.jit
def load_share(shares, row, d, e, D: tl.constexpr, DV: tl.constexpr):
    """The matrix and both vectors of one share."""
    row = matrix_row(shares, row, D, DV)
    first, second = load_vectors(row, d, D, DV)
    return load_matrix(row, d, e, D, DV), first, second


@triton.jit
def add_few_shares(shares, head, heads, d, e, SPLITS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr):
    """The sums of all shares, always in the same order: matrix and both vectors."""
    matrix, first, second = load_share(shares, head, d, e, D, DV)
    for split in tl.static_range(1, SPLITS):
        more, more_first, more_second = load_share(shares, split * heads + head, d, e, D, DV)
        matrix += more
        first += more_first
        second += more_second
    return matrix, first, second


@triton.jit
def add_shares(shares, step, offsets, wanted, splits, AT_ONCE: tl.constexpr):
    """The sum of the shares [len(offsets)], always in the same order; AT_ONCE of them are read together."""
    total = tl.zeros([offsets.shape[0]], tl.float32)
    for start in range(0, splits, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        some = tl.load(
            shares + split[:, None].to(tl.int64) * step + offsets[None, :],
            mask=(split < splits)[:, None] & wanted[None, :],
            other=0.0,
        )
        total += tl.sum(some, axis=0)
    return total
