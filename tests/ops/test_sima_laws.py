"""The laws of the SimA operator, over random shapes and both orders."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeness import assert_as_accurate, assert_close, relative_error
from recorder import Recorder
from sima_attn.ops import (
    choose_order,
    cpu_inference,
    plan,
    sima_attention,
    sima_attention_qkv,
    sima_matrix_reference,
    sima_reference,
)
from sima_attn.ops.api import plan_callback
from sima_attn.ops.cpu_inference import TILE_NUMBERS
from sima_attn.ops.reference import algorithm_1

ORDERS = ("kv", "qk")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
sizes = st.integers(1, 9)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), sizes, sizes, sizes, sizes)  # B, H, N, M, D, Dv


@pytest.fixture(autouse=True, scope="module")
def by_image():
    """The images of these tests are tiny, and are to be computed one by one nevertheless."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_inference, "LEAST_NUMBERS", 0)
        yield


def random_qkv(shape, dtype=torch.float64, seed=0):
    B, H, N, M, D, Dv = shape
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(B, H, n, d, generator=generator, dtype=torch.float64).to(dtype)
        for n, d in ((N, D), (M, D), (M, Dv))
    )


def packed_qkv(B, N, H, D, dtype=torch.float32):
    """Views [B, H, N, D] of one packed tensor [B, N, 3, H, D], as an attention module has them."""
    return torch.randn(B, N, 3, H, D, dtype=torch.float64).to(dtype).permute(2, 0, 3, 1, 4).unbind(0)


@given(shapes, st.sampled_from(ORDERS), st.booleans(), st.booleans())
def test_equals_the_equations_of_the_paper(shape, order, with_autograd, one_by_one):
    q, k, v = random_qkv(shape)
    q.requires_grad_(with_autograd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_inference, "LEAST_NUMBERS", 0 if one_by_one else 2**13)
        assert_close(sima_attention(q, k, v, order=order), sima_reference(q, k, v))


@given(shapes)
def test_the_two_orders_agree(shape):
    q, k, v = random_qkv(shape)
    assert_close(sima_attention(q, k, v, order="kv"), sima_attention(q, k, v, order="qk"))


@given(shapes, st.randoms(use_true_random=False))
def test_permuting_queries_permutes_outputs_and_permuting_keys_changes_nothing(shape, random):
    q, k, v = random_qkv(shape)
    by_query, by_key = list(range(q.shape[2])), list(range(k.shape[2]))
    random.shuffle(by_query), random.shuffle(by_key)
    permuted = sima_attention(q[:, :, by_query], k[:, :, by_key], v[:, :, by_key])
    assert_close(permuted, sima_attention(q, k, v)[:, :, by_query])


@given(shapes, st.floats(1e-3, 1e3), st.sampled_from("qk"))
def test_scaling_a_channel_of_q_or_k_changes_nothing(shape, c, which):
    q, k, v = random_qkv(shape)
    scale = torch.ones(q.shape[-1], dtype=q.dtype)
    scale[0] = c
    scaled = sima_attention(q * scale, k, v) if which == "q" else sima_attention(q, k * scale, v)
    assert_close(scaled, sima_attention(q, k, v))


@given(shapes)
def test_attention_is_bounded_by_the_channels(shape):
    q, k, _ = random_qkv(shape)
    assert sima_matrix_reference(q, k).abs().max() <= q.shape[-1] * (1 + 1e-12)


