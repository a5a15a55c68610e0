"""What `test_sequence_parallel.py` runs in each process of a group."""

import copy
from unittest import mock

import pytest
import split_softmax
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from closeness import assert_close
from sima_attn.nn import SimAttention, SimClassAttention, SimCrossAttention, SimLocalAttention, SimMultiheadAttention
from sima_attn.ops import Plan, plan, sima_attention, sima_attention_qkv
from sima_attn.ops.communication_cost import ring_traffic, ulysses_traffic
from sima_attn.ops.cost import AttentionShape
from sima_attn.ops.sequence_parallel import SumOverProcesses
from token_parts import (
    EMPTY,
    EVEN,
    UNEVEN,
    all_reduce_sizes,
    assert_equals_one_process,
    output_and_gradients,
    part,
    parts,
    summed,
)


def comparison_finds_a_missing_sum(group):
    def without_group(*tensors, group, **options):
        return sima_attention(*tensors, **options)

    with pytest.raises(AssertionError, match="relative error"):
        assert_equals_one_process(group, EVEN, EVEN, attend=without_group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SumOverProcesses, "backward", lambda ctx, grad: (grad, None))
        with pytest.raises(AssertionError, match="relative error"):
            assert_equals_one_process(group)


def operator(group):
    for tokens in (EVEN, UNEVEN, EMPTY):
        assert_equals_one_process(group, tokens, tokens)


def queries_and_keys_split_differently(group):
    assert_equals_one_process(group, EVEN, EMPTY)
    assert_equals_one_process(group, EMPTY, UNEVEN)


def masks_and_token_ref(group):
    for masks in ("key_mask", "query_mask", "key_mask and query_mask"):
        assert_equals_one_process(group, masks=masks, token_ref=7.0)
    assert_equals_one_process(group, token_ref=7.0, order="kv", backend="eager", eps=1e-6)


def channels_of_zeros(group):
    q, k, v = torch.randn(3, 1, 1, UNEVEN, 4, dtype=torch.float64)
    q[..., 0] = k[..., 1] = 0
    weight = torch.randn_like(q)
    found = output_and_gradients(sima_attention, [part(x, 2) for x in (q, k, v)], part(weight, 2), group=group)
    for x, whole in zip(found, output_and_gradients(sima_attention, [q, k, v], weight), strict=True):
        assert_close(x, part(whole, 2))


def lower_precision(group):
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        assert_equals_one_process(group, dtype=dtype, masks="key_mask", token_ref=7.0, bound=bound)
    in_autocast = torch.autocast("cpu", torch.bfloat16)(sima_attention)
    assert_equals_one_process(group, dtype=torch.float32, bound=1e-5, attend=in_autocast)


def packed_projection(group):
    qkv = torch.randn(2, UNEVEN, 3, 2, 4, dtype=torch.float64)
    mask = torch.rand(2, UNEVEN) > 0.4
    found = sima_attention_qkv(part(qkv, 1), token_mask=part(mask, 1), token_ref=7, group=group)
    assert_close(found, part(sima_attention_qkv(qkv, token_mask=mask, token_ref=7), 1))


def second_derivatives(group):
    def penalty_gradients(tensors, **options):
        leaves = [x.clone().requires_grad_() for x in tensors]
        first = torch.autograd.grad(sima_attention(*leaves, **options).pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)

    tensors = torch.randn(3, 1, 1, UNEVEN, 3, dtype=torch.float64).unbind(0)
    found = penalty_gradients([part(x, 2) for x in tensors], group=group)
    for x, whole in zip(found, penalty_gradients(tensors), strict=True):
        assert_close(x, part(whole, 2))


def one_all_reduce_per_pass(group):
    B, H, D, Dv = 2, 3, 4, 6
    q, k, v = (torch.randn(B, H, n, d, requires_grad=True) for n, d in ((5, D), (7, D), (7, Dv)))
    for token_ref, gains in ((None, 0), (9.0, B)):
        sima_attention(q, k, v, token_ref=token_ref, group=group)  # the first call compares the options
        with all_reduce_sizes() as sizes:
            with CommDebugMode() as forward:
                o = sima_attention(q, k, v, token_ref=token_ref, group=group)
            with CommDebugMode() as backward:
                o.square().sum().backward()
        assert forward.get_total_counts() == backward.get_total_counts() == 1
        assert sizes == [B * H * (D * Dv + 2 * D) + gains] * 2


