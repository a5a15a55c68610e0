"""The Triton kernels of SimA, forward and backward, and the forward of relu2; triton_launch.py launches them.

With the folded scale s = gain / (|Q|_1 |K|_1), one number per channel, everything is sums over tokens and small
matrices. W [D, DV] is the whole state of a head:

    forward     W = diag(s) K^T V                 O = Q W
    backward    A = Q^T dO                        t = rowsum(A * W)          Z = diag(s) A
                dQ = dO W^T - sign(Q) t/|Q|_1     dK = V Z^T - sign(K) t/|K|_1     dV = K Z

With few tokens there is one launch (`forward_head`, `backward_head`). Where heads are too few to fill the chip, several
programs share the outputs of a head in the forward. With many tokens the sums are split as well: `outer_products` sums
over a share of the tokens, `apply_forward` or `apply_backward` adds the shares and computes the outputs. Where a head
has many shares, `finish_forward` or `finish_backward` adds them first, so that they are read once. `attend` and
`attend_backward` compute the "qk" order, (Q diag(s) K^T) V, for heads whose tokens fit one tile.

No atomics: the same input gives the same bits. Sums and norms are float32. Inputs are read through their strides,
only the channels must be contiguous; outputs are [batch, tokens, heads, channels] with a stride per token. Masked
tokens are never read, so not even a NaN among them reaches the output. k and v are None where they lie in one packed
tensor with q; masks, gains and the state may be None.

Three buffers share one layout, a row of D * DV + 2 D float32 numbers per head (`matrix_row`):

    shares   K^T V, |Q|_1, |K|_1 of a share of the tokens (backward: A and unused space)
    state    W, |Q|_1, |K|_1, kept for the backward (without W in the "qk" order)
    sums     Z, t/|Q|_1, t/|K|_1

The forward kernels of the "kv" order also compute relu2 (KIND), whose rows are normalized in place of its channels,
with Q' = phi(Q), K' = phi(K), phi(x) = relu(x)^2 / sqrt(D); triton_relu2_kernels.py has the backward:

    W = K'^T V        z = |K'|_1 in place of |K|_1        O = Q' W / max(Q' z, eps)        |Q|_1 is not used

Shapes: N query tokens, M key tokens, D channels per head, DV value channels per head; BLOCK_* are powers of two,
lanes past D or DV are masked. `head` is b * H + h.
"""

import triton
import triton.language as tl

from sima_attn.ops.triton_parts import (
    add_few_shares,
    add_shares,
    as_float32,
    at_head,
    backward_sums,
    features,
    grads_at_head,
    head_matrix,
    inputs_at_head,
    inside_matrix,
    key_products,
    larger,
    load_gain,
    load_matrix,
    load_pair,
    load_tile,
    load_vectors,
    matrix_offsets,
    matrix_row,
    norm_gradient,
    output_at_head,
    output_tile,
    partial_l1,
    product,
    raw_product,
    real_rows,
    scaled_columns,
    sign,
    store_matrix,
    store_row,
    store_tile,
    store_vectors,
    wait_for,
)


