"""The patch embedding as a matrix product."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed

from closeness import assert_close
from sima_attn.models.patch_embed import PatchConv2d, ProductPatchEmbed, project_patches


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_product_is_the_convolution(memory_format):
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64).to(memory_format=memory_format)
    weight, bias = torch.randn(5, 3, 16, 8, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    assert_close(project_patches(images, weight, bias), F.conv2d(images, weight, bias, stride=(16, 8)))


def test_parameters_are_those_of_timm():
    def build(layer):
        torch.manual_seed(0)
        return timm.create_model("vit_tiny_patch16_224", depth=1, embed_layer=layer).state_dict()

    ours, theirs = build(ProductPatchEmbed), build(PatchEmbed)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_our_vits_have_it_and_compute_the_convolution_on_the_cpu():
    model = timm.create_model("sima_deit_tiny_patch16_224", depth=1).eval()
    conv = model.patch_embed.proj
    assert isinstance(conv, PatchConv2d)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(conv(images), F.conv2d(images, conv.weight, conv.bias, stride=16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_on_a_gpu(autocast):
    conv = PatchConv2d(3, 64, 16, 16).cuda()
    images = torch.randn(2, 3, 64, 96, device="cuda")
    expected = F.conv2d(images.double(), conv.weight.double(), conv.bias.double(), stride=16)
    if autocast:
        with torch.autocast("cuda", torch.bfloat16):
            out = conv(images)
    else:
        out = conv.bfloat16()(images.bfloat16())
    assert out.dtype == torch.bfloat16
    assert_close(out.double(), expected, 2e-2)
