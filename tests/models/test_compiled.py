"""compile_blocks: the same numbers, one compilation for blocks that are alike."""

import timm
import torch
from torch._dynamo.testing import CompileCounter

import sima_attn  # noqa: F401  registers the models
from sima_attn.models.compiled import compile_blocks

SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 5}


def model_of(name: str, **kwargs) -> torch.nn.Module:
    torch.manual_seed(0)
    torch.compiler.reset()
    return timm.create_model(name, **SMALL, **kwargs)


def test_alike_blocks_share_one_compilation_and_the_weights_stay_where_they_are():
    model, counter, images = model_of("sima_vit_mini_patch4_64"), CompileCounter(), torch.randn(2, 3, 64, 64)
    expected, names = model(images), list(model.state_dict())
    compiled = compile_blocks(model, backend=counter)
    assert compiled is model
    assert list(model.state_dict()) == names
    torch.testing.assert_close(compiled(images), expected)
    assert counter.frame_count == 1


def test_class_attention_is_a_second_kind_of_block():
    model, counter, images = model_of("sima_xcit_mini_p4_64").eval(), CompileCounter(), torch.randn(2, 3, 64, 64)
    expected = model(images)
    torch.testing.assert_close(compile_blocks(model, backend=counter)(images), expected)
    assert counter.frame_count == 2


def test_in_mixed_precision_the_first_block_shares_the_compilation_of_the_others():
    for name, kinds in (("sima_vit_mini_patch4_64", 1), ("sima_xcit_mini_p4_64", 2)):
        model, counter, images = model_of(name).eval(), CompileCounter(), torch.randn(2, 3, 64, 64)
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(images)
            torch.testing.assert_close(compile_blocks(model, backend=counter)(images), expected, atol=0.02, rtol=0.02)
        assert counter.frame_count == kinds


def test_blocks_that_differ_are_compiled_together():
    model = model_of("sima_vit_mini_patch4_64", drop_path_rate=0.1).eval()
    counter, images = CompileCounter(), torch.randn(2, 3, 64, 64)
    expected = model(images)
    compiled = compile_blocks(model, backend=counter)
    assert compiled is not model
    torch.testing.assert_close(compiled(images), expected)
    assert counter.frame_count == 1


def test_a_model_without_a_list_of_blocks_is_compiled_as_a_whole():
    layer, counter = torch.nn.Linear(3, 2), CompileCounter()
    compiled = compile_blocks(layer, backend=counter)
    torch.testing.assert_close(compiled(torch.ones(1, 3)), layer(torch.ones(1, 3)))
    assert counter.frame_count == 1
