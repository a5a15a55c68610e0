"""What is particular to single baselines: limits they must reach, inputs they must refuse."""

import pytest
import torch
import torch.nn.functional as F

from closeness import assert_close
from sima_attn.nn import create_attention
from sima_attn.nn.baselines.nystrom import iterative_pinv, run_means
from sima_attn.nn.baselines.performer import orthogonal_gaussian
from sima_attn.nn.baselines.soft import RIDGE, NewtonInverse


def qkv(N=16, D=8, H=2):
    return torch.randn(3, 1, H, N, D, dtype=torch.float64).unbind(0)


def test_nystrom_with_as_many_landmarks_as_tokens_is_softmax_attention():
    q, k, v = qkv(N=12)
    q = 8 * k  # a matrix near the identity, which six steps invert well
    out = create_attention("nystrom", 16, 2, num_landmarks=12).double().core(q, k, v)
    assert_close(out, F.scaled_dot_product_attention(q, k, v), 1e-2)


def test_nystrom_inverse_converges_to_the_pseudo_inverse():
    a = (3 * torch.eye(6, dtype=torch.float64) + torch.randn(2, 6, 6, dtype=torch.float64)).softmax(-1)
    assert_close(iterative_pinv(a), torch.linalg.pinv(a), 1e-3)


def test_run_means_are_even_and_cover_every_token_once():
    x = torch.arange(7.0).reshape(1, 1, 7, 1)
    assert run_means(x, 3).flatten().tolist() == [1.0, 3.5, 5.5]  # runs of 3, 2, 2
    assert run_means(x, 7).flatten().tolist() == x.flatten().tolist()


def test_performer_estimates_softmax_attention_better_with_more_features():
    q, k, v = (0.5 * t for t in qkv())
    truth = F.scaled_dot_product_attention(q, k, v)
    errors = []
    for features in (8, 4096):
        out = create_attention("performer", 16, 2, num_features=features).double().core(q, k, v)
        errors.append(((out - truth).norm() / truth.norm()).item())
    assert errors[1] < 0.1 < errors[0]


def test_performer_directions_are_orthogonal_in_blocks_and_kept_in_the_state_dict():
    w = orthogonal_gaussian(20, 8)
    cosines = F.normalize(w[:8], dim=1) @ F.normalize(w[:8], dim=1).T
    assert_close(cosines, torch.eye(8), 1e-5)
    module = create_attention("performer", 16, 2)
    before = module.state_dict()["directions"].clone()
    module.redraw()
    assert not torch.equal(before, module.directions)


def test_newton_inverse_and_its_gradient_are_those_of_the_inverse():
    x = torch.randn(2, 5, 5, dtype=torch.float64)
    P = (-0.5 * torch.cdist(x, x).square()).exp().requires_grad_()
    assert_close(NewtonInverse.apply(P), torch.linalg.inv(P + RIDGE * torch.eye(5, dtype=torch.float64)), 1e-6)
    assert torch.autograd.gradcheck(NewtonInverse.apply, (P,), atol=1e-3)


def test_soft_has_one_projection_for_queries_and_keys():
    assert create_attention("soft", 16, 2).qkv.out_features == 32
    assert create_attention("softmax", 16, 2).qkv.out_features == 48


@pytest.mark.parametrize("name", ["elu", "cosformer", "cosformer_2d"])
def test_both_orders_of_a_feature_map_agree(name):
    q, k, v = qkv()
    kv, qk = (create_attention(name, 16, 2, order=order).double().core(q, k, v) for order in ("kv", "qk"))
    assert_close(kv, qk)


@pytest.mark.parametrize(
    "name", ["softmax", "softmax_explicit", "elu", "efficient", "cosformer", "performer", "soft_full"]
)
def test_keys_may_outnumber_queries(name):
    module = create_attention(name, 16, 2).double()
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (5, 9, 9))
    assert_close(module.core(q, k, v), module.reference(q, k, v))


def test_cosformer_2d_counts_neighbors_more():
    module = create_attention("cosformer_2d", 4, 1)
    ones = torch.ones(1, 1, 25, 4)
    middle = module.matrix(ones, ones)[0, 0, 12].reshape(5, 5)
    assert middle.argmax() == 12
    assert middle[2, 2] > middle[2, 3] > middle[2, 4]
    assert (middle >= 0).all()


def test_a_grid_need_not_be_square_when_it_is_given():
    for name in ("cosformer_2d", "soft"):
        module = create_attention(name, 16, 2, grid=(4, 6))
        assert module(torch.randn(1, 24, 16)).shape == (1, 24, 16)
        with pytest.raises(ValueError, match=r"25 tokens do not fill grid=\(4, 6\)"):
            module(torch.randn(1, 25, 16))


@pytest.mark.parametrize("name", ["cosformer_2d", "soft"])
def test_a_second_image_size_compiles(name):
    """torch.compile then takes the number of tokens as a symbol, of which there is no integer square root."""
    torch._dynamo.reset()
    module = create_attention(name, 16, 2)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for N in (16, 36):
        x = torch.randn(1, N, 16)
        assert_close(compiled(x), module(x), 1e-5)


@pytest.mark.parametrize("name", ["cosformer_2d", "soft"])
def test_a_class_token_is_refused_where_tokens_must_form_a_grid(name):
    with pytest.raises(ValueError, match=r"17 tokens do not fill a square grid.*use no class token"):
        create_attention(name, 16, 2)(torch.randn(1, 17, 16))


def test_linformer_keeps_to_its_token_count():
    with pytest.raises(ValueError, match="pass num_tokens >= 1"):
        create_attention("linformer", 16, 2)
    with pytest.raises(ValueError, match="built for num_tokens=9, got 10 tokens"):
        create_attention("linformer", 16, 2, num_tokens=9)(torch.randn(1, 10, 16))


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="unknown order"):
        create_attention("elu", 16, 2, order="vk")
