"""Attentions with a convolution of v: which tokens it reaches, which grids it finds, and what models see of it."""

import itertools

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from closeness import assert_close
from cpp_compiler import needs_cpp
from sima_attn.auditing import assert_exp_free
from sima_attn.nn import ATTENTIONS, SimAttention, SimLocalAttention, create_attention, follow_image_grid
from sima_attn.nn.grid import on_grid, token_layout
from sima_attn.nn.local_values import LocalValues
from sima_attn.ops import AttentionShape, sima_attention

B, H, D = 2, 3, 8
every = pytest.mark.parametrize("name", [name for name, cls in ATTENTIONS.items() if cls.has_local_branch])
ROTATED = ("sima_rope", "relu2_rope", "softmax_rope")
of_own_code = pytest.mark.parametrize("name", ["sima_local", "relu2_wide", *ROTATED])  # the others are parts of these
VIT = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


def build(name, filters=True, **options):
    """An attention with gains and, where `filters` says so, filters that are not the initial ones."""
    module = create_attention(name, H * D, H, **options).double()
    with torch.no_grad():
        if filters:
            module.local.weight.normal_()
        if name == "sima_local":
            module.gain.uniform_(0.5, 2.0)
    return module


def tokens(N):
    return torch.randn(B, N, H * D, dtype=torch.float64)


def qkv(N, dtype=torch.float64):
    return torch.randn(3, B, H, N, D, dtype=torch.float64).to(dtype).unbind(0)


def vit(name="deit_tiny_patch16_224", **options):
    return timm.create_model(name, **{**VIT, **options}).eval()


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_is_a_depthwise_convolution_of_the_patch_tokens_and_zero_for_the_others(prefix, grid):
    rows, columns = grid
    local = LocalValues(H * D, grid=grid, dtype=torch.float64)
    torch.nn.init.normal_(local.weight)
    v = torch.randn(B, H, prefix + rows * columns, D, dtype=torch.float64)
    image = v[:, :, prefix:].permute(0, 1, 3, 2).reshape(B, H * D, rows, columns)
    expected = F.conv2d(image, local.weight, padding=1, groups=H * D)
    out = local(v)
    assert out.shape == v.shape
    assert not out[:, :, :prefix].any()
    assert_close(out[:, :, prefix:].permute(0, 1, 3, 2).reshape_as(expected), expected)


@every
def test_within_on_grid_a_module_has_that_grid_and_afterwards_its_own_again(name):
    module, x = build(name, grid=(3, 4)), tokens(10)
    other = build(name, grid=(2, 5))
    other.load_state_dict(module.state_dict())
    with on_grid(torch.nn.Sequential(module), (2, 5)):
        assert torch.equal(module(x), other(x))
    assert module.local.grid == (3, 4)
    with pytest.raises(ValueError, match="40 tokens are not a grid of 2 x 5"), on_grid(module, (2, 5)):
        module(tokens(40))
    assert module.local.grid == (3, 4)


def test_a_packed_projection_is_read_without_a_copy_and_written_token_by_token():
    packed = torch.randn(B, 17, 3, H, D)
    local = LocalValues(H * D)
    out = local(packed[:, :, 2].transpose(1, 2))
    assert out.transpose(1, 2).is_contiguous()  # as SimA's output, so that the projection needs no copy


@every
def test_starts_without_a_local_branch(name):
    module = create_attention(name, H * D, H)
    assert module.local.weight.shape == (H * D, 1, 3, 3)
    assert not module.local.weight.any()
    module, x, (q, k, v) = module.double(), tokens(16), qkv(16)
    if name not in ROTATED:
        order = torch.randperm(16)
        assert_close(module(x[:, order]), module(x)[:, order])
    assert_close(module.core(q, k, v), module.matrix(q, k) @ v)


def test_sima_local_starts_as_sima_times_the_number_of_tokens():
    module, q, k, v = create_attention("sima_local", H * D, H).double(), *qkv(26)
    assert torch.equal(module.gain, torch.ones(H, dtype=torch.float64))
    assert_close(module.core(q, k, v), 26 * sima_attention(q, k, v))
    larger = [t.repeat_interleave(4, dim=2) for t in (q, k, v)]  # 104 = 10 x 10 + 4
    assert_close(module.core(*larger)[:, :, ::4], module.core(q, k, v))