def test_the_bound_is_reached_when_one_token_holds_everything():
    q = torch.zeros(1, 1, 5, 7)
    q[0, 0, 2] = torch.rand(7) + 0.1
    assert sima_matrix_reference(q, q)[0, 0, 2, 2].item() == pytest.approx(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("with_autograd", [True, False])
@pytest.mark.parametrize("dead", ["q", "k", "both"])
def test_a_dead_channel_adds_nothing_in_every_dtype(dtype, order, with_autograd, dead):
    q, k, v = random_qkv((2, 2, 12, 10, 4, 4), dtype)
    alive = q[..., 1:].clone(), k[..., 1:].clone()
    if dead in ("q", "both"):
        q[..., 0] = 0
    if dead in ("k", "both"):
        k[..., 0] = 0
    q.requires_grad_(with_autograd)
    out = sima_attention(q, k, v, order=order)
    assert_close(out, sima_attention(*alive, v, order=order), 1e-12 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_zero_queries_give_zeros(dtype):
    q, k, v = random_qkv((1, 2, 6, 6, 4, 4), dtype)
    assert (sima_attention(torch.zeros_like(q), k, v) == 0).all()


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.sampled_from([None, 5.0]),
)
def test_a_padded_batch_equals_its_images_one_by_one(lengths, order, with_autograd, token_ref):
    B, N, M = len(lengths), 1 + max(n for n, _ in lengths), 1 + max(m for _, m in lengths)
    q, k, v = random_qkv((B, 2, N, M, 4, 3))
    query_mask = torch.arange(N) < torch.tensor([n for n, _ in lengths])[:, None]
    key_mask = torch.arange(M) < torch.tensor([m for _, m in lengths])[:, None]
    # Whatever lies in the padding, it must not come through: not even NaN.
    q = q.masked_fill(~query_mask[:, None, :, None], float("nan")).requires_grad_(with_autograd)
    k, v = (t.masked_fill(~key_mask[:, None, :, None], float("nan")) for t in (k, v))

    out = sima_attention(q, k, v, query_mask=query_mask, key_mask=key_mask, order=order, token_ref=token_ref)

    for b, (n, m) in enumerate(lengths):
        alone = sima_attention(
            q[b : b + 1, :, :n], k[b : b + 1, :, :m], v[b : b + 1, :, :m], order=order, token_ref=token_ref
        )
        assert_close(out[b : b + 1, :, :n], alone)
        assert (out[b, :, n:] == 0).all()


def test_an_image_that_is_all_padding_gives_zeros():
    q, k, v = random_qkv((2, 2, 4, 4, 3, 3))
    mask = torch.tensor([[True] * 4, [False] * 4])
    out = sima_attention(q, k, v, key_mask=mask, query_mask=mask, token_ref=4)
    assert (out[1] == 0).all()
    assert out[0].abs().sum() > 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("with_autograd", [True, False])
def test_token_ref_multiplies_by_the_ratio_of_token_counts(order, with_autograd):
    q, k, v = random_qkv((2, 2, 6, 9, 4, 4))
    q.requires_grad_(with_autograd)
    out = sima_attention(q, k, v, order=order, token_ref=24)
    assert_close(out, sima_attention(q, k, v, order=order) * (6 / 24))


@pytest.mark.parametrize("masked", [False, True])
def test_the_reference_applies_token_ref_in_float64(masked):
    """3 / 7 in float32 is off by 1e-8."""
    q, k, v = random_qkv((1, 1, 3, 3, 4, 4))
    mask = {"query_mask": torch.ones(1, 3, dtype=torch.bool)} if masked else {}
    out = sima_reference(q, k, v, token_ref=7, **mask)
    assert_close(out, sima_reference(q, k, v) * (3 / 7), 1e-15)


def test_token_ref_undoes_the_shrinking_with_the_token_count():
    """The output shrinks as 1/N when an image is up-sampled (each token four times); token_ref restores it."""
    q, k, v = random_qkv((1, 2, 9, 9, 4, 4))
    larger = [t.repeat_interleave(4, dim=2) for t in (q, k, v)]
    assert_close(sima_attention(*larger)[:, :, ::4], sima_attention(q, k, v) / 4)
    assert_close(sima_attention(*larger, token_ref=9)[:, :, ::4], sima_attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "D"), [(64, 16), (16, 64), (1024, 32)])
@pytest.mark.parametrize("with_autograd", [True, False])
def test_low_precision_errs_at_most_twice_as_much_as_plain_torch(dtype, order, N, D, with_autograd):
    q, k, v = random_qkv((2, 2, N, N, D, D), dtype)
    truth = sima_reference(q.double(), k.double(), v.double())
    plain = algorithm_1(q, k, v, order=order)
    q.requires_grad_(with_autograd)
    assert_as_accurate(sima_attention(q, k, v, order=order), plain, truth)


