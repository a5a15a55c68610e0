"""Rotations by position: timm's formula, which weights follow from them, and where they are refused."""

import pytest
import torch
from timm.layers import apply_rot_embed, build_rotary_pos_embed

from closeness import assert_close
from sima_attn.detect.backbone import self_attend
from sima_attn.nn import create_attention
from sima_attn.nn.grid import TokenLayout
from sima_attn.nn.rotation import GridPart, Rotation, on_part
from sima_attn.ops import sima_attention

B, H, D = 2, 3, 8
ROWS, COLUMNS = 3, 5


def tokens(prefix=0, dtype=torch.float64):
    return torch.randn(B, H, prefix + ROWS * COLUMNS, D, dtype=dtype)


def test_is_the_rotation_of_timm():
    x = tokens()
    sin, cos = build_rotary_pos_embed([ROWS, COLUMNS], dim=D, temperature=50.0, in_pixels=False, dtype=x.dtype)
    assert_close(Rotation(D, grid=(ROWS, COLUMNS))(x), apply_rot_embed(x, sin, cos), 1e-6)  # timm: float32 angles


def test_keeps_norms_and_prefix_tokens_and_the_token_in_the_corner():
    x = tokens(prefix=2)
    out = Rotation(D, grid=(ROWS, COLUMNS))(x)
    assert_close(out.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(out[:, :, :3], x[:, :, :3])
    assert not torch.isclose(out[:, :, 3:], x[:, :, 3:]).all(-1).any()


def test_products_depend_on_the_difference_of_positions_alone():
    """Of equal tokens everywhere: the same for all pairs with the same distance in rows and in columns."""
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64).expand(2, 1, 1, ROWS * COLUMNS, D)
    rotation = Rotation(D, grid=(ROWS, COLUMNS))
    products = (rotation(q) @ rotation(k).mT)[0, 0].view(ROWS, COLUMNS, ROWS, COLUMNS)
    assert_close(products[1:, 1:, 1:, 1:], products[:-1, :-1, :-1, :-1])
    assert not torch.isclose(products[0, 0, 0, 1], products[0, 0, 1, 0])


def test_relu2_rope_has_weights_that_are_not_negative_and_sum_to_one():
    module = create_attention("relu2_rope", H * D, H, grid=(ROWS, COLUMNS)).double()
    weights = module.matrix(tokens(), tokens())
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize("name", ["sima_rope", "relu2_rope", "softmax_rope"])
def test_equal_tokens_at_different_positions_get_different_outputs(name):
    """Without rotations all queries would see the same weights."""
    module = create_attention(name, H * D, H, grid=(ROWS, COLUMNS)).double()
    q, k = torch.randn(2, B, H, 1, D, dtype=torch.float64).abs().expand(2, B, H, ROWS * COLUMNS, D)
    out = module.core(q, k, tokens())
    assert not torch.isclose(out[:, :, 1:], out[:, :, :1]).all(-1).any()


def test_training_after_inference_and_half_precision():
    rotation = Rotation(D, grid=(ROWS, COLUMNS), base=7.0)
    x = tokens(dtype=torch.float32)
    with torch.inference_mode():
        expected = rotation(x)
    trained = x.clone().requires_grad_()
    rotation(trained).sum().backward()
    assert torch.equal(rotation(trained), expected)
    half = rotation(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert_close(half, expected, 1e-2)


def test_images_of_other_sizes_cover_the_angles_of_the_training_size():
    x, larger = tokens(), torch.randn(B, H, 4 * ROWS * COLUMNS, D, dtype=torch.float64)
    rotation = Rotation(D, grid_ref=(ROWS, COLUMNS), grid=(2 * ROWS, 2 * COLUMNS))
    small = Rotation(D, grid=(ROWS, COLUMNS))
    larger = larger.view(B, H, 2 * ROWS, 2 * COLUMNS, D)
    larger[:, :, ::2, ::2] = x.view(B, H, ROWS, COLUMNS, D)
    out = rotation(larger.flatten(2, 3)).view_as(larger)
    assert_close(out[:, :, ::2, ::2].flatten(2, 3), small(x))


def test_wrong_options_are_errors():
    with pytest.raises(ValueError, match=r"grid_ref must be None or a pair .* got 16"):
        create_attention("softmax_rope", 12, 3, grid_ref=16)
    with pytest.raises(ValueError, match="multiple of 4 channels per head, got 6; change num_heads"):
        create_attention("relu2_rope", 12, 2)
    with pytest.raises(ValueError, match=r"base must be larger than 1, got 1\.0"):
        Rotation(D, base=1.0)


@pytest.mark.parametrize("name", ["sima_rope", "relu2_rope"])
def test_padded_batches_have_no_common_grid_to_scale(name):
    module = create_attention(name, H * D, H, grid_ref=(ROWS, COLUMNS))
    with pytest.raises(ValueError, match="grid_ref scales positions to the grid of an image"):
        self_attend(module, torch.randn(B, ROWS * COLUMNS, H * D), torch.ones(B, ROWS * COLUMNS, dtype=torch.bool))


def test_parts_of_an_image_have_the_angles_of_the_whole_one():
    x, layout = tokens(prefix=2), TokenLayout(2, ROWS, COLUMNS)
    for grid_ref in (None, (7, 2)):
        rotation = Rotation(D, grid=(ROWS, COLUMNS), grid_ref=grid_ref)
        expected = rotation(x)
        below = x[:, :, 2:].unflatten(2, (ROWS, COLUMNS))[:, :, 1:, 2:4].flatten(2, 3)
        with on_part(torch.nn.Sequential(rotation), GridPart(TokenLayout(0, ROWS - 1, 2), (ROWS, COLUMNS), 1, 2)):
            part = rotation(below)
        assert_close(part, expected[:, :, 2:].unflatten(2, (ROWS, COLUMNS))[:, :, 1:, 2:4].flatten(2, 3))
        with on_part(rotation, GridPart(TokenLayout(2, 0, 0), (ROWS, COLUMNS))):
            assert torch.equal(rotation(x[:, :, :2]), x[:, :, :2])  # prefix tokens alone
        assert rotation.part_of(x.shape[2]) == GridPart(layout, (ROWS, COLUMNS))


def test_a_group_for_a_single_module_is_refused():
    with pytest.raises(ValueError, match="rotations need the position of each token in the whole image: omit group"):
        create_attention("sima_rope", H * D, H, group=object())


def test_sima_rope_starts_as_sima_of_rotated_tokens_at_one_scale_for_all_sizes():
    module = create_attention("sima_rope", H * D, H, grid=(ROWS, COLUMNS)).double()
    q, k, v = tokens(), tokens(), tokens()
    expected = sima_attention(module.rotation(q), module.rotation(k), v)
    assert_close(module.core(q, k, v), ROWS * COLUMNS / D * expected)
    assert module.token_ref == D
