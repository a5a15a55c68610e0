"""What `test_triton_sequence_parallel.py` runs in each process of a group: the fused kernels with split tokens."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import fast_interpreter
from closeness import assert_close
from recorder import Recorder
from sima_attn.ops import Plan, plan, sima_attention, sima_attention_qkv, triton_sequence_parallel, triton_tiles
from sima_attn.ops.triton_launchers import TracedLauncher
from token_parts import (
    EMPTY,
    EVEN,
    LONG,
    UNEVEN,
    all_reduce_sizes,
    assert_equals_one_process,
    output_and_gradients,
    part,
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Relative errors. Triton's interpreter cuts float32 off when it makes bfloat16 of it, a GPU rounds.
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
FORWARD = ["outer_products", "finish_forward", "apply_forward"]
BACKWARD = ["outer_products", "finish_backward", "apply_backward"]


def prepare():
    """Tiles smaller than the parts, several shares of a part, and NaN in all memory that kernels are to fill."""
    if CUDA:
        torch.cuda.init()  # all processes share one GPU; otherwise the mesh would take one for each
    else:
        fast_interpreter.install()
    triton_tiles.SMALLEST_SHARE, triton_tiles.SMALL_CALL = 16, 0
    empty = TracedLauncher.empty
    TracedLauncher.empty = lambda *args, **options: empty(*args, **options).fill_(torch.nan)


@contextmanager
def launches():
    """The names of the kernels that are launched in the context."""
    names = []

    def launch(self, kernel, *args, original=TracedLauncher.launch, **constants):
        names.append(kernel.fn.__name__)
        original(self, kernel, *args, **constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TracedLauncher, "launch", launch)
        yield names


def assert_kernels_equal_one_process(group, N=UNEVEN, M=UNEVEN, *, dtype=torch.float32, H=1, **options):
    """Forward and backward, by the kernels."""
    with launches() as names:
        assert_equals_one_process(group, N, M, dtype=dtype, bound=BOUNDS[dtype], backend="triton", H=H, **options)
    assert names.count("finish_forward") == names.count("finish_backward") == 1


def make(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def comparison_finds_a_missing_sum(group):
    original = triton_sequence_parallel.all_reduce
    for missing in (0, 1):  # that of the forward, that of the backward
        calls = []

        def all_reduce(x, members, missing=missing, calls=calls):
            calls.append(x)
            return x if len(calls) == missing + 1 else original(x, members)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_sequence_parallel, "all_reduce", all_reduce)
            with pytest.raises(AssertionError, match="relative error"):
                assert_kernels_equal_one_process(group)
        assert len(calls) == 2


def every_dtype(group):
    for dtype in BOUNDS:
        assert_kernels_equal_one_process(group, LONG, LONG, dtype=dtype, D=24, Dv=24)


def empty_parts(group):
    assert_kernels_equal_one_process(group, EMPTY, EMPTY)
    assert_kernels_equal_one_process(group, EMPTY, UNEVEN, token_ref=7.0)
    assert_kernels_equal_one_process(group, UNEVEN, EMPTY, masks="query_mask and key_mask")


def widths_of_keys_and_values(group):
    for D, Dv in ((24, 40), (128, 48)):
        assert_kernels_equal_one_process(group, D=D, Dv=Dv)


def masks_and_token_ref(group):
    for masks in ("key_mask", "query_mask"):
        assert_kernels_equal_one_process(group, UNEVEN, EVEN, H=2, masks=masks, token_ref=7.0)


def norms_below_eps(group):
    q, k, v, weight = make(4, 1, 1, UNEVEN, 16)
    q[..., 3] *= 1e-4
    k[..., 5] *= 1e-4
    mine = [part(x, 2) for x in (q, k, v)]
    found = output_and_gradients(sima_attention, mine, part(weight, 2), group=group, backend="triton", eps=0.5)
    expected = output_and_gradients(sima_attention, [q.double(), k.double(), v.double()], weight.double(), eps=0.5)
    for x, whole in zip(found, expected, strict=True):
        assert_close(x, part(whole, 2), 1e-5)
        for c in (3, 5):  # on their own: among the others a wrong gradient of theirs could go unnoticed
            assert_close(x[..., c], part(whole, 2)[..., c], 1e-4)


def padding_holds_nan(group):
    q, k, v, weight = make(4, 1, 2, UNEVEN, 16)
    real = torch.arange(UNEVEN, device=DEVICE) % 3 > 0
    alone = output_and_gradients(sima_attention, [x[:, :, real] for x in (q, k, v)], weight[:, :, real], token_ref=7.0)
    mask = part(real[None], 1)
    leaves = [part(x, 2).masked_fill(~mask[:, None, :, None], torch.nan).requires_grad_() for x in (q, k, v)]
    options = {"query_mask": mask, "key_mask": mask, "token_ref": 7.0, "backend": "triton", "group": group}
    o = sima_attention(*leaves, **options)
    grads = torch.autograd.grad(o, leaves, part(weight, 2).masked_fill(~mask[:, None, :, None], torch.nan))
    for x, expected in zip((o, *grads), alone, strict=True):
        padded = torch.zeros_like(q)
        padded[:, :, real] = expected
        assert_close(x, part(padded, 2), 1e-5)


def dead_channels(group):
    q, k, v, weight = make(4, 1, 2, UNEVEN, 16, dtype=torch.float16)
    q[..., 0] = k[..., 1] = 0
    mine = [part(x, 2) for x in (q, k, v)]
    found = output_and_gradients(sima_attention, mine, part(weight, 2), group=group, backend="triton")
    expected = output_and_gradients(sima_attention, [q.double(), k.double(), v.double()], weight.double())
    for x, whole in zip(found, expected, strict=True):
        assert_close(x[..., 2:], part(whole, 2)[..., 2:], BOUNDS[torch.float16])


def packed_projection(group):
    """The gradient is packed, and nothing with a row per token is copied."""
    qkv, weight = make(2, UNEVEN, 3, 2, 16), make(2, UNEVEN, 2, 16)
    mask = torch.rand(2, UNEVEN, device=DEVICE) > 0.4
    options = {"token_ref": 7.0, "backend": "triton", "group": group}
    found = output_and_gradients(
        sima_attention_qkv, [part(qkv, 1)], part(weight, 1), token_mask=part(mask, 1), **options
    )
    expected = output_and_gradients(sima_attention_qkv, [qkv.double()], weight.double(), token_mask=mask, token_ref=7.0)
    for x, whole in zip(found, expected, strict=True):
        assert_close(x, part(whole, 1), 1e-5)
    mine = part(qkv, 1).clone().requires_grad_()
    with Recorder() as recorder:
        o = sima_attention_qkv(mine, **options)
        o.backward(torch.ones_like(o))
    copies = recorder.shapes("clone", "contiguous", "_to_copy", "copy_", "cat", "stack")
    tokens = mine.shape[1]
    assert not [shape for shape in copies if tokens in shape and len(shape) > 1], copies
    assert o.is_contiguous()
    assert mine.grad.is_contiguous()


def which_kernels_run(group):
    q, k, v = make(3, 1, 2, EMPTY, 16)
    mine = [part(x, 2).clone().requires_grad_() for x in (q, k, v)]
    assert plan(*mine, group=group, backend="triton") == Plan("kv", "triton")
    assert plan(*mine, group=group) == Plan("kv", "triton" if CUDA else "eager")
    with launches() as names:
        o = sima_attention(*mine, group=group, backend="triton")
        o.sum().backward()
    some = mine[0].shape[2] > 0
    assert names == FORWARD[: 2 + some] + BACKWARD[: 2 + some]
    with launches() as names:
        sima_attention(*mine, group=group, backend="eager")
    assert not names


def one_all_reduce_per_pass(group):
    B, H, D, Dv = 2, 1, 4, 6
    q, k, v = (make(B, H, n, d).requires_grad_() for n, d in ((5, D), (7, D), (7, Dv)))
    for token_ref, gains in ((None, 0), (9.0, B)):
        options = {"token_ref": token_ref, "group": group, "backend": "triton"}
        sima_attention(q, k, v, **options)  # the first call compares the options
        with all_reduce_sizes() as sizes:
            with CommDebugMode() as forward:
                o = sima_attention(q, k, v, **options)
            with CommDebugMode() as backward:
                o.square().sum().backward()
        assert forward.get_total_counts() == backward.get_total_counts() == 1
        assert sizes == [B * H * (D * Dv + 2 * D) + gains, B * H * (D * Dv + 2 * D)]


def compiled(group):
    """Without a graph break."""
    compiled_attention = torch.compile(sima_attention_qkv, backend="inductor" if CUDA else "aot_eager", fullgraph=True)
    qkv = make(1, 5 + dist.get_rank(), 3, 2, 16)
    mask, weight = torch.rand(qkv.shape[:2], device=DEVICE) > 0.4, make(*qkv.shape[:2], 2, 16)
    options = {"token_mask": mask, "token_ref": 7.0, "backend": "triton", "group": group}
    plain = output_and_gradients(sima_attention_qkv, [qkv], weight, **options)
    for x, expected in zip(output_and_gradients(compiled_attention, [qkv], weight, **options), plain, strict=True):
        assert_close(x, expected, 1e-6)


def second_derivatives_are_an_error(group):
    qkv = make(1, UNEVEN, 3, 1, 16).requires_grad_()
    o = sima_attention_qkv(qkv, backend="triton", group=group)
    (first,) = torch.autograd.grad(o.square().sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def the_same_bits(group):
    q, k, v = make(3, 1, 2, LONG, 16)
    mine = [part(x, 2) for x in (q, k, v)]
    once, again = (output_and_gradients(sima_attention, mine, mine[0], group=group, backend="triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def different_backends_are_an_error_on_every_process(group):
    q, k, v = make(3, 2, 1, 3, 5)
    backend = "triton" if dist.get_rank() == 0 else "eager"
    with pytest.raises(ValueError, match=r"(?s)may differ.*backend='triton'.*backend='eager'"):
        sima_attention(q, k, v, group=group, backend=backend)


def unsupported_tensors(group):
    q = make(1, 1, 3, 8)
    for tensor, reason in ((q.double(), "got torch.float64"), (q.mT, "the channels of q must be contiguous")):
        with pytest.raises(ValueError, match=f"backend 'triton' does not support this call: .*{reason}"):
            sima_attention(tensor, tensor, tensor, backend="triton", group=group)
        assert plan(tensor, tensor, tensor, group=group).backend == "eager"


CASES = [
    comparison_finds_a_missing_sum,
    every_dtype,
    empty_parts,
    widths_of_keys_and_values,
    masks_and_token_ref,
    norms_below_eps,
    padding_holds_nan,
    dead_channels,
    packed_projection,
    which_kernels_run,
    one_all_reduce_per_pass,
    compiled,
    second_derivatives_are_an_error,
    the_same_bits,
    different_backends_are_an_error_on_every_process,
    unsupported_tensors,
]
