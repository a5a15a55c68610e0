"""The Triton kernels of SimA, forward and backward. What launches them is triton_launch.py.

With the folded scale s = gain / (|Q|_1 |K|_1), one number a channel, everything is sums over tokens and small
matrices. W [D, Dv] is the whole state of a head:

    forward     W = diag(s) K^T V                 O = Q W
    backward    A = Q^T dO                        t = rowsum(A * W)          Z = diag(s) A
                dQ = dO W^T - sign(Q) t/|Q|_1     dK = V Z^T - sign(K) t/|K|_1     dV = K Z

A head with few tokens is one program that does all of it (`forward_head`, `backward_head`). With many tokens
every head is split over programs: `outer_products` sums over a share of the tokens, `finish_forward` or
`finish_backward` adds the shares in a fixed order, `apply_forward` or `apply_backward` makes the outputs.
`attend` and `attend_backward` take the products in the other order, (Q diag(s) K^T) V.

No atomics: the same input gives the same bits. Sums and norms are float32. Tensors are read through their
strides, only the channels must lie side by side. Masked tokens are never read: not even a NaN gets out.

Shapes: N query tokens, M key tokens, D channels a head, DV value channels a head; BLOCK_* are powers of two,
lanes past D or DV are masked. `head` is b * H + h.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def is_uneven(width, block):
    return width % block != 0


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b of one type, with float32 sums; PRECISION concerns float32 operands only."""
    if INTERPRETED:  # the interpreter has no bfloat16 products; these are the same, exact in float32
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def raw_product(a, b, PRECISION: tl.constexpr):
    """a @ b of two inputs as they are: tensor cores multiply half precision exactly."""
    return dot(a, b, "tf32" if PRECISION == "bf16" else PRECISION)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b where one factor is a result, which is rounded to the type named by PRECISION.

    float16 takes tf32, which holds a float16 exactly and, unlike it, the range of what is near 1/N^2.
    """
    if PRECISION == "bf16":
        out = dot(a.to(tl.bfloat16), b.to(tl.bfloat16), "tf32")
    else:
        out = dot(a.to(tl.float32), b.to(tl.float32), PRECISION)
    return out


@triton.jit
def waited_for(x):
    """x, a running sum of products, complete before the loop goes on. For a loop that also reads a factor by itself.

    Triton (3.6 to 3.9) lets Hopper's tensor cores work on while the loop fetches the next tiles. A tile that is only a
    factor has one place more in shared memory for that. One that is read by itself too, as k is for its norm, has
    not, and the next one may be written over it while it is still multiplied. An operation on the sum, here an empty
    one that costs nothing, makes the loop wait for it.
    """
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def real_rows(mask, rows, count, MASKED: tl.constexpr):
    """True where a row exists and is not padding."""
    real = rows < count
    if MASKED:
        real = real & (tl.load(mask + rows, mask=real, other=0) != 0)
    return real


@triton.jit
def load_tile(x, rows, real, stride, columns, WIDTH: tl.constexpr):
    """x[rows, columns], zero where a row is not real or a column is past WIDTH."""
    wanted = real[:, None]
    if is_uneven(WIDTH, columns.shape[0]):
        wanted = wanted & (columns < WIDTH)[None, :]
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=wanted, other=0.0)


@triton.jit
def store_tile(x, value, rows, count, stride, columns, WIDTH: tl.constexpr):
    wanted = (rows < count)[:, None]
    if is_uneven(WIDTH, columns.shape[0]):
        wanted = wanted & (columns < WIDTH)[None, :]
    tl.store(x + rows[:, None] * stride + columns[None, :], value.to(x.dtype.element_ty), mask=wanted)


@triton.jit
def partial_l1(x, SUM_ROWS: tl.constexpr):
    """Sums of |x| [BLOCK, W] -> [SUM_ROWS, W]. The rows that are added lie in one thread, so none waits."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.sum(tl.reshape(magnitude, [x.shape[0] // SUM_ROWS, SUM_ROWS, x.shape[1]]), axis=0)


@triton.jit
def folded_scale(norm_q, norm_k, gain, eps):
    return gain / (tl.maximum(norm_q, eps) * tl.maximum(norm_k, eps))


@triton.jit
def load_gain(gain, gains, b, GAIN_BY_IMAGE: tl.constexpr):
    if GAIN_BY_IMAGE:
        gain = tl.load(gains + b)
    return gain