def bytes_that_softmax_sends(group):
    """Those of the cost model, by implementations that equal softmax attention of one process."""
    world = dist.get_world_size()
    q, k, v, weight = torch.randn(4, 2, 6, EVEN, 4, dtype=torch.float64)
    shape = AttentionShape(B=2, H=6, N=EVEN, D=4)
    expected = output_and_gradients(F.scaled_dot_product_attention, [q, k, v], weight)
    for attend, traffic in (
        (split_softmax.RingAttention.apply, ring_traffic(shape, world, itemsize=8)),
        (split_softmax.ulysses_attention, ulysses_traffic(shape, world, itemsize=8)),
    ):
        leaves = [part(x, 2).clone().requires_grad_() for x in (q, k, v)]
        split_softmax.sent.clear()
        o = attend(*leaves)
        forward = sum(split_softmax.sent)
        grads = torch.autograd.grad(o, leaves, part(weight, 2))
        assert (forward, sum(split_softmax.sent) - forward) == (traffic.forward, traffic.backward)
        for x, whole in zip((o, *grads), expected, strict=True):
            assert_close(x, part(whole, 2))


def meshes_and_process_groups(group):
    assert_equals_one_process(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "sequence"))
    assert_equals_one_process(mesh["sequence"])
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"a mesh with one dimension, got 2: \('data', 'sequence'\)"):
        sima_attention(q, q, q, group=mesh)
    with pytest.raises(ValueError, match=r"group must be a DeviceMesh, or a ProcessGroup .* got str"):
        sima_attention(q, q, q, group="sequence")


def group_of_one(group):
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "sequence"))["sequence"]
    q, k, v = torch.randn(3, 2, 2, 5, 8)
    assert plan(q, k, v, group=alone) == plan(q, k, v) == Plan("qk", "eager")
    assert torch.equal(sima_attention(q, k, v, group=alone), sima_attention(q, k, v))
    with pytest.raises(ValueError, match="at least 1"):
        sima_attention(q[:, :, :0], k, v, group=alone)
    module, x = SimClassAttention(8, 2), torch.randn(2, 5, 8)
    expected = module(x)
    module.group = alone
    assert torch.equal(module(x), expected)


def unsupported_order_and_backend(group):
    q = torch.randn(1, 1, 3, 8)
    assert plan(q, q, q, group=group) == Plan("kv", "eager")  # one process would choose "qk"
    with pytest.raises(ValueError, match="order 'qk' needs all keys on one process"):
        sima_attention(q, q, q, order="qk", group=group)
    with pytest.raises(ValueError, match="backend 'triton' does not support this call"):
        sima_attention(*[q.double()] * 3, backend="triton", group=group)


def disagreement_is_an_error_on_every_process(group):
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for shape, options, message in (
        ((3, 1, 1, 3, 5), {}, "process 0: B=2, .*: B=1, "),
        ((3, 2, 1, 3, 6), {}, "only the number of tokens may differ.* D=5, .* D=6, "),
        ((3, 2, 1, 3, 5), {"token_ref": 9.0}, "token_ref=None.*token_ref=9.0"),
        ((3, 2, 1, 3, 5), {"eps": 1e-6}, "eps=1e-12.*eps=1e-06"),
    ):
        q, k, v = torch.randn(shape if is_last else (3, 2, 1, 3, 5))
        with pytest.raises(ValueError, match=f"(?s){message}"):
            sima_attention(q, k, v, group=group, **(options if is_last else {}))
    q, k, v = torch.randn(3, 2, 1, 3, 5)
    with pytest.raises(ValueError, match=r"(?s)gradient=False.*gradient=True"):
        sima_attention(q.requires_grad_(is_last), k, v, group=group)


def backends_that_cannot_send_are_an_error(group):
    """What a machine with GPUs does: without a backend the group gets NCCL, which needs a GPU for each process."""
    q = torch.randn(1, 1, 4, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        with pytest.raises(ValueError, match=r"on 'cpu', and the .* 'cuda:nccl', .*init_process_group\(\"gloo\"\)"):
            sima_attention(q, q, q, group=group)
    for message, error in (
        ("NCCL error\nDuplicate GPU detected : rank 1 and rank 0", (ValueError, "start one process per GPU")),
        ("the connection is lost", (dist.DistBackendError, "is lost")),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_object", mock.Mock(side_effect=dist.DistBackendError(message)))
            with pytest.raises(error[0], match=error[1]):
                sima_attention(q, q, q, group=group)
    sima_attention(q, q, q, group=group)


def compiled(group):
    compiled_attention = torch.compile(sima_attention, backend="aot_eager", fullgraph=True)
    assert_equals_one_process(group, attend=compiled_attention, masks="key_mask and query_mask", token_ref=7.0)
    x = tokens(3 + dist.get_rank())
    for kind in (SimAttention, SimClassAttention):
        module = kind(8, 2, group=group).double()
        assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), module(x))