@triton.jit(do_not_specialize=["N", "M", "tiles", "gain", "eps"])
def forward_head(
    q, k, v, o, state, query_mask, key_mask, gains,
    k_offset, v_offset, gain, eps, H, N, M, tiles, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SUM_ROWS: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of O = Q W for `tiles` tiles of tokens. WHOLE: all tokens fit one tile, q is read once and kept.

    Each program of a head computes W from all tokens by itself: while few programs run, reading them again from the
    cache takes less time than a second launch.
    """
    gain, eps = as_float32(gain, eps)
    head, group, part_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = head // H
    d, e = tl.arange(0, BLOCK_D), part_v * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    q, k, v = inputs_at_head(q, k, v, k_offset, v_offset, head, H, q_b, q_h, k_b, k_h, v_b, v_h)
    o = output_at_head(o, head, H, N, DV, o_n)

    if WHOLE:
        # k and v first, q last: the other order was clearly slower on an H200.
        k_tile, v_tile = load_pair(k, v, key_mask, b, n, M, k_n, v_n, d, e, D, DV)
        q_tile = features(load_tile(q, n, real_rows(query_mask, b, n, N), q_n, d, D), KIND, D)
        k_tile = features(k_tile, KIND, D)
        sum_k, sum_q = partial_l1(k_tile, SUM_ROWS), partial_l1(q_tile, SUM_ROWS)
        kv = key_products(k_tile, v_tile, KIND, PRECISION)  # [BLOCK_D, BLOCK_V]
    else:
        kv = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        sum_q, sum_k = tl.zeros([SUM_ROWS, BLOCK_D], tl.float32), tl.zeros([SUM_ROWS, BLOCK_D], tl.float32)
        for start in tl.range(0, tl.maximum(N, M), BLOCK_N, num_stages=STAGES):
            rows = start + n
            k_tile, v_tile = load_pair(k, v, key_mask, b, rows, M, k_n, v_n, d, e, D, DV)
            k_tile = features(k_tile, KIND, D)
            if KIND == "sima":
                q_tile = load_tile(q, rows, real_rows(query_mask, b, rows, N), q_n, d, D)
            kv = wait_for(kv + key_products(k_tile, v_tile, KIND, PRECISION))
            sum_k += partial_l1(k_tile, SUM_ROWS)
            if KIND == "sima":
                sum_q += partial_l1(q_tile, SUM_ROWS)
    norm_k, norm_q = tl.sum(sum_k, axis=0), tl.sum(sum_q, axis=0)

    w = head_matrix(kv, norm_q, norm_k, gain, gains, b, eps, KIND)  # [BLOCK_D, BLOCK_V]
    if KEEP and group == 0:
        store_row(state, head, w, norm_q, norm_k, d, e, D, DV)
    if WHOLE:
        store_tile(o, output_tile(q_tile, w, norm_k, eps, KIND, PRECISION), n, N, o_n, e, DV)
    else:
        last = tl.minimum((group + 1) * tiles, tl.cdiv(N, BLOCK_N))
        for tile in tl.range(group * tiles, last, num_stages=STAGES):
            rows = tile * BLOCK_N + n
            real = real_rows(query_mask, b, rows, N)
            q_tile = features(load_tile(q, rows, real, q_n, d, D), KIND, D)
            store_tile(o, output_tile(q_tile, w, norm_k, eps, KIND, PRECISION), rows, N, o_n, e, DV)


@triton.jit(do_not_specialize=["N", "M", "gain", "eps"])
def backward_head(
    q, k, v, do, grads, state, query_mask, key_mask, gains,
    k_offset, v_offset, dk_offset, dv_offset, gain, eps, H, N, M,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dq_n, dk_n, dv_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of one head. WHOLE: all queries fit one tile, so q and dO are read once."""
    gain, eps = as_float32(gain, eps)
    head = tl.program_id(0)
    b = head // H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    q, k, v = inputs_at_head(q, k, v, k_offset, v_offset, head, H, q_b, q_h, k_b, k_h, v_b, v_h)
    do = at_head(do, do, 0, head, H, do_b, do_h)
    dq, dk, dv = grads_at_head(grads, dk_offset, dv_offset, head, H, N, M, D, DV, dq_n, dk_n, dv_n)
    row = matrix_row(state, head, D, DV)
    w = load_matrix(row, d, e, D, DV)
    norm_q, norm_k = load_vectors(row, d, D, DV)

    if WHOLE:
        q_tile, do_tile = load_pair(q, do, query_mask, b, n, N, q_n, do_n, d, e, D, DV)
        a = raw_product(tl.trans(q_tile), do_tile, PRECISION)
    else:
        a = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
        for start in range(0, N, BLOCK_N):
            rows = start + n
            q_tile, do_tile = load_pair(q, do, query_mask, b, rows, N, q_n, do_n, d, e, D, DV)
            a += raw_product(tl.trans(q_tile), do_tile, PRECISION)

    z, slope_q, slope_k = backward_sums(a, w, norm_q, norm_k, gain, gains, b, eps)
    if WHOLE:
        store_tile(dq, product(do_tile, tl.trans(w), PRECISION) - sign(q_tile) * slope_q[None, :], n, N, dq_n, d, D)
    else:
        for start in range(0, N, BLOCK_N):
            rows = start + n
            q_tile, do_tile = load_pair(q, do, query_mask, b, rows, N, q_n, do_n, d, e, D, DV)
            grad = product(do_tile, tl.trans(w), PRECISION) - sign(q_tile) * slope_q[None, :]
            store_tile(dq, grad, rows, N, dq_n, d, D)
    for start in range(0, M, BLOCK_N):
        rows = start + n
        k_tile, v_tile = load_pair(k, v, key_mask, b, rows, M, k_n, v_n, d, e, D, DV)
        store_tile(dv, product(k_tile, z, PRECISION), rows, M, dv_n, e, DV)
        grad = product(v_tile, tl.trans(z), PRECISION) - sign(k_tile) * slope_k[None, :]
        store_tile(dk, grad, rows, M, dk_n, d, D)


# --- a head split over programs --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows_x", "rows_z", "splits"])
def outer_products(
    x, y, z, shares, x_mask, z_mask,
    x_offset, y_offset, heads, H, rows_x, rows_z, splits, x_b, x_h, x_n, y_b, y_h, y_n, z_b, z_h, z_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SUM_ROWS: tl.constexpr, STAGES: tl.constexpr, NORMS: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One share of X^T Y [D, DV], summed over its part of the tokens; with NORMS of |Z|_1 and |X|_1 too.

    For relu2, X is phi(x), and |Z|_1 stays zero.
    """
    head, split, part_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = head // H
    d, e = tl.arange(0, BLOCK_D), part_v * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    y = at_head(y, x, y_offset, head, H, y_b, y_h)
    z = at_head(z, x, 0, head, H, z_b, z_h)
    x = at_head(x, x, x_offset, head, H, x_b, x_h)
    xy = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
    sum_x = tl.zeros([SUM_ROWS, BLOCK_D], tl.float32)
    sum_z = tl.zeros([SUM_ROWS, BLOCK_D], tl.float32)
    rows_of_both = tl.maximum(rows_x, rows_z) if NORMS and KIND == "sima" else rows_x
    tiles = tl.cdiv(tl.cdiv(rows_of_both, BLOCK_N), splits)
    for tile in tl.range(split * tiles, (split + 1) * tiles, num_stages=STAGES):
        rows = tile * BLOCK_N + n
        x_tile, y_tile = load_pair(x, y, x_mask, b, rows, rows_x, x_n, y_n, d, e, D, DV)
        x_tile = features(x_tile, KIND, D)
        xy += key_products(x_tile, y_tile, KIND, PRECISION)
        if NORMS:
            xy = wait_for(xy)
            sum_x += partial_l1(x_tile, SUM_ROWS)
            if KIND == "sima":
                z_tile = load_tile(z, rows, real_rows(z_mask, b, rows, rows_z), z_n, d, D)
                sum_z += partial_l1(z_tile, SUM_ROWS)
    row = matrix_row(shares, split * heads + head, D, DV)
    store_matrix(row, xy, d, e, D, DV)
    if NORMS and part_v == 0:
        store_vectors(row, tl.sum(sum_z, axis=0), tl.sum(sum_x, axis=0), d, D, DV)


@triton.jit(do_not_specialize=["gain", "eps", "splits"])
def finish_forward(
    shares, state, gains, gain, eps, heads, H, splits,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, AT_ONCE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """ROWS rows of W = diag(s) K^T V, and their norms. For relu2 the sums of the shares, without a scale."""
    gain, eps = as_float32(gain, eps)
    head = tl.program_id(0)
    d, e = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
    first, step = matrix_row(shares, head, D, DV), heads * (D * DV + 2 * D)
    norm_q = add_shares(first + D * DV, step, d, d < D, splits, AT_ONCE)
    norm_k = add_shares(first + D * DV + D, step, d, d < D, splits, AT_ONCE)
    offsets, inside = tl.ravel(matrix_offsets(d, e, DV)), tl.ravel(inside_matrix(d, e, D, DV))
    kv = tl.reshape(add_shares(first, step, offsets, inside, splits, AT_ONCE), [ROWS, BLOCK_V])
    w = head_matrix(kv, norm_q, norm_k, gain, gains, head // H, eps, KIND)
    store_row(state, head, w, norm_q, norm_k, d, e, D, DV)


@triton.jit(do_not_specialize=["N", "tiles", "gain", "eps"])
def apply_forward(
    q, o, shares, state, query_mask, gains, gain, eps, heads, H, N, tiles, q_b, q_h, q_n, o_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """O = Q W for `tiles` tiles of tokens. SPLITS: add that many shares first; 0: W is in `state` already."""
    gain, eps = as_float32(gain, eps)
    head, part_v = tl.program_id(0), tl.program_id(2)
    # From the last token backwards: the cache still holds the tokens that were read last.
    group = tl.num_programs(1) - 1 - tl.program_id(1)
    d, e = tl.arange(0, BLOCK_D), part_v * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    q = at_head(q, q, 0, head, H, q_b, q_h)
    o = output_at_head(o, head, H, N, DV, o_n)
    b = head // H
    if SPLITS > 0:
        kv, norm_q, norm_k = add_few_shares(shares, head, heads, d, e, SPLITS, D, DV)
        w = head_matrix(kv, norm_q, norm_k, gain, gains, b, eps, KIND)
        if KEEP and group == 0:
            store_row(state, head, w, norm_q, norm_k, d, e, D, DV)
    else:
        row = matrix_row(state, head, D, DV)
        w = load_matrix(row, d, e, D, DV)
        _, norm_k = load_vectors(row, d, D, DV)
    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(N, BLOCK_N))):
        rows = tile * BLOCK_N + n
        real = real_rows(query_mask, b, rows, N)
        q_tile = features(load_tile(q, rows, real, q_n, d, D), KIND, D)
        store_tile(o, output_tile(q_tile, w, norm_k, eps, KIND, PRECISION), rows, N, o_n, e, DV)


@triton.jit(do_not_specialize=["gain", "eps", "splits"])
def finish_backward(
    shares, state, sums, gains, gain, eps, heads, H, splits,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of Z = diag(s) A, and their t/|Q|_1 and t/|K|_1, 0 where the norm is below eps."""
    gain, eps = as_float32(gain, eps)
    head = tl.program_id(0)
    d, e = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_V)
    first, step = matrix_row(shares, head, D, DV), heads * (D * DV + 2 * D)
    offsets, inside = tl.ravel(matrix_offsets(d, e, DV)), tl.ravel(inside_matrix(d, e, D, DV))
    a = tl.reshape(add_shares(first, step, offsets, inside, splits, AT_ONCE), [ROWS, BLOCK_V])
    kept = matrix_row(state, head, D, DV)
    norm_q, norm_k = load_vectors(kept, d, D, DV)
    w = load_matrix(kept, d, e, D, DV)
    z, slope_q, slope_k = backward_sums(a, w, norm_q, norm_k, gain, gains, head // H, eps)
    store_row(sums, head, z, slope_q, slope_k, d, e, D, DV)


@triton.jit
def store_input_grad(x, y, dx, m, slope, rows, real, count, x_n, y_n, dx_n, d, e,
                       D: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dX = Y m^T - sign(X) slope for the columns d: dQ of (q, dO, W), dK of (k, v, Z)."""
    y_tile = load_tile(y, rows, real, y_n, e, DV)
    x_tile = load_tile(x, rows, real, x_n, d, D, larger(D, DV))
    grad = product(y_tile, tl.trans(m), PRECISION) - sign(x_tile) * slope[None, :]
    store_tile(dx, grad, rows, count, dx_n, d, D, larger(D, DV))


@triton.jit(do_not_specialize=["N", "M", "tiles", "gain", "eps"])
def apply_backward(
    q, k, v, do, grads, shares, state, sums, query_mask, key_mask, gains,
    k_offset, v_offset, dk_offset, dv_offset, gain, eps, heads, H, N, M, tiles,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dq_n, dk_n, dv_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of dQ, dK and dV for `tiles` tiles of tokens.

    SPLITS: add that many shares of A first, which needs BLOCK_C = BLOCK_D = BLOCK_V; 0: Z is in `sums` already.
    """
    gain, eps = as_float32(gain, eps)
    head, part = tl.program_id(0), tl.program_id(2)
    group = tl.num_programs(1) - 1 - tl.program_id(1)  # backwards, as in apply_forward
    b = head // H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    c = part * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    q, k, v = inputs_at_head(q, k, v, k_offset, v_offset, head, H, q_b, q_h, k_b, k_h, v_b, v_h)
    do = at_head(do, do, 0, head, H, do_b, do_h)
    dq, dk, dv = grads_at_head(grads, dk_offset, dv_offset, head, H, N, M, D, DV, dq_n, dk_n, dv_n)
    kept = matrix_row(state, head, D, DV)

    w_rows = load_matrix(kept, c, e, D, DV)
    if SPLITS > 0:
        a, _, _ = add_few_shares(shares, head, heads, c, e, SPLITS, D, DV)
        norm_q, norm_k = load_vectors(kept, c, D, DV)
        z_rows, slope_q, slope_k = backward_sums(a, w_rows, norm_q, norm_k, gain, gains, b, eps)
        z_columns = z_rows
    else:
        row = matrix_row(sums, head, D, DV)
        slope_q, slope_k = load_vectors(row, c, D, DV)
        z_rows = load_matrix(row, c, e, D, DV)
        z_columns = load_matrix(row, d, c, D, DV)
    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(N, BLOCK_N))):
        rows = tile * BLOCK_N + n
        real = real_rows(query_mask, b, rows, N)
        store_input_grad(q, do, dq, w_rows, slope_q, rows, real, N, q_n, do_n, dq_n, c, e, D, DV, PRECISION)
    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(M, BLOCK_N))):
        rows = tile * BLOCK_N + n
        real = real_rows(key_mask, b, rows, M)
        store_input_grad(k, v, dk, z_rows, slope_k, rows, real, M, k_n, v_n, dk_n, c, e, D, DV, PRECISION)
        k_tile = load_tile(k, rows, real, k_n, d, D)
        store_tile(dv, product(k_tile, z_columns, PRECISION), rows, M, dv_n, c, DV, larger(D, DV))