def test_float16_does_not_underflow_with_many_tokens():
    """Q-hat K-hat^T stored in float16 is off by percents here; the folded form is as good as float16 can say."""
    q, k, v = random_qkv((1, 1, 4096, 4096, 64, 64), torch.float16)
    truth = sima_reference(q.float(), k.float(), v.float())
    assert relative_error(algorithm_1(q, k, v, order="qk"), truth) > 0.01
    for order in ORDERS:
        # The outputs themselves are subnormal in float16 (about 1e-5), hence not 5e-4.
        assert relative_error(sima_attention(q, k, v, order=order), truth) < 5e-3


def test_long_sums_do_not_overflow_float16():
    ones = torch.ones(1, 1, 70_000, 2, dtype=torch.float16)
    out = sima_attention(ones, ones, ones, token_ref=1)  # multiplied by N, it is D
    assert_close(out, torch.full_like(ones, 2.0), 1e-3)


def gradients(attend, inputs, grad):
    inputs = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(attend(*inputs), inputs, grad)


def random_masks(shape, seed=0):
    """One mask for the queries and one for the keys, with at least one token in each image."""
    B, _, N, M, _, _ = shape
    generator = torch.Generator().manual_seed(seed)
    masks = {"query_mask": torch.rand(B, N, generator=generator) < 0.7}
    masks["key_mask"] = torch.rand(B, M, generator=generator) < 0.7
    for mask in masks.values():
        mask[:, 0] = True
    return masks