def assert_module_equals_one_process(group, module, *tensors, call=None, **masks):
    """Outputs and gradients of the tensors are parts; gradients of the parameters are summed over the processes."""
    module, call, parameters = module.double(), call or module, list(module.parameters())
    weight = torch.randn_like(tensors[0])
    expected = output_and_gradients(call, tensors, weight, parameters, **masks)
    module.group = group
    mine = [part(x, 1) for x in tensors]
    found = output_and_gradients(call, mine, part(weight, 1), parameters, **parts(masks, 1))
    for i, (x, whole) in enumerate(zip(found, expected, strict=True)):
        if i <= len(tensors):
            assert_close(x, part(whole, 1))
        else:
            assert_close(summed(x), whole)


def tokens(N):
    return torch.randn(2, N, 8, dtype=torch.float64)


def self_attention_module(group):
    mask = torch.rand(2, UNEVEN) > 0.4
    for options in ({}, {"qk_norm": True, "norm_layer": torch.nn.LayerNorm, "token_ref": 7.0}):
        for N, masks in ((EMPTY, {}), (UNEVEN, {"token_mask": mask})):
            assert_module_equals_one_process(group, SimAttention(8, 2, **options), tokens(N), **masks)


def cross_attention_module(group):
    masks = {"query_mask": torch.rand(2, UNEVEN) > 0.4, "context_mask": torch.rand(2, EVEN) > 0.4}
    module = SimCrossAttention(8, 2, token_ref=7.0)
    assert_module_equals_one_process(group, module, tokens(UNEVEN), tokens(EVEN), **masks)


def multihead_module(group):
    module = SimMultiheadAttention(8, 2, batch_first=True)

    def call(x, key_padding_mask):
        return module(x, x, x, key_padding_mask, need_weights=False)[0]

    mask = torch.rand(2, UNEVEN) > 0.6
    assert_module_equals_one_process(group, module, tokens(UNEVEN), call=call, key_padding_mask=mask)
    x = tokens(4)
    with pytest.raises(ValueError, match="need_weights must be False with a group"):
        module(x, x, x)


def class_attention_module(group):
    for N, options in ((UNEVEN, {}), (EMPTY, {"token_ref": 4.0, "eps": 0.5})):
        module = SimClassAttention(8, 2, **options).double()
        parameters = list(module.parameters())
        class_token, patches = tokens(1), tokens(N)
        weights = torch.randn(dist.get_world_size(), 2, 1, 8, dtype=torch.float64)  # each process has its own loss

        def attend(class_token, patches, module=module):
            return module(torch.cat([class_token, patches], 1))

        expected = output_and_gradients(attend, [class_token, patches], weights.sum(0), parameters)
        module.group = group
        mine = [class_token, part(patches, 1)]
        o, for_class, for_patches, *others = output_and_gradients(attend, mine, weights[dist.get_rank()], parameters)
        assert_close(o, expected[0])  # on every process
        assert_close(for_patches, part(expected[2], 1))
        for x, whole in zip((for_class, *others), (expected[1], *expected[3:]), strict=True):
            assert_close(summed(x), whole)


def class_attention_drops_entries(group):
    module = SimClassAttention(8, 2, attn_drop=0.5, group=group).double()
    x = tokens(5)
    assert not torch.equal(module(x), module(x))
    module.attn_drop.p = 1.0
    assert torch.equal(module(x), module.proj.bias.expand(2, 1, 8))


def modules_that_do_not_support_a_group(group):
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match="group supports norm='l1' only, got norm='l2'"):
        SimAttention(8, 2, norm="l2", group=group)(x)
    with pytest.raises(ValueError, match=r"omit group, and split the whole model with parallelize"):
        SimLocalAttention(8, 2, group=group)


def copied_modules_keep_their_group(group):
    module = SimAttention(8, 2, group=group)
    x = torch.randn(2, 4, 8)
    assert torch.equal(copy.deepcopy(module)(x), module(x))


CASES = [
    comparison_finds_a_missing_sum,
    operator,
    queries_and_keys_split_differently,
    masks_and_token_ref,
    channels_of_zeros,
    lower_precision,
    packed_projection,
    second_derivatives,
    one_all_reduce_per_pass,
    bytes_that_softmax_sends,
    meshes_and_process_groups,
    group_of_one,
    unsupported_order_and_backend,
    disagreement_is_an_error_on_every_process,
    backends_that_cannot_send_are_an_error,
    compiled,
    self_attention_module,
    cross_attention_module,
    multihead_module,
    class_attention_module,
    class_attention_drops_entries,
    modules_that_do_not_support_a_group,
    copied_modules_keep_their_group,
]
