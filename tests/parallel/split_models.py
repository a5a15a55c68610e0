"""What `test_parallelize.py` runs in each process of a group.

Every process builds the same model, draws the same images, and compares logits, gradients and running statistics of
the parallelized model with those of the model in one process.
"""

import copy
import pickle
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, DropPath, HybridEmbed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import sima_attn  # registers the models  # noqa: F401
from closeness import assert_close
from sima_attn import convert, parallelize
from sima_attn.nn.rotation import Rotation
from sima_attn.ops.communication_cost import sima_message
from sima_attn.ops.cost import AttentionShape
from sima_attn.ops.linear_attention import relu2_attention
from sima_attn.parallel import unparallelize
from sima_attn.parallel.layers import SharedDropout, SplitConv2d, split_layers
from sima_attn.parallel.model import rows_of
from sima_attn.train.mesh import synchronize_batch_norm
from token_parts import all_reduce_sizes, summed

SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
CVT = {"embed_dims": (8, 8, 16), "depths": (1, 1, 2), "num_heads": (1, 2, 2), "num_classes": 5}
BUILT = {}


def model(name, *, training=True, **options):
    """A small model of a family, with random numbers in every parameter."""
    torch.manual_seed(1)
    built = timm.create_model(name, **options).double()
    for parameter in built.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return built.train(training)


def vit(name="sima_deit_tiny_patch16_224", **options):
    return model(name, **{**SMALL, "patch_size": 4, "img_size": 16, **options})


def mini(name, **options):
    return model(name, **{**SMALL, **options})


def images(height, width=None, batch=2):
    torch.manual_seed(2)
    return torch.randn(batch, 3, height, height if width is None else width, dtype=torch.float64)


def results(network, x):
    """Logits, the gradient of each parameter, and the buffers."""
    network.zero_grad()
    logits = network(x)
    F.cross_entropy(logits, torch.arange(len(x))).backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return logits.detach(), gradients, {name: buffer.clone() for name, buffer in network.named_buffers()}


def assert_equals_one_process(group, network, *sizes, bound=1e-11, change=None):
    """`change` is applied to the parallelized model."""
    split = parallelize(copy.deepcopy(network), group)
    if change is not None:
        change(split)
    for x in (images(*size) for size in sizes):
        logits, gradients, buffers = results(network, x)
        found, parts, own_buffers = results(split, x)
        assert_close(found, logits, bound)
        assert {name for name, part in parts.items() if part is None} == set()
        for name, gradient in gradients.items():
            if gradient is None:  # a parameter that the model does not use
                continue
            assert_close(summed(parts[name]) / dist.get_world_size(), gradient, bound)
        for name, buffer in buffers.items():
            assert_close(own_buffers[name], buffer, bound)
    assert list(split.state_dict()) == list(network.state_dict())
    return split