@triton.jit
def sign(x):
    x = x.to(tl.float32)
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def pull_of(t, norm, eps):
    """What the gradient of x is pulled by through its norm: t / |x|_1, nothing where the norm is held at eps."""
    return tl.where(norm >= eps, t / tl.maximum(norm, eps), 0.0)


@triton.jit
def matrix_offsets(rows, columns, DV: tl.constexpr):
    return rows[:, None] * DV + columns[None, :]


@triton.jit
def inside_matrix(rows, columns, D: tl.constexpr, DV: tl.constexpr):
    return (rows < D)[:, None] & (columns < DV)[None, :]


# --- a head in one program -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N", "M", "gain", "eps"])
def forward_head(
    q, k, v, o, state, norms, query_mask, key_mask, gains,
    gain, eps, heads, H, N, M,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SUM_ROWS: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
    GAIN_BY_IMAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = Q W of one head. WHOLE: all tokens fit one tile of BLOCK_N, so q is read once and kept."""
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    o += b * o_b + h * o_h
    query_mask += b * N
    key_mask += b * M

    if WHOLE:
        # k and v first, q last: the other order was clearly slower on an H200.
        real = real_rows(key_mask, n, M, KEY_MASKED)
        k_tile = load_tile(k, n, real, k_n, d, D)
        v_tile = load_tile(v, n, real, v_n, e, DV)
        q_tile = load_tile(q, n, real_rows(query_mask, n, N, QUERY_MASKED), q_n, d, D)
        sum_k, sum_q = partial_l1(k_tile, SUM_ROWS), partial_l1(q_tile, SUM_ROWS)
        kv = raw_product(tl.trans(k_tile), v_tile, PRECISION)  # [BLOCK_D, BLOCK_V]
    else:
        kv = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        sum_q, sum_k = tl.zeros([SUM_ROWS, BLOCK_D], tl.float32), tl.zeros([SUM_ROWS, BLOCK_D], tl.float32)
        for start in tl.range(0, tl.maximum(N, M), BLOCK_N, num_stages=STAGES):
            rows = start + n
            real = real_rows(key_mask, rows, M, KEY_MASKED)
            k_tile = load_tile(k, rows, real, k_n, d, D)
            v_tile = load_tile(v, rows, real, v_n, e, DV)
            q_tile = load_tile(q, rows, real_rows(query_mask, rows, N, QUERY_MASKED), q_n, d, D)
            kv = waited_for(kv + raw_product(tl.trans(k_tile), v_tile, PRECISION))
            sum_k += partial_l1(k_tile, SUM_ROWS)
            sum_q += partial_l1(q_tile, SUM_ROWS)
    norm_k, norm_q = tl.sum(sum_k, axis=0), tl.sum(sum_q, axis=0)

    s = folded_scale(norm_q, norm_k, load_gain(gain, gains, b, GAIN_BY_IMAGE), eps)
    w = kv * s[:, None]  # [BLOCK_D, BLOCK_V]
    if KEEP:
        tl.store(state + head.to(tl.int64) * D * DV + matrix_offsets(d, e, DV), w, mask=inside_matrix(d, e, D, DV))
        tl.store(norms + head * D + d, norm_q, mask=d < D)
        tl.store(norms + (heads + head) * D + d, norm_k, mask=d < D)
    if WHOLE:
        store_tile(o, product(q_tile, w, PRECISION), n, N, o_n, e, DV)
    else:
        for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
            rows = start + n
            real = real_rows(query_mask, rows, N, QUERY_MASKED)
            q_tile = load_tile(q, rows, real, q_n, d, D)
            store_tile(o, product(q_tile, w, PRECISION), rows, N, o_n, e, DV)


@triton.jit(do_not_specialize=["N", "M", "gain", "eps"])
def backward_head(
    q, k, v, do, dq, dk, dv, state, norms, query_mask, key_mask, gains,
    gain, eps, heads, H, N, M,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    dq_b, dq_h, dq_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
    GAIN_BY_IMAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one head. WHOLE: all queries fit one tile, so q and dO are read once."""
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    dq += b * dq_b + h * dq_h
    dk += b * dk_b + h * dk_h
    dv += b * dv_b + h * dv_h
    query_mask += b * N
    key_mask += b * M
    square = inside_matrix(d, e, D, DV)
    w = tl.load(state + head.to(tl.int64) * D * DV + matrix_offsets(d, e, DV), mask=square, other=0.0)
    norm_q = tl.load(norms + head * D + d, mask=d < D, other=1.0)
    norm_k = tl.load(norms + (heads + head) * D + d, mask=d < D, other=1.0)

    if WHOLE:
        real = real_rows(query_mask, n, N, QUERY_MASKED)
        q_tile = load_tile(q, n, real, q_n, d, D)
        do_tile = load_tile(do, n, real, do_n, e, DV)
        a = raw_product(tl.trans(q_tile), do_tile, PRECISION)
    else:
        a = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        for start in range(0, N, BLOCK_N):
            rows = start + n
            real = real_rows(query_mask, rows, N, QUERY_MASKED)
            q_tile = load_tile(q, rows, real, q_n, d, D)
            do_tile = load_tile(do, rows, real, do_n, e, DV)
            a += raw_product(tl.trans(q_tile), do_tile, PRECISION)

    t = tl.sum(a * w, axis=1)  # [BLOCK_D]
    pull_q = pull_of(t, norm_q, eps)
    pull_k = pull_of(t, norm_k, eps)
    z = a * folded_scale(norm_q, norm_k, load_gain(gain, gains, b, GAIN_BY_IMAGE), eps)[:, None]
    if WHOLE:
        store_tile(dq, product(do_tile, tl.trans(w), PRECISION) - sign(q_tile) * pull_q[None, :], n, N, dq_n, d, D)
    else:
        for start in range(0, N, BLOCK_N):
            rows = start + n
            real = real_rows(query_mask, rows, N, QUERY_MASKED)
            q_tile = load_tile(q, rows, real, q_n, d, D)
            do_tile = load_tile(do, rows, real, do_n, e, DV)
            grad = product(do_tile, tl.trans(w), PRECISION) - sign(q_tile) * pull_q[None, :]
            store_tile(dq, grad, rows, N, dq_n, d, D)
    for start in range(0, M, BLOCK_N):
        rows = start + n
        real = real_rows(key_mask, rows, M, KEY_MASKED)
        k_tile = load_tile(k, rows, real, k_n, d, D)
        v_tile = load_tile(v, rows, real, v_n, e, DV)
        store_tile(dv, product(k_tile, z, PRECISION), rows, M, dv_n, e, DV)
        grad = product(v_tile, tl.trans(z), PRECISION) - sign(k_tile) * pull_k[None, :]
        store_tile(dk, grad, rows, M, dk_n, d, D)


# --- a head split over programs --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows_x", "rows_z", "splits"])
def outer_products(
    x, y, z, shares, norm_shares, x_mask, z_mask, heads, H, rows_x, rows_z, splits,
    x_b, x_h, x_n, y_b, y_h, y_n, z_b, z_h, z_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SUM_ROWS: tl.constexpr, STAGES: tl.constexpr, NORMS: tl.constexpr, X_MASKED: tl.constexpr, Z_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One share of X^T Y [D, DV], summed over its part of the tokens; with NORMS of |X|_1 and |Z|_1 too."""
    head, split, part_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (head // H).to(tl.int64), head % H
    d, e = tl.arange(0, BLOCK_D), part_v * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    x += b * x_b + h * x_h
    y += b * y_b + h * y_h
    z += b * z_b + h * z_h
    x_mask += b * rows_x
    z_mask += b * rows_z
    xy = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
    sum_x = tl.zeros([SUM_ROWS, BLOCK_D], tl.float32)
    sum_z = tl.zeros([SUM_ROWS, BLOCK_D], tl.float32)
    rows_of_both = tl.maximum(rows_x, rows_z) if NORMS else rows_x
    tiles = tl.cdiv(tl.cdiv(rows_of_both, BLOCK_N), splits)
    for tile in tl.range(split * tiles, (split + 1) * tiles, num_stages=STAGES):
        rows = tile * BLOCK_N + n
        real = real_rows(x_mask, rows, rows_x, X_MASKED)
        x_tile = load_tile(x, rows, real, x_n, d, D)
        y_tile = load_tile(y, rows, real, y_n, e, DV)
        xy += raw_product(tl.trans(x_tile), y_tile, PRECISION)
        if NORMS:
            xy = waited_for(xy)
            z_tile = load_tile(z, rows, real_rows(z_mask, rows, rows_z, Z_MASKED), z_n, d, D)
            sum_x += partial_l1(x_tile, SUM_ROWS)
            sum_z += partial_l1(z_tile, SUM_ROWS)
    share = (split * heads + head).to(tl.int64)
    tl.store(shares + share * D * DV + matrix_offsets(d, e, DV), xy, mask=inside_matrix(d, e, D, DV))
    if NORMS and part_v == 0:
        tl.store(norm_shares + share * 2 * D + d, tl.sum(sum_z, axis=0), mask=d < D)
        tl.store(norm_shares + share * 2 * D + D + d, tl.sum(sum_x, axis=0), mask=d < D)


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


@triton.jit(do_not_specialize=["gain", "eps", "splits"])
def finish_forward(
    shares, norm_shares, state, norms, gains, gain, eps, heads, H, splits,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, AT_ONCE: tl.constexpr,
    GAIN_BY_IMAGE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of W = diag(s) K^T V, and their norms."""
    head = tl.program_id(0)
    d, e = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
    norm_q = add_shares(norm_shares + head * 2 * D, heads * 2 * D, d, d < D, splits, AT_ONCE)
    norm_k = add_shares(norm_shares + head * 2 * D + D, heads * 2 * D, d, d < D, splits, AT_ONCE)
    s = folded_scale(norm_q, norm_k, load_gain(gain, gains, head // H, GAIN_BY_IMAGE), eps)
    matrix, offsets, inside = head.to(tl.int64) * D * DV, matrix_offsets(d, e, DV), inside_matrix(d, e, D, DV)
    kv = add_shares(shares + matrix, heads * D * DV, tl.ravel(offsets), tl.ravel(inside), splits, AT_ONCE)
    tl.store(state + matrix + offsets, tl.reshape(kv, [ROWS, BLOCK_V]) * s[:, None], mask=inside)
    tl.store(norms + head * D + d, norm_q, mask=d < D)
    tl.store(norms + (heads + head) * D + d, norm_k, mask=d < D)


@triton.jit(do_not_specialize=["N", "tiles"])
def apply_forward(
    q, o, state, query_mask, H, N, tiles, q_b, q_h, q_n, o_b, o_h, o_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    QUERY_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = Q W for so many tiles of tokens."""
    head, part_v = tl.program_id(0), tl.program_id(2)
    # From the last token backwards: what was read last is what the cache still holds.
    group = tl.num_programs(1) - 1 - tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    d, e = tl.arange(0, BLOCK_D), part_v * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    q += b * q_b + h * q_h
    o += b * o_b + h * o_h
    query_mask += b * N
    inside = inside_matrix(d, e, D, DV)
    w = tl.load(state + head.to(tl.int64) * D * DV + matrix_offsets(d, e, DV), mask=inside, other=0.0)
    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(N, BLOCK_N))):
        rows = tile * BLOCK_N + n
        real = real_rows(query_mask, rows, N, QUERY_MASKED)
        q_tile = load_tile(q, rows, real, q_n, d, D)
        store_tile(o, product(q_tile, w, PRECISION), rows, N, o_n, e, DV)


@triton.jit(do_not_specialize=["gain", "eps", "splits"])
def finish_backward(
    shares, state, norms, z, pulls, gains, gain, eps, heads, H, splits,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, AT_ONCE: tl.constexpr,
    GAIN_BY_IMAGE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of Z = diag(s) A, and their t/|Q|_1 and t/|K|_1, 0 where the norm is below eps."""
    head = tl.program_id(0)
    d, e = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
    norm_q = tl.load(norms + head * D + d, mask=d < D, other=1.0)
    norm_k = tl.load(norms + (heads + head) * D + d, mask=d < D, other=1.0)
    s = folded_scale(norm_q, norm_k, load_gain(gain, gains, head // H, GAIN_BY_IMAGE), eps)
    matrix, offsets, inside = head.to(tl.int64) * D * DV, matrix_offsets(d, e, DV), inside_matrix(d, e, D, DV)
    a = add_shares(shares + matrix, heads * D * DV, tl.ravel(offsets), tl.ravel(inside), splits, AT_ONCE)
    a = tl.reshape(a, [ROWS, BLOCK_V])
    t = tl.sum(a * tl.load(state + matrix + offsets, mask=inside, other=0.0), axis=1)
    tl.store(z + matrix + offsets, a * s[:, None], mask=inside)
    tl.store(pulls + head * D + d, pull_of(t, norm_q, eps), mask=d < D)
    tl.store(pulls + (heads + head) * D + d, pull_of(t, norm_k, eps), mask=d < D)


@triton.jit
def grad_of_normalised(x, y, dx, m, pulls, rows, real, count, x_n, y_n, dx_n, d, e,
                       D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dX = Y m^T - sign(X) pull for the columns d: dQ of (q, dO, W), dK of (k, v, Z)."""
    y_tile = load_tile(y, rows, real, y_n, e, DV)
    x_tile = load_tile(x, rows, real, x_n, d, D)
    pull = tl.load(pulls + d, mask=d < D, other=0.0)
    grad = product(y_tile, tl.trans(m), PRECISION) - sign(x_tile) * pull[None, :]
    store_tile(dx, grad, rows, count, dx_n, d, D)


@triton.jit(do_not_specialize=["N", "M", "tiles"])
def apply_backward(
    q, k, v, do, dq, dk, dv, state, z, pulls, query_mask, key_mask, heads, H, N, M, tiles,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    dq_b, dq_h, dq_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of dQ, dK and dV for so many tiles of tokens."""
    head, part = tl.program_id(0), tl.program_id(2)
    group = tl.num_programs(1) - 1 - tl.program_id(1)  # backwards, as in apply_forward
    b, h = (head // H).to(tl.int64), head % H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    c = part * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    dq += b * dq_b + h * dq_h
    dk += b * dk_b + h * dk_h
    dv += b * dv_b + h * dv_h
    query_mask += b * N
    key_mask += b * M
    matrix = head.to(tl.int64) * D * DV
    pulls_q, pulls_k = pulls + head * D, pulls + (heads + head) * D

    some_rows = inside_matrix(c, e, D, DV)
    w_rows = tl.load(state + matrix + matrix_offsets(c, e, DV), mask=some_rows, other=0.0)
    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(N, BLOCK_N))):
        rows = tile * BLOCK_N + n
        real = real_rows(query_mask, rows, N, QUERY_MASKED)
        grad_of_normalised(q, do, dq, w_rows, pulls_q, rows, real, N, q_n, do_n, dq_n, c, e, D, DV, PRECISION)
    z_rows = tl.load(z + matrix + matrix_offsets(c, e, DV), mask=some_rows, other=0.0)
    z_columns = tl.load(z + matrix + matrix_offsets(d, c, DV), mask=inside_matrix(d, c, D, DV), other=0.0)
    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(M, BLOCK_N))):
        rows = tile * BLOCK_N + n
        real = real_rows(key_mask, rows, M, KEY_MASKED)
        grad_of_normalised(k, v, dk, z_rows, pulls_k, rows, real, M, k_n, v_n, dk_n, c, e, D, DV, PRECISION)
        k_tile = load_tile(k, rows, real, k_n, d, D)
        store_tile(dv, product(k_tile, z_columns, PRECISION), rows, M, dv_n, c, DV)


# --- the other order: (Q diag(s) K^T) V ------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N", "M"])
def token_norms(
    q, k, norms, query_mask, key_mask, heads, H, N, M, q_b, q_h, q_n, k_b, k_h, k_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SUM_ROWS: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
):  # fmt: skip
    """|Q|_1 and |K|_1 of one head."""
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    query_mask += b * N
    key_mask += b * M
    sum_q = tl.zeros([SUM_ROWS, BLOCK_D], tl.float32)
    sum_k = tl.zeros([SUM_ROWS, BLOCK_D], tl.float32)
    for start in range(0, N, BLOCK_N):
        real = real_rows(query_mask, start + n, N, QUERY_MASKED)
        sum_q += partial_l1(load_tile(q, start + n, real, q_n, d, D), SUM_ROWS)
    for start in range(0, M, BLOCK_N):
        real = real_rows(key_mask, start + n, M, KEY_MASKED)
        sum_k += partial_l1(load_tile(k, start + n, real, k_n, d, D), SUM_ROWS)
    tl.store(norms + head * D + d, tl.sum(sum_q, axis=0), mask=d < D)
    tl.store(norms + (heads + head) * D + d, tl.sum(sum_k, axis=0), mask=d < D)


@triton.jit(do_not_specialize=["N", "M", "gain", "eps"])
def attend(
    q, k, v, o, norms, query_mask, key_mask, gains,
    gain, eps, heads, H, N, M,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    WHOLE: tl.constexpr, KEEP: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
    GAIN_BY_IMAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = (Q diag(s) K^T) V for one tile of queries. WHOLE: all tokens fit one tile, and the norms are made here."""
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    rows, m = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    o += b * o_b + h * o_h
    query_mask += b * N
    key_mask += b * M
    q_tile = load_tile(q, rows, real_rows(query_mask, rows, N, QUERY_MASKED), q_n, d, D)
    gain = load_gain(gain, gains, b, GAIN_BY_IMAGE)
    if WHOLE:
        real = real_rows(key_mask, m, M, KEY_MASKED)
        k_tile = load_tile(k, m, real, k_n, d, D)
        v_tile = load_tile(v, m, real, v_n, e, DV)
        norm_q, norm_k = tl.sum(tl.abs(q_tile.to(tl.float32)), axis=0), tl.sum(tl.abs(k_tile.to(tl.float32)), axis=0)
        if KEEP:
            tl.store(norms + head * D + d, norm_q, mask=d < D)
            tl.store(norms + (heads + head) * D + d, norm_k, mask=d < D)
        scaled = q_tile * folded_scale(norm_q, norm_k, gain, eps)[None, :]
        weights = product(scaled, tl.trans(k_tile), PRECISION)
        out = product(weights, v_tile, PRECISION)
    else:
        norm_q = tl.load(norms + head * D + d, mask=d < D, other=1.0)
        norm_k = tl.load(norms + (heads + head) * D + d, mask=d < D, other=1.0)
        scaled = q_tile * folded_scale(norm_q, norm_k, gain, eps)[None, :]
        out = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        for start in range(0, M, BLOCK_M):
            real = real_rows(key_mask, start + m, M, KEY_MASKED)
            k_tile = load_tile(k, start + m, real, k_n, d, D)
            v_tile = load_tile(v, start + m, real, v_n, e, DV)
            weights = product(scaled, tl.trans(k_tile), PRECISION)
            out += product(weights, v_tile, PRECISION)
    store_tile(o, out, rows, N, o_n, e, DV)


@triton.jit(do_not_specialize=["N", "M", "gain", "eps"])
def attend_backward(
    q, k, v, do, dq, dk, dv, norms, query_mask, key_mask, gains,
    gain, eps, heads, H, N, M,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n,
    dq_b, dq_h, dq_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr, GAIN_BY_IMAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of a head whose tokens all fit one tile, through P = Q diag(s) K^T and dP = dO V^T."""
    head = tl.program_id(0)
    b, h = (head // H).to(tl.int64), head % H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    n, m = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    do += b * do_b + h * do_h
    dq += b * dq_b + h * dq_h
    dk += b * dk_b + h * dk_h
    dv += b * dv_b + h * dv_h
    q_real = real_rows(query_mask + b * N, n, N, QUERY_MASKED)
    k_real = real_rows(key_mask + b * M, m, M, KEY_MASKED)
    q_tile, do_tile = load_tile(q, n, q_real, q_n, d, D), load_tile(do, n, q_real, do_n, e, DV)
    k_tile, v_tile = load_tile(k, m, k_real, k_n, d, D), load_tile(v, m, k_real, v_n, e, DV)
    norm_q = tl.load(norms + head * D + d, mask=d < D, other=1.0)
    norm_k = tl.load(norms + (heads + head) * D + d, mask=d < D, other=1.0)
    s = folded_scale(norm_q, norm_k, load_gain(gain, gains, b, GAIN_BY_IMAGE), eps)
    scaled = q_tile * s[None, :]
    weights = product(scaled, tl.trans(k_tile), PRECISION)  # P [BLOCK_N, BLOCK_M]
    grad_weights = raw_product(do_tile, tl.trans(v_tile), PRECISION)  # dP [BLOCK_N, BLOCK_M]
    store_tile(dv, product(tl.trans(weights), do_tile, PRECISION), m, M, dv_n, e, DV)
    grad_q = product(grad_weights, k_tile, PRECISION) * s[None, :]
    t = tl.sum(grad_q * q_tile, axis=0)
    pull_q = pull_of(t, norm_q, eps)
    pull_k = pull_of(t, norm_k, eps)
    store_tile(dq, grad_q - sign(q_tile) * pull_q[None, :], n, N, dq_n, d, D)
    grad_k = product(tl.trans(grad_weights), scaled, PRECISION) - sign(k_tile) * pull_k[None, :]
    store_tile(dk, grad_k, m, M, dk_n, d, D)