def test_each_head_has_its_own_gain():
    module, q, k, v = create_attention("sima_local", H * D, H).double(), *qkv(16)
    before = module.core(q, k, v)
    with torch.no_grad():
        module.gain.copy_(torch.tensor([1.0, 3.0, 0.0]))
    after = module.core(q, k, v)
    assert_close(after[:, 1], 3 * before[:, 1])
    assert not after[:, 2].any()


def test_the_weights_of_relu2_are_shares():
    module, q, k, _ = build("relu2"), *qkv(16)
    q[..., 0] = 1  # each query has a positive feature
    weights = module.matrix(q, k)
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(B, H, 16, dtype=torch.float64))
    assert_close(module.matrix(3 * q, k), weights)
    dead = q.clone()
    dead[:, :, 2] = -1  # no positive feature
    assert not module.matrix(dead, k)[:, :, 2].any()


@every
@pytest.mark.parametrize("tokens_and_options", [(16, {}), (17, {}), (21, {}), (16, {"grid": (2, 8)})], ids=str)
def test_counts_the_convolution_of_the_patch_tokens(name, tokens_and_options):
    N, options = tokens_and_options
    module, inputs = build(name, **options), qkv(N)
    # torch 2.11 does not count the fused kernel of softmax on a CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        module.core(*inputs)
    assert 2 * module.cost(AttentionShape(B, H, N, D)).macs == flops.get_total_flops()


@every
@pytest.mark.parametrize("N", [17, 21])
def test_gradients_are_right_with_filters_and_prefix_tokens(name, N):
    module = create_attention(name, 8, 2).double()
    torch.nn.init.normal_(module.local.weight)
    inputs = [torch.randn(1, 2, N, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(module.core, inputs, fast_mode=True)
    assert_close(module.core(*inputs), module.reference(*inputs))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_values_do_not_overflow(name, dtype):
    """Squares of q and k, as relu2 has them, are beyond float16."""
    module, (q, k, v) = build(name), qkv(197, dtype)
    scale = 1 if name == "softmax_rope" else 300  # softmax of large values is one weight, which rounding moves
    q, k = scale * q, scale * k
    expected = module.core(q.double(), k.double(), v.double())
    out = module.to(dtype).core(q, k, v)
    assert out.dtype == dtype
    assert_close(out, expected, {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype])


def test_autocast_does_not_change_the_precision_of_values_in_float32():
    module, (q, k, v) = build("sima_local").float(), qkv(17, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = module.core(q, k, v)
    assert torch.equal(out, module.core(q, k, v))


def test_padding_has_no_effect():
    """A 3 x 4 image in the corner of a 5 x 5 canvas: the border of the image is a border for the filters too."""
    small, large = build("sima_local", grid=(3, 4)), build("sima_local", grid=(5, 5))
    large.load_state_dict(small.state_dict())
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[:3, :4] = True
    x = tokens(25)
    image = mask.flatten()
    padded = large(x, token_mask=image.expand(B, -1))
    assert_close(padded[:, image], small(x[:, image]))


def test_layouts_of_vision_transformers_are_found():
    for side, prefix in itertools.product((4, 8, 14, 16, 37, 64), range(9)):
        assert token_layout(side**2 + prefix, [None], None, "x") == (prefix, side, side)
    assert token_layout(197, [(14, 14)], None, "x") == (1, 14, 14)
    assert token_layout(25, [(4, 6)], None, "x") == (1, 4, 6)
    assert token_layout(25, [None], None, "x") == (0, 5, 5)
    assert token_layout(116, [(10, 10)], 16, "x") == (16, 10, 10)
    assert token_layout(26, [None], 1, "x") == (1, 5, 5)


@every
@pytest.mark.parametrize(
    ("N", "options", "message"),
    [
        (34, {}, r"34 tokens are not a square grid plus 0 to 8 prefix tokens .*; set grid=\(rows, columns\)"),
        (17, {"prefix_tokens": 2}, "17 tokens are not a square grid plus 2 prefix tokens"),
        (40, {"grid": (4, 6)}, "40 tokens are not a grid of 4 x 6 plus 0 to 8 prefix tokens"),
        (3, {"grid": (4, 6)}, "3 tokens are not a grid of 4 x 6"),
        (25, {"grid": (4, 6), "prefix_tokens": 0}, "25 tokens are not a grid of 4 x 6 plus 0 prefix tokens"),
    ],
)
def test_tokens_that_fit_no_grid_are_refused(name, N, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)(tokens(N))


@every
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (4,)}, r"grid must be None or a pair \(rows, columns\) of positive integers, got \(4,\)"),
        ({"grid": (4, 0)}, "grid must be"),
        ({"grid": 16}, "grid must be"),
        ({"prefix_tokens": -1}, "prefix_tokens must be None or the number of tokens before .*, got -1"),
        ({"prefix_tokens": True}, "prefix_tokens must be"),
    ],
)
def test_options_without_sense_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_attention(name, H * D, H, **options)