def comparison_finds_a_wrong_part(group):
    network = mini("sima_xcit_mini_p4_64")
    assert_equals_one_process(group, network, (16, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sima_attn.parallel.layers.with_halo", lambda x, group, **_: F.pad(x, (0, 0, 1, 1)))
        with pytest.raises(AssertionError, match=r"relative error|shape"):
            assert_equals_one_process(group, network, (16, 16))


def class_token(group):
    network = vit(img_size=(28, 12))
    split = assert_equals_one_process(group, network, (28, 12), (26, 11))  # the second is padded to whole patches
    # timm resamples position embeddings in float32, so this cannot be closer: 4 x 6 patches.
    assert_equals_one_process(group, network, (15, 21), bound=1e-6)
    assert type(split).__name__ == "SplitVisionTransformer"


def registers_and_token_ref(group):
    network = vit(img_size=(28, 16), reg_tokens=2, token_ref=9.0, init_values=0.5, no_embed_class=True)
    assert_equals_one_process(group, network, (28, 16))
    everything = vit(img_size=(28, 16), reg_tokens=1, global_pool="avg", pool_include_prefix=True, qk_norm=True)
    assert_equals_one_process(group, everything, (28, 16))


def average_pooling(group):
    assert_equals_one_process(group, mini("sima_vit_mini_patch4_64", img_size=(28, 12)), (28, 12))


def local_mixer(group):
    assert_equals_one_process(group, mini("sima_vit_mini_patch4_64_local", img_size=20), (20, 20))
    assert_equals_one_process(group, mini("sima_vit_mini_patch4_64_local", img_size=(28, 16)), (28, 16))


def convolutions_of_v(group):
    """With a class token on the first process, registers or none; each process has other rows of the grid."""
    for name in ("sima_local", "relu2", "relu2_wide"):
        network = vit(img_size=(28, 12), attention=name, reg_tokens=2)
        split = assert_equals_one_process(group, network, (28, 12))
        assert type(split.blocks[0].attn.local).__name__ == "SplitLocalValues"
        assert_equals_one_process(group, mini("sima_xcit_mini_p4_64", attention=name, class_attention="sima"), (28, 12))


def rotations(group):
    """Each process has the positions of its rows in the whole image, also where they are scaled to another grid."""
    for name in ("sima_rope", "relu2_rope"):
        options = {"attention": name, "attention_options": {"grid_ref": (4, 4)}}
        split = assert_equals_one_process(group, vit(img_size=(28, 12), reg_tokens=2, **options), (28, 12))
        assert type(split.blocks[0].attn.rotation).__name__ == "SplitRotation"
        assert type(unparallelize(split).blocks[0].attn.rotation) is Rotation
        options |= {"class_attention": "sima"}
        assert_equals_one_process(group, mini("sima_xcit_mini_p4_64", **options), (28, 12), (18, 8))


def convolutions_of_converted_models(group):
    converted = timm.create_model("vit_tiny_patch16_224", **SMALL, patch_size=8, img_size=(48, 16)).double()
    convert(converted, "sima_local", example_inputs=images(48, 16))
    for block in converted.blocks:
        nn.init.normal_(block.attn.local.weight)
    assert_equals_one_process(group, converted, (48, 16))


def sums_of_relu2(group):
    """One all-reduce of D x Dv + D numbers per head in each direction, and an exchange of halo rows for v."""
    split = parallelize(vit(img_size=(28, 16), attention="relu2", depth=1, global_pool="avg"), group)
    x = images(28, 16)
    split(x)  # the first call compares shapes
    with all_reduce_sizes() as sent:
        split(x).sum().backward()
    B, H, D, C = len(x), SMALL["num_heads"], 8, SMALL["embed_dim"]
    state, pooled = B * H * (D * D + D), B * (C + 1)
    assert sent == [state, pooled, pooled, state]
    q, k, v = torch.randn(3, 1, 1, 4, 2).unbind(0)
    for options in ({"order": "qk"}, {"backend": "triton"}):
        with pytest.raises(ValueError, match="relu2 with a group is computed in plain torch and in the order 'kv'"):
            relu2_attention(q, k, v, group=group, **options)


def without_grid(name):
    network = vit(attention=name)
    for module in network.modules():
        vars(module).pop("image_grid", None)
    return network


def xcit(group):
    network = model("sima_xcit_nano_12_p8_224", **SMALL, tokens_norm=True, token_ref=9.0)
    assert_equals_one_process(group, network, (40, 24), (37, 19))  # the second is not whole patches
    assert_equals_one_process(group, model("sima_xcit_nano_12_p16_224", **SMALL, global_pool="avg"), (56, 20))
    assert_equals_one_process(group, model("sima_xcit_nano_12_p16_224_nolpi", **SMALL, use_pos_embed=False), (48, 16))


def mini_xcit(group):
    split = assert_equals_one_process(group, mini("sima_xcit_mini_p4_64", class_token_ref=3.0), (28, 12))
    split.eval()
    whole = mini("sima_xcit_mini_p4_64", class_token_ref=3.0, training=False)
    whole.load_state_dict(split.state_dict())
    assert_close(split(images(28)), whole(images(28)))


def cvt(group):
    assert_equals_one_process(group, model("sima_cvt_13", **CVT), (101, 40))
    mean = model("sima_cvt_13", **CVT, global_pool="avg", token_ref="train")
    assert_equals_one_process(group, mean, (96, 32))


def timm_models(group):
    network = timm.create_model("vit_tiny_patch16_224", **SMALL, patch_size=8, img_size=(48, 16)).double()
    message = r"blocks.0.attn \(Attention\): .*convert\(model\)"
    before = str(network)
    with pytest.raises(ValueError, match=message):
        parallelize(network, group)
    assert str(network) == before
    convert(network, example_inputs=images(48, 16))
    split = assert_equals_one_process(group, network, (48, 16))
    with pytest.raises(ValueError, match="takes images of 48 x 16 pixels, got 56 x 16"):
        split(images(56, 16))
    network = model("xcit_nano_12_p16_224", **SMALL)
    convert(network, example_inputs=images(64))
    assert_equals_one_process(group, network, (64, 32))


def evaluation(group):
    for network in (mini("sima_xcit_mini_p4_64", training=False), model("sima_cvt_13", training=False, **CVT)):
        with torch.no_grad():
            x = images(100, 24)
            assert_close(parallelize(copy.deepcopy(network), group)(x), network(x))


def low_precision(group):
    network = mini("sima_xcit_mini_p4_64").float()
    x = images(28, 12).float()
    split = parallelize(copy.deepcopy(network), group)
    assert_close(split(x), network(x), 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = split(x), network(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert_close(found, expected, 0.05)


def messages(group):
    """The all-reduces of a step are those of the cost model, and of the pooled class token; there are no others."""
    x = images(28, 16)
    for token_ref in (None, 9.0):
        split = parallelize(vit(img_size=(28, 16), token_ref=token_ref), group)
        split(x)  # the first call compares shapes
        with all_reduce_sizes() as sent, CommDebugMode() as all_messages:
            split(x).sum().backward()
        B, C, depth = len(x), SMALL["embed_dim"], SMALL["depth"]
        shape = AttentionShape(B=B, H=2, N=29, D=8)
        layer, pooled = sima_message(shape, token_ref=token_ref is not None) // 4, B * C
        assert sent == [*[layer] * depth, pooled, pooled, *[layer] * depth]
        assert all_messages.get_total_counts() == len(sent)


def halo_messages(group):
    """A convolution sends its halo rows, and their gradients back."""
    layers = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, dtype=torch.float64))
    split_layers(layers, group)
    x = images(8).requires_grad_()
    with CommDebugMode() as all_messages:
        layers(x).sum().backward()
    counts = all_messages.get_comm_counts()
    assert sum(counts.values()) == 2, counts


def recomputed_blocks(group):
    for network in (vit(), mini("sima_vit_mini_patch4_64_local", img_size=16)):
        recomputed = parallelize(copy.deepcopy(network), group)
        recomputed.set_grad_checkpointing(True)
        first, second = results(recomputed, images(16)), results(parallelize(network, group), images(16))
        for name, gradient in first[1].items():
            assert_close(gradient, second[1][name])
    for network in (mini("sima_xcit_mini_p4_64"), model("sima_cvt_13", **CVT)):
        network.eval()  # in training the running statistics move twice, as in one process
        assert_equals_one_process(group, network, (96, 16), change=lambda m: (m.eval(), m.set_grad_checkpointing(True)))


def compiled(group):
    network = mini("sima_xcit_mini_p4_64", depth=1, attention="sima_rope", class_attention="sima")
    change = lambda m: m.compile(backend="aot_eager", fullgraph=True)  # noqa: E731
    assert_equals_one_process(group, network, (28, 12), change=change)


def data_parallel_wrapper(group):
    for network in (vit(img_size=(96, 12)), mini("sima_xcit_mini_p4_64"), model("sima_cvt_13", **CVT)):
        x = images(96, 12)
        _, gradients, _ = results(network, x)
        wrapped = DistributedDataParallel(parallelize(network, group))
        for _ in range(2):  # an unused parameter is an error of the second pass
            _, averaged, _ = results(wrapped, x)
        for name, gradient in gradients.items():
            assert_close(averaged[f"module.{name}"], gradient, 1e-11)


def sharded_parameters(group):
    """FSDP averages the gradients, too; here over the processes that share the images."""
    for network in (vit(img_size=(28, 12)), mini("sima_xcit_mini_p4_64")):
        x = images(28, 12)
        _, gradients, _ = results(network, x)
        split = parallelize(network, group)
        for block in split.blocks:
            fully_shard(block, mesh=group)
        fully_shard(split, mesh=group)
        F.cross_entropy(split(x), torch.arange(len(x))).backward()
        for name, parameter in split.named_parameters():
            assert_close(parameter.grad.full_tensor(), gradients[name], 1e-11)


def drop_path_drops_the_same_samples(group):
    network, x = vit(drop_path_rate=0.5, drop_rate=0.5, proj_drop_rate=0.1), images(16, batch=4)
    split = parallelize(network, group)
    torch.manual_seed(dist.get_rank())  # the generators need not agree
    logits = split(x)
    assert_close(summed(logits) / dist.get_world_size(), logits)
    assert not torch.equal(split(x), logits)
    dropped = [m for m in network.modules() if isinstance(m, DropPath)]
    assert {type(m).__name__ for m in dropped} == {"SplitDropPath"}


def class_attention_drops_the_same(group):
    x = images(16)
    split = parallelize(mini("sima_xcit_mini_p4_64", proj_drop_rate=0.5, drop_rate=0.5, drop_path_rate=0.5), group)
    torch.manual_seed(dist.get_rank())
    logits = split(x)
    assert_close(summed(logits) / dist.get_world_size(), logits)
    block = split.cls_attn_blocks[0]
    assert isinstance(block.mlp.drop1, SharedDropout)
    assert isinstance(block.attn.proj_drop, SharedDropout)


def drop_path_of_one_process(group):
    network = vit(drop_path_rate=0.5)
    split, x = parallelize(copy.deepcopy(network), group), images(16, batch=8)
    torch.manual_seed(3)
    expected = network(x)
    torch.manual_seed(3)
    assert_close(split(x), expected)


def undone(group):
    for network in (vit(), mini("sima_xcit_mini_p4_64"), model("sima_cvt_13", **CVT)):
        before, x = str(network), images(96, 16)
        network.eval()
        expected = network(x) if dist.get_rank() == 0 else None
        assert unparallelize(parallelize(network, group)) is network
        assert str(network) == before
        assert not [m for m in network.modules() if getattr(m, "group", None) is not None]
        if expected is not None:
            assert torch.equal(network(x), expected)  # without the other processes
    assert unparallelize(network) is network


def repeated_and_copied(group):
    network = vit()
    split = parallelize(network, group)
    assert split is network
    assert parallelize(split, group) is split
    with pytest.raises(ValueError, match="parallelized over other processes already"):
        parallelize(split, dist.new_group())
    x = images(16)
    assert torch.equal(copy.deepcopy(split)(x), split(x))
    with pytest.raises(ValueError, match="does not return feature maps"):
        split.forward_intermediates(x)
    with pytest.raises(ValueError, match="no attention masks"):
        split.forward_features(x, is_causal=True)


def meshes(group):
    network = vit()
    x = images(16)
    expected = network(x)
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "sequence"))
    assert type(parallelize(network, alone)) is type(vit())
    both = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "sequence"))
    for mesh in (both, both["sequence"], dist.group.WORLD):
        assert_close(copy.deepcopy(parallelize(copy.deepcopy(network), mesh))(x), expected)
    unnamed = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tokens"))
    with pytest.raises(ValueError, match=r"none is named 'sequence'"):
        parallelize(network, unnamed)
    with pytest.raises(ValueError, match="group must be a DeviceMesh"):
        parallelize(network, "sequence")


