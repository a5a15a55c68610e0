"""The Triton kernels of the gradient of relu2; triton_kernels.py has the forward and the letters.

With Q' = phi(Q), K' = phi(K), W = K'^T V and z = |K'|_1, per query r = 1 / max(Q' z, eps) and O = r Q' W:

    u = r rowsum(Q' * dO W^T)        = rowsum(O * dO), 0 where the sum of the weights is clamped to eps
    A = Q'^T (r dO)                  c = Q'^T (r u)
    dQ = r (dO W^T - u z) * phi'(Q)  dK = (V A^T - c) * phi'(K)        dV = K' A

`relu2_sums_backward` computes shares of A and c, and r and u of every query, `relu2_apply_backward` the outputs. In
between, `finish_forward` adds the shares where they are many.
"""

import triton
import triton.language as tl

from sima_attn.ops.triton_parts import (
    add_few_shares,
    at_head,
    features,
    grads_at_head,
    inputs_at_head,
    larger,
    load_matrix,
    load_pair,
    load_tile,
    load_vectors,
    matrix_row,
    product,
    root_of_scale,
    store_matrix,
    store_tile,
    store_vectors,
)


@triton.jit
def feature_slope(x, D: tl.constexpr):
    """phi'(x) = 2 relu(x) / sqrt(D)."""
    x = x.to(tl.float32) * (2 * root_of_scale(D) * root_of_scale(D))
    return tl.where(x < 0, 0.0, x)


@triton.jit
def at_queries(numbers, head, N, rows):
    """Pointers to r of some queries of a head; u follows N numbers later."""
    return numbers + head.to(tl.int64) * 2 * N + rows


@triton.jit(do_not_specialize=["N", "splits", "eps"])
def relu2_sums_backward(
    q, do, shares, state, numbers,
    eps, heads, H, N, splits, q_b, q_h, q_n, do_b, do_h, do_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One share of A and c, summed over its part of the queries, and r and u of these queries."""
    eps = tl.cast(eps, tl.float32)  # see as_float32
    head, split = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    q = at_head(q, q, 0, head, H, q_b, q_h)
    do = at_head(do, do, 0, head, H, do_b, do_h)
    row = matrix_row(state, head, D, DV)
    w = load_matrix(row, d, e, D, DV)
    _, z = load_vectors(row, d, D, DV)
    a = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
    c = tl.zeros([BLOCK_D], tl.float32)
    tiles = tl.cdiv(tl.cdiv(N, BLOCK_N), splits)
    for tile in range(split * tiles, (split + 1) * tiles):
        rows = tile * BLOCK_N + n
        q_tile, do_tile = load_pair(q, do, None, 0, rows, N, q_n, do_n, d, e, D, DV)
        q_tile = features(q_tile, "relu2", D)
        weight = tl.sum(q_tile * z[None, :], axis=1)
        r = 1.0 / tl.maximum(weight, eps)
        u = r * tl.sum(q_tile * product(do_tile, tl.trans(w), PRECISION), axis=1)
        u = tl.where(weight < eps, 0.0, u)
        a += product(tl.trans(q_tile), do_tile.to(tl.float32) * r[:, None], PRECISION)
        c += tl.sum(q_tile * (r * u)[:, None], axis=0)
        tl.store(at_queries(numbers, head, N, rows), r, mask=rows < N)
        tl.store(at_queries(numbers, head, N, rows) + N, u, mask=rows < N)
    row = matrix_row(shares, split * heads + head, D, DV)
    store_matrix(row, a, d, e, D, DV)
    store_vectors(row, tl.zeros([BLOCK_D], tl.float32), c, d, D, DV)


@triton.jit(do_not_specialize=["N", "M", "tiles", "eps"])
def relu2_apply_backward(
    q, k, v, do, grads, shares, state, sums, numbers,
    k_offset, v_offset, dk_offset, dv_offset, eps, heads, H, N, M, tiles,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, dq_n, dk_n, dv_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of dQ, dK and dV for `tiles` tiles of tokens.

    SPLITS: add that many shares of A and c first, which needs BLOCK_C = BLOCK_D = BLOCK_V; 0: they are in `sums`.
    """
    head, part = tl.program_id(0), tl.program_id(2)
    group = tl.num_programs(1) - 1 - tl.program_id(1)  # backwards, as in apply_forward
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    columns = part * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    q, k, v = inputs_at_head(q, k, v, k_offset, v_offset, head, H, q_b, q_h, k_b, k_h, v_b, v_h)
    do = at_head(do, do, 0, head, H, do_b, do_h)
    dq, dk, dv = grads_at_head(grads, dk_offset, dv_offset, head, H, N, M, D, DV, dq_n, dk_n, dv_n)
    kept = matrix_row(state, head, D, DV)
    w_rows = load_matrix(kept, columns, e, D, DV)
    _, z = load_vectors(kept, columns, D, DV)
    if SPLITS > 0:
        a_rows, _, c = add_few_shares(shares, head, heads, columns, e, SPLITS, D, DV)
        a_columns = a_rows
    else:
        row = matrix_row(sums, head, D, DV)
        _, c = load_vectors(row, columns, D, DV)
        a_rows = load_matrix(row, columns, e, D, DV)
        a_columns = load_matrix(row, d, columns, D, DV)

    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(N, BLOCK_N))):
        rows = tile * BLOCK_N + n
        do_tile = load_tile(do, rows, rows < N, do_n, e, DV)
        q_tile = load_tile(q, rows, rows < N, q_n, columns, D, larger(D, DV))
        r = tl.load(at_queries(numbers, head, N, rows), mask=rows < N, other=0.0)
        u = tl.load(at_queries(numbers, head, N, rows) + N, mask=rows < N, other=0.0)
        grad = product(do_tile, tl.trans(w_rows), PRECISION) - u[:, None] * z[None, :]
        grad = grad * r[:, None] * feature_slope(q_tile, D)
        store_tile(dq, grad, rows, N, dq_n, columns, D, larger(D, DV))
    for tile in range(group * tiles, tl.minimum((group + 1) * tiles, tl.cdiv(M, BLOCK_N))):
        rows = tile * BLOCK_N + n
        v_tile = load_tile(v, rows, rows < M, v_n, e, DV)
        k_columns = load_tile(k, rows, rows < M, k_n, columns, D, larger(D, DV))
        grad = (product(v_tile, tl.trans(a_rows), PRECISION) - c[None, :]) * feature_slope(k_columns, D)
        store_tile(dk, grad, rows, M, dk_n, columns, D, larger(D, DV))
        k_tile = features(load_tile(k, rows, rows < M, k_n, d, D), "relu2", D)
        store_tile(dv, product(k_tile, a_columns, PRECISION), rows, M, dv_n, columns, DV, larger(D, DV))