# --- the "qk" order: (Q diag(s) K^T) V ------------------------------------------------------------------------


@triton.jit(do_not_specialize=["N", "M", "gain", "eps"])
def attend(
    q, k, v, o, state, query_mask, key_mask, gains,
    k_offset, v_offset, gain, eps, H, N, M, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """O = (Q diag(s) K^T) V of a head whose tokens all fit one tile. KEEP: `state` gets the norms, without a matrix."""
    gain, eps = as_float32(gain, eps)
    head = tl.program_id(0)
    b = head // H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    n, m = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    q, k, v = inputs_at_head(q, k, v, k_offset, v_offset, head, H, q_b, q_h, k_b, k_h, v_b, v_h)
    o = output_at_head(o, head, H, N, DV, o_n)
    q_tile = load_tile(q, n, real_rows(query_mask, b, n, N), q_n, d, D)
    k_tile, v_tile = load_pair(k, v, key_mask, b, m, M, k_n, v_n, d, e, D, DV)
    norm_q, norm_k = tl.sum(tl.abs(q_tile.to(tl.float32)), axis=0), tl.sum(tl.abs(k_tile.to(tl.float32)), axis=0)
    if KEEP:
        store_vectors(matrix_row(state, head, D, 0), norm_q, norm_k, d, D, 0)
    scaled = scaled_columns(q_tile, norm_q, norm_k, load_gain(gain, gains, b), eps)
    weights = product(scaled, tl.trans(k_tile), PRECISION)
    store_tile(o, product(weights, v_tile, PRECISION), n, N, o_n, e, DV)


@triton.jit(do_not_specialize=["N", "M", "gain", "eps"])
def attend_backward(
    q, k, v, do, grads, state, query_mask, key_mask, gains,
    k_offset, v_offset, dk_offset, dv_offset, gain, eps, H, N, M,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dq_n, dk_n, dv_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of a head whose tokens all fit one tile, through P = Q diag(s) K^T and dP = dO V^T."""
    gain, eps = as_float32(gain, eps)
    head = tl.program_id(0)
    b = head // H
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    n, m = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    q, k, v = inputs_at_head(q, k, v, k_offset, v_offset, head, H, q_b, q_h, k_b, k_h, v_b, v_h)
    do = at_head(do, do, 0, head, H, do_b, do_h)
    dq, dk, dv = grads_at_head(grads, dk_offset, dv_offset, head, H, N, M, D, DV, dq_n, dk_n, dv_n)
    q_tile, do_tile = load_pair(q, do, query_mask, b, n, N, q_n, do_n, d, e, D, DV)
    k_tile, v_tile = load_pair(k, v, key_mask, b, m, M, k_n, v_n, d, e, D, DV)
    norm_q, norm_k = load_vectors(matrix_row(state, head, D, 0), d, D, 0)
    gain = load_gain(gain, gains, b)
    scaled = scaled_columns(q_tile, norm_q, norm_k, gain, eps)
    weights = product(scaled, tl.trans(k_tile), PRECISION)  # P [BLOCK_N, BLOCK_M]
    grad_weights = raw_product(do_tile, tl.trans(v_tile), PRECISION)  # dP [BLOCK_N, BLOCK_M]
    store_tile(dv, product(tl.trans(weights), do_tile, PRECISION), m, M, dv_n, e, DV)
    grad_q = scaled_columns(product(grad_weights, k_tile, PRECISION), norm_q, norm_k, gain, eps)
    t = tl.sum(grad_q * q_tile, axis=0)
    slope_q, slope_k = norm_gradient(t, norm_q, eps), norm_gradient(t, norm_k, eps)
    store_tile(dq, grad_q - sign(q_tile) * slope_q[None, :], n, N, dq_n, d, D)
    grad_k = product(tl.trans(grad_weights), scaled, PRECISION) - sign(k_tile) * slope_k[None, :]
    store_tile(dk, grad_k, m, M, dk_n, d, D)