def batch_norm_of_all_processes(group):
    """What `sima train` does on CUDA devices: here the processes that share an image are all."""
    network = mini("sima_xcit_mini_p4_64")
    fabric = SimpleNamespace(device=torch.device("cpu"), world_size=dist.get_world_size())
    assert_equals_one_process(group, network, (28, 12), change=lambda m: synchronize_batch_norm(m, fabric))
    assert isinstance(synchronize_batch_norm(network, fabric).patch_embed.proj[0][1], nn.SyncBatchNorm)


def too_few_rows(group):
    split = parallelize(vit(), group)
    size = dist.get_world_size()
    with pytest.raises(ValueError, match=f"images of 4 rows have 1 units of 4 rows, fewer than the {size} processes"):
        split(images(4, 16))
    with pytest.raises(ValueError, match="units of 32 rows, fewer than"):
        parallelize(model("sima_cvt_13", **CVT), group)(images(31))


def different_images(group):
    split = parallelize(vit(), group)
    with pytest.raises(ValueError, match=r"(?s)pass the same images:.*0: \[2, 3, 20, 16\].*\[2, 3, 24, 16\]"):
        split(images(20 if dist.get_rank() == 0 else 24, 16))


def unsupported_models(group):
    for network, message in (
        (timm.create_model("resnet18"), "does not support ResNet; supported: VisionTransformer"),
        (vit(global_pool="max", class_token=False), "global_pool 'token' and 'avg', and the model has 'max'"),
        (vit(attention="softmax"), r"blocks.0.attn \(SoftmaxAttention\): .* convert\(model\)"),
        (without_grid("sima_local"), r"blocks.0.attn.local \(LocalValues\): .*follow_image_grid"),
        (without_grid("sima_rope"), r"blocks.0.attn.rotation \(Rotation\): .*follow_image_grid"),
        (vit(attention_options={"norm": "l2"}), r"it has norm='l2', order='auto'"),
        (vit(patch_drop_rate=0.5), r"patch_drop \(PatchDropout\): .*patch_drop_rate=0"),
        (mini("sima_xcit_mini_p4_64", class_attention="softmax"), r"cls_attn_blocks.0.attn \(ClassAttn\)"),
        (
            timm.create_model("vit_base_patch16_xp_224", **SMALL),
            r"blocks.0 \(ParallelScalingBlock\): paral",
        ),
        (timm.create_model("xcit_nano_12_p16_224", **SMALL), r"blocks.0.attn \(XCA\): .* convert\(model\)"),
        (nn.Sequential(vit()), "does not support Sequential"),
    ):
        before = [type(module) for module in network.modules()]
        with pytest.raises(ValueError, match=message):
            parallelize(network, group)
        assert [type(module) for module in network.modules()] == before
    reason = "parallelize does not know|it has padding='same'"
    for place, module in (
        ("norm_pre", nn.BatchNorm1d(16)),
        ("norm_pre", BatchNormAct2d(16)),
        ("norm_pre", nn.Conv2d(16, 16, 3, padding="same")),
        ("patch_embed", HybridEmbed(nn.Conv2d(3, 16, 4, 4), img_size=16)),
    ):
        network = vit()
        network.set_submodule(place, module)
        with pytest.raises(ValueError, match=rf"{place} \({type(module).__name__}\): ({reason})"):
            parallelize(network, group)


