"""`token_ref` of a whole model: what it is at the training size, what it makes of another, and that it goes again."""

import pytest
import timm
import torch

import sima_attn  # noqa: F401  registers the models
from closeness import assert_close
from sima_attn.nn import SimMultiheadAttention
from sima_attn.nn.token_ref import set_token_ref, sima_modules, tokens_at, trained_at

SMALL = {"depth": 2, "num_classes": 5}


def model_of(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL, **kwargs).eval().double()


@pytest.mark.parametrize("name", ["sima_vit_mini_patch4_64", "sima_xcit_mini_p4_64"])
def test_it_is_what_the_model_is_built_with_for_its_training_size(name):
    image = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    model, known = model_of(name), model_of(name, token_ref="train")
    plain = model(image)
    with trained_at(model, 64):
        assert_close(model(image), known(image))
    assert torch.equal(model(image), plain)
    set_token_ref(model, 64)
    assert_close(model(image), known(image))


def test_at_the_training_size_it_changes_nothing():
    model, image = model_of("sima_xcit_mini_p4_64"), torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with trained_at(model, 64):
        changed = model(image)
    assert_close(changed, model(image))


def test_modules_are_asked_one_by_one_and_the_model_stays_as_it_was():
    model = model_of("sima_xcit_mini_p4_64").train()
    blocks, *class_attention = tokens_at(model, sima_modules(model), 64)[1:]
    assert blocks == 256
    assert class_attention == [257, 257]  # the class token is among them
    assert model.training


class TokensFirst(torch.nn.Module):
    """Images -> tokens [N, B, C] -> attention by torch's interface, with keyword inputs."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Conv2d(3, 8, 4, 4)
        self.attention = SimMultiheadAttention(8, 2)

    def forward(self, images):
        x = self.embed(images).flatten(2).permute(2, 0, 1)
        return self.attention(query=x, key=x, value=x)[0]


def test_tokens_are_counted_where_they_come_first_and_as_keywords():
    model = TokensFirst()
    assert tokens_at(model, [model.attention], 16) == [16]


def test_a_module_keeps_its_own_and_what_was_before_comes_back_after_an_error():
    model = model_of("sima_vit_mini_patch4_64")
    model.blocks[0].attn.token_ref = 100.0

    def fail_inside():
        with trained_at(model, 64):
            assert [module.token_ref for module in sima_modules(model)] == [100, 256]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [module.token_ref for module in sima_modules(model)] == [100, None]


def test_where_every_module_has_one_no_forward_pass_is_needed():
    options = {"attention": "sima_local", "attention_options": {"grid": (1, 2)}}  # at 64 px there are 4 x 4 tokens
    model = model_of("sima_deit_tiny_patch16_224", **options)
    with trained_at(model, 64):
        assert {module.token_ref for module in sima_modules(model)} == {1.0}


def test_a_model_without_sima_is_an_error():
    with pytest.raises(ValueError, match="this model has no SimA attention"):
        set_token_ref(model_of("sima_vit_mini_patch4_64", attention="softmax"), 64)