@given(shapes, st.sampled_from(ORDERS), st.booleans(), st.sampled_from([None, 4.0]), st.sampled_from([1e-12, 0.9]))
def test_gradients_are_those_of_the_equations(shape, order, masked, token_ref, eps):
    """With an eps of 0.9 some norms are below it."""
    q, k, v = random_qkv(shape)
    grad = torch.randn(*q.shape[:3], v.shape[3], generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    options = {"token_ref": token_ref, "eps": eps, **(random_masks(shape) if masked else {})}
    if masked:  # the matrix of the reference has no place for padded values, which meet a zero in it
        v = v.masked_fill(~options["key_mask"][:, None, :, None], 0)
    ours = gradients(lambda *t: sima_attention(*t, order=order, **options), (q, k, v), grad)
    truth = gradients(lambda *t: sima_reference(*t, **options), (q, k, v), grad)
    for ours_of, truth_of in zip(ours, truth, strict=True):
        assert_close(ours_of, truth_of, 1e-10)  # of a single token they cancel to rounding errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "D"), [(64, 16), (16, 64)])
def test_gradients_in_low_precision_err_at_most_twice_as_much_as_plain_torch(dtype, order, N, D):
    inputs = random_qkv((2, 2, N, N, D, D), dtype)
    grad = torch.randn(2, 2, N, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = gradients(lambda *t: sima_attention(*t, order=order), inputs, grad)
    plain = gradients(lambda *t: algorithm_1(*t, order=order), inputs, grad)
    truth = gradients(sima_reference, [t.double() for t in inputs], grad.double())
    for one in zip(ours, plain, truth, strict=True):
        assert_as_accurate(*one)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_right(order, masked):
    """First and second derivatives, one by one and by the batch."""
    shape = (2, 2, 4, 3, 3, 2)
    tensors = [t.requires_grad_() for t in random_qkv(shape)]
    options = {"token_ref": 5.0, **random_masks(shape)} if masked else {}

    def attend(q, k, v):
        return sima_attention(q, k, v, order=order, **options)

    assert torch.autograd.gradcheck(attend, tensors, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(attend, tensors, check_batched_grad=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_of_a_packed_projection_is_that_of_its_views(order, masked):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 5, 3, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    token_mask = random_masks((2, 2, 5, 5, 4, 4))["query_mask"] if masked else None
    options = {"order": order, "token_ref": 3.0}

    def attend(qkv):
        return sima_attention_qkv(qkv, token_mask=token_mask, **options)

    def attend_views(qkv):
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return sima_attention(q, k, v, key_mask=token_mask, query_mask=token_mask, **options).transpose(1, 2)

    out = attend(qkv)
    assert_close(out, attend_views(qkv))
    assert out.is_contiguous()  # [B, N, H, D]
    (ours,) = torch.autograd.grad(out.sin().sum(), qkv)
    (of_views,) = torch.autograd.grad(attend_views(qkv).sin().sum(), qkv)
    assert_close(ours, of_views)
    assert torch.autograd.gradgradcheck(attend, qkv)


@pytest.mark.parametrize("order", ORDERS)
def test_second_derivatives_are_right_where_q_is_computed_from_k(order):
    x = random_qkv((1, 2, 3, 3, 3, 3))[0].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda k: sima_attention(k.sin(), k, 2 * k, order=order), x)


@pytest.mark.parametrize("order", ORDERS)
def test_a_gradient_is_given_only_to_what_asks_for_it(order):
    q, k, v = random_qkv((2, 2, 5, 4, 3, 3))
    _, all_of_k, _ = gradients(lambda *t: sima_attention(*t, order=order), (q, k, v), torch.ones_like(q))
    k.requires_grad_()
    for create_graph in (False, True):
        out = sima_attention(q, k, v, order=order)
        (only_k,) = torch.autograd.grad(out, k, torch.ones_like(q), create_graph=create_graph)
        assert_close(only_k, all_of_k)


@pytest.mark.parametrize("order", ORDERS)
def test_training_copies_no_head_views_and_packs_its_gradient(order):
    """Of the size of the whole batch there are the output and the packed gradient, nothing else."""
    qkv = torch.randn(16, 6, 3, 2, 5, requires_grad=True)
    grad = torch.randn(16, 6, 2, 5)
    with Recorder() as seen:
        (gradient,) = torch.autograd.grad(sima_attention_qkv(qkv, order=order), qkv, grad)
    assert gradient.is_contiguous()
    views = {"permute", "select", "transpose", "detach", "alias", "view", "unbind", "expand", "as_strided"}
    made = [call for call in seen.calls if call.shape[:1] == (16,) and call.operation not in views]
    assert [call.shape for call in made] == [(16, 6, 2, 5), (16, 6, 3, 2, 5)]


@pytest.mark.parametrize("order", ORDERS)
def test_autocast_does_not_lower_the_precision_of_gradients(order):
    qkv = torch.randn(2, 20, 3, 2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (exact,) = torch.autograd.grad(sima_attention_qkv(qkv, order=order).sin().sum(), qkv)
    for create_graph in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sima_attention_qkv(qkv, order=order).sin().sum()
            (ours,) = torch.autograd.grad(loss, qkv, create_graph=create_graph)
        assert_close(ours, exact, 1e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [1e18, 1e24])
def test_large_queries_and_keys_keep_their_gradients(order, scale):
    """dQ and dK shrink as q and k grow; dV stays."""
    q, k, v = random_qkv((2, 2, 20, 30, 8, 8), torch.float32)
    grad = torch.randn(2, 2, 20, 8, generator=torch.Generator().manual_seed(1))
    small = gradients(lambda *t: sima_attention(*t, order=order, token_ref=1.0), (q, k, v), grad)
    large = gradients(lambda *t: sima_attention(*t, order=order, token_ref=1.0), (q * scale, k * scale, v), grad)
    for ours, expected, factor in zip(large, small, (scale, scale, 1.0), strict=True):
        assert_close(ours.double() * factor, expected, 1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_agree_with_one_on_gradients(order, dtype, two_threads):
    inputs = packed_qkv(B=2, N=40, H=3, D=8, dtype=dtype)
    grad = torch.randn(2, 3, 40, 8).to(dtype)
    by_two = gradients(lambda *t: sima_attention(*t, order=order), inputs, grad)
    torch.set_num_threads(1)
    by_one = gradients(lambda *t: sima_attention(*t, order=order), inputs, grad)
    for two, one in zip(by_two, by_one, strict=True):
        assert_close(two, one, 1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("order", ORDERS)
def test_transforms_and_checkpoints_give_the_same_gradients(order):
    qkv = torch.randn(2, 5, 3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(qkv):
        return sima_attention_qkv(qkv, order=order).sin().sum()

    (ours,) = gradients(loss, [qkv], None)
    assert_close(torch.func.grad(loss)(qkv), ours)
    (again,) = gradients(lambda x: torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False), [qkv], None)
    assert_close(again, ours)


def test_forward_mode_derivatives_agree_with_finite_differences():
    q, k, v = random_qkv((1, 2, 5, 5, 3, 3))
    direction = torch.randn_like(q)
    _, tangent = torch.func.jvp(lambda q: sima_attention(q, k, v), (q,), (direction,))
    step = 1e-6
    difference = sima_attention(q + step * direction, k, v) - sima_attention(q - step * direction, k, v)
    assert_close(tangent, difference / (2 * step), 1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_right_where_a_norm_is_below_eps(order):
    """There the norm is the constant eps, and nothing flows back through it."""
    q, k, v = random_qkv((2, 2, 5, 4, 3, 3))
    q[..., 0] *= 0.01
    k[..., 1] *= 0.01
    grad = torch.randn(2, 2, 5, 3, dtype=torch.float64)

    def gradients(attention):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(attention(*inputs), inputs, grad)

    ours = gradients(lambda q, k, v: sima_attention(q, k, v, order=order, eps=0.5))
    for a, b in zip(ours, gradients(lambda q, k, v: sima_reference(q, k, v, eps=0.5)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("with_autograd", [True, False])
@pytest.mark.parametrize("scale", [1e18, 1e24, 1e30])
def test_large_queries_and_keys_keep_their_result(order, with_autograd, scale):
    """|Q|_1 |K|_1 overflows float32 here: the norms must be divided by one after the other."""
    q, k, v = random_qkv((2, 2, 20, 30, 8, 8), torch.float32)
    large = (q * scale).requires_grad_(with_autograd), k * scale
    out = sima_attention(*large, v, order=order, token_ref=1.0)
    assert_close(out, sima_attention(q, k, v, order=order, token_ref=1.0), 1e-5)


@pytest.mark.parametrize("C", [512, 1024])
@pytest.mark.parametrize("order", ORDERS)
def test_packed_rows_that_lie_multiples_of_2_kib_apart(C, order):
    """Inference on the CPU makes a dense copy of such keys (3 C float32 numbers from row to row)."""
    views = packed_qkv(B=2, N=70, H=C // 64, D=64)
    assert views[1].stride(2) * views[1].element_size() % 2048 == 0
    assert_close(sima_attention(*views, order=order), sima_reference(*(t.double() for t in views)), 1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_the_layout_of_the_output_does_not_depend_on_autograd(order):
    q, k, v = packed_qkv(B=2, N=10, H=3, D=4)
    inference = sima_attention(q, k, v, order=order)
    training = sima_attention(q.detach().requires_grad_(), k, v, order=order)
    assert inference.stride() == training.stride()
    assert training.transpose(1, 2).view(2, 10, 12).shape == (2, 10, 12)


def test_nan_spreads_as_in_torch():
    q, k, v = random_qkv((2, 1, 5, 5, 3, 3))
    v[0, 0, 1, 2] = float("nan")
    out = sima_attention(q, k, v)
    assert out[0, 0, :, 2].isnan().all()
    assert out[0, 0, :, :2].isfinite().all()
    assert out[1].isfinite().all()
    q[1, 0, 3, 0] = float("nan")
    assert sima_attention(q, k, v)[1].isnan().all()


@pytest.mark.parametrize("with_autograd", [True, False])
def test_kv_order_makes_no_matrix_of_tokens_and_no_normalized_copy(with_autograd):
    q, k, v = packed_qkv(B=2, N=300, H=2, D=4)
    q = q.requires_grad_() if with_autograd else q
    with Recorder() as seen:
        sima_attention(q, k, v, order="kv")
    assert seen.shapes("bmm")  # the recorder sees the products
    assert all(shape[-2:] != (300, 300) for shape in seen.shapes())
    multiplied = seen.shapes("mul", "mul_", "div", "div_")
    assert multiplied
    assert all(300 not in shape for shape in multiplied)


@pytest.mark.parametrize(("N", "products"), [(7, 2), (1100, 2 * 3)])
def test_tiny_images_are_computed_all_at_once(N, products, monkeypatch):
    monkeypatch.setattr(cpu_inference, "LEAST_NUMBERS", 2**13)
    q, k, v = packed_qkv(B=3, N=N, H=2, D=4)
    with Recorder() as seen:
        sima_attention(q, k, v)
    assert len(seen.shapes("bmm")) == products


@pytest.mark.parametrize(("order", "N"), [("kv", 50), ("qk", 5)])
def test_memory_beyond_the_output_does_not_grow_with_the_batch(order, N):
    q, k, v = packed_qkv(B=16, N=N, H=2, D=8)
    with Recorder() as seen:
        sima_attention(q, k, v, order=order)
    made = seen.shapes("new_empty", "empty", "abs", "mul", "bmm", "copy_", "clone", "_to_copy", "contiguous")
    whole_batch = [shape for shape in made if len(shape) == 4]
    assert whole_batch == [(16, N, 2, 8)]  # the output, and nothing else of its size


def test_scratch_memory_of_kv_order_has_a_ceiling():
    q, k, v = packed_qkv(B=1, N=TILE_NUMBERS // 4, H=2, D=4)
    with Recorder() as seen:
        out = sima_attention(q, k, v, order="kv")
    scratch = [shape for shape in seen.shapes("new_empty") if len(shape) == 3]
    assert [torch.Size(shape).numel() for shape in scratch] == [TILE_NUMBERS]
    in_float64 = sima_attention(q.double(), k.double(), v.double(), order="kv")
    assert_close(out, in_float64, 5e-5)


def test_the_projection_reads_the_output_without_a_copy():
    out = sima_attention(*packed_qkv(B=2, N=10, H=3, D=4))
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("order", ORDERS)
def test_strided_views_give_what_dense_tensors_give(order):
    views = packed_qkv(B=2, N=10, H=3, D=4)
    assert_close(
        sima_attention(*views, order=order), sima_attention(*(t.contiguous() for t in views), order=order), 1e-6
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_agree_with_one(order, dtype, two_threads):
    views = packed_qkv(B=2, N=40, H=3, D=8, dtype=dtype)
    out = sima_attention(*views, order=order)
    torch.set_num_threads(1)
    assert_close(out, sima_attention(*views, order=order), 1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize(
    ("N", "M", "D", "Dv"), [(8, 8, 4, 4), (4, 4, 8, 8), (6, 30, 9, 9), (20, 4, 9, 9), (1, 9, 4, 4)]
)
@pytest.mark.parametrize("with_autograd", [True, False])
def test_the_order_that_was_planned_is_the_order_that_runs(N, M, D, Dv, with_autograd):
    q, k, v = random_qkv((1, 1, N, M, D, Dv))
    q.requires_grad_(with_autograd)
    with Recorder() as seen:
        sima_attention(q, k, v)
    first_product = seen.shapes("bmm")[0][-2:]
    assert first_product == ((D, Dv) if plan(q, k, v).order == "kv" else (N, M))
    assert plan(q, k, v).order == choose_order(N, M, D, Dv)
    assert plan(q, k, v).backend == "eager"


def test_autocast_does_not_lower_the_precision():
    q, k, v = random_qkv((2, 2, 20, 20, 8, 8), torch.float32)
    exact = sima_attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(sima_attention(q, k, v), exact, 1e-6)
        assert_close(sima_attention(q.requires_grad_(), k, v), exact, 1e-6)


def test_shapes_are_found_on_the_meta_device():
    q, k, v = (t.to("meta") for t in random_qkv((2, 3, 5, 7, 4, 6)))
    assert sima_attention(q, k, v, token_ref=9).shape == (2, 3, 5, 6)


def test_an_empty_batch_gives_an_empty_batch():
    q, k, v = (t[:0] for t in random_qkv((1, 2, 3, 4, 5, 6)))
    assert sima_attention(q, k, v).shape == (0, 2, 3, 6)
    assert [t.shape[0] for t in gradients(sima_attention, (q, k, v), q.new_zeros(0, 2, 3, 6))] == [0, 0, 0]


def test_a_plan_callback_gets_the_plans_of_its_own_thread():
    q, k, v = random_qkv((1, 1, 9, 9, 4, 4))
    plans = []
    with plan_callback(plans.append):
        sima_attention(q, k, v, order="qk")
        thread = threading.Thread(target=sima_attention, args=(q, k, v))
        thread.start()
        thread.join()
    sima_attention(q, k, v)
    assert plans == [("qk", "eager")]