def pickled_classes(group):
    split = parallelize(vit(), group)
    assert pickle.loads(pickle.dumps(type(split))) is type(split)


def halo(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    for kernel, stride, padding, dilation in (
        *((k, s, p, 1) for k in (1, 2, 3, 5, 7) for s in (1, 2, 4) for p in (0, 1, 2, 3) if p < k),
        (3, 1, 2, 2),
        (3, 2, 1, 2),
    ):
        for height in (8 * size, 8 * size + 3):
            conv = nn.Conv2d(2, 3, kernel, stride, padding, dilation, dtype=torch.float64)
            whole = torch.randn(2, 2, height, 9, dtype=torch.float64, requires_grad=True)
            if height + 2 * padding < kernel or 9 + 2 * padding < dilation * (kernel - 1) + 1:
                continue
            expected = conv(whole)
            weight = torch.randn_like(expected)
            gradients = torch.autograd.grad((expected * weight).sum(), [whole, conv.weight, conv.bias])
            own = rows_of(rank, size, height, 8)
            layers = nn.Sequential(copy.deepcopy(conv))
            split_layers(layers, group)
            part = whole.detach()[:, :, own].requires_grad_()
            found = layers(part)
            mine = slice(own.start // stride, expected.shape[2] if rank == size - 1 else own.stop // stride)
            assert_close(found, expected[:, :, mine])
            for_part, *others = torch.autograd.grad((found * weight[:, :, mine]).sum(), [part, *layers.parameters()])
            assert_close(for_part, gradients[0][:, :, own])
            for one, total in zip(others, gradients[1:], strict=True):
                assert_close(summed(one), total, 1e-11)
            assert isinstance(layers[0], SplitConv2d) or (padding == 0 and kernel <= stride)


def halo_of_a_small_part(group):
    conv = nn.Sequential(nn.Conv2d(1, 1, 7, padding=3))
    split_layers(conv, group)
    with pytest.raises(ValueError, match="a neighboring process reads 3 rows, and this one has 2"):
        conv(torch.randn(1, 1, 2, 9))


CASES = [
    comparison_finds_a_wrong_part,
    class_token,
    registers_and_token_ref,
    average_pooling,
    local_mixer,
    convolutions_of_v,
    rotations,
    convolutions_of_converted_models,
    sums_of_relu2,
    xcit,
    mini_xcit,
    cvt,
    timm_models,
    evaluation,
    low_precision,
    messages,
    halo_messages,
    recomputed_blocks,
    compiled,
    data_parallel_wrapper,
    sharded_parameters,
    drop_path_drops_the_same_samples,
    class_attention_drops_the_same,
    drop_path_of_one_process,
    undone,
    repeated_and_copied,
    meshes,
    batch_norm_of_all_processes,
    too_few_rows,
    different_images,
    unsupported_models,
    pickled_classes,
    halo,
    halo_of_a_small_part,
]