@pytest.mark.parametrize("name", ["sima_local", "sima_rope"])
def test_sima_with_a_local_branch_has_no_token_ref_to_set(name):
    with pytest.raises(TypeError, match="token_ref"):
        create_attention(name, H * D, H, token_ref=196)


@every
def test_fewer_keys_than_queries_are_refused(name):
    q, k, v = (torch.randn(1, H, n, D, dtype=torch.float64) for n in (16, 4, 4))
    with pytest.raises(ValueError, match="needs as many keys as queries, got 16 queries and 4 keys"):
        build(name).core(q, k, v)


@every
def test_weights_of_timm_load_and_leave_the_new_parameters_alone(name):
    maps = {f"{x}_map.{part}" for x in "qk" for part in ("weight", "bias")}
    new = {"local.weight"} | {"sima_local": {"gain"}, "relu2_wide": maps}.get(name, set())
    model, state = vit(attn_layer=ATTENTIONS[name]), vit().state_dict()
    found = model.load_state_dict(state, strict=False)
    assert set(found.missing_keys) == {f"blocks.{i}.attn.{key}" for i in range(2) for key in new}
    assert found.unexpected_keys == []
    assert torch.equal(model.blocks[1].attn.qkv.weight, state["blocks.1.attn.qkv.weight"])
    for block in model.blocks:
        assert not block.attn.local.weight.any()
        assert name != "sima_local" or (block.attn.gain == 1).all()


@pytest.mark.parametrize("name", ["sima_local", "sima_rope", "relu2", "relu2_wide"])
def test_is_free_of_exp(name):
    assert_exp_free(create_attention(name, H * D, H), torch.randn(1, 17, H * D))
    assert_exp_free(vit(attn_layer=type(create_attention(name, 8, 2)), act_layer=torch.nn.ReLU), 64)


@of_own_code
def test_one_compiled_module_serves_several_image_sizes(name):
    torch._dynamo.reset()
    module = build(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for N in (17, 26, 37):
        x = tokens(N)
        assert_close(compiled(x), module(x))


@of_own_code
@needs_cpp
def test_a_model_compiles_with_inductor(name):
    torch._dynamo.reset()
    model = vit(attn_layer=type(build(name)), depth=1, dynamic_img_size=True)
    follow_image_grid(model)
    torch.nn.init.normal_(model.blocks[0].attn.local.weight)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for x in (torch.randn(2, 3, 64, 64), torch.randn(2, 3, 32, 128)):  # both have 16 patches
            assert_close(compiled(x), model(x), 1e-5)


@every
def test_a_model_exports_for_any_batch(name):
    model = vit(attn_layer=type(build(name)))
    follow_image_grid(model)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.local.weight)
    images = torch.randn(2, 3, 64, 64)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    more = torch.randn(5, 3, 64, 64)
    assert_close(program.module()(more), model(more), 1e-5)


def test_sima_local_is_a_sima_attention():
    """So that maps, export and token masks treat it as one."""
    assert issubclass(SimLocalAttention, SimAttention)
    assert "LocalValues(24, grid=(2, 8), prefix_tokens=None)" in repr(build("sima_local", grid=(2, 8)))
