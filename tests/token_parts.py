"""Groups of processes that split the tokens of an image, and what they compare with one process that holds all.

Every process draws the same tensors, passes its part of the tokens, and compares what it gets with its part of the
result and of the gradients of one process.
"""

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import forked
from closeness import assert_close
from sima_attn.ops import sima_attention

# The parts of 12, 16, 10 and 70 tokens, by the number of processes.
EVEN, UNEVEN, EMPTY, LONG = 12, 16, 10, 70
PARTS = {
    EVEN: {2: (6, 6), 3: (4, 4, 4)},
    UNEVEN: {2: (5, 11), 3: (2, 9, 5)},
    EMPTY: {2: (10, 0), 3: (7, 0, 3)},
    LONG: {2: (21, 49), 3: (33, 1, 36)},
}


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tokens of this process."""
    return x.split(PARTS[x.shape[dim]][dist.get_world_size()], dim)[dist.get_rank()]


def parts(tensors: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    return {name: part(x, dim) for name, x in tensors.items()}


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over the processes."""
    total = x.clone(memory_format=torch.contiguous_format)  # gloo adds wrong numbers to strided tensors
    dist.all_reduce(total)
    return total


def output_and_gradients(attend, tensors, weight, parameters=(), **options):
    """o, and the gradients of sum(o * weight) with regard to the tensors and the parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    o = attend(*leaves, **options)
    return o, *torch.autograd.grad((o * weight).sum(), [*leaves, *parameters])


def assert_equals_one_process(
    group, N=UNEVEN, M=UNEVEN, *, H=3, D=4, Dv=6, masks="", dtype=torch.float64, bound=1e-12, attend=sima_attention,
    **options,
):  # fmt: skip
    device = group.device_type if isinstance(group, DeviceMesh) else "cpu"
    q, k, v = (torch.randn(2, H, n, d, dtype=dtype, device=device) for n, d in ((N, D), (M, D), (M, Dv)))
    weight = torch.randn(2, H, N, Dv, dtype=dtype, device=device)
    all_masks = {"query_mask": torch.rand(2, N, device=device) > 0.4, "key_mask": torch.rand(2, M, device=device) > 0.4}
    all_masks = {name: mask for name, mask in all_masks.items() if name in masks}
    mine = [part(x, 2) for x in (q, k, v)]
    found = output_and_gradients(attend, mine, part(weight, 2), group=group, **parts(all_masks, 1), **options)
    truth = [x.double() for x in (q, k, v)]
    alone = {name: option for name, option in options.items() if name != "backend"}
    expected = output_and_gradients(sima_attention, truth, weight.double(), **all_masks, **alone)
    for x, whole in zip(found, expected, strict=True):
        assert x.dtype == dtype
        assert_close(x, part(whole, 2), bound)


@contextmanager
def all_reduce_sizes() -> Iterator[list[int]]:
    """How many numbers each all-reduce in the context adds."""
    sizes = []

    def all_reduce(x, *arguments, original=collectives.all_reduce):
        sizes.append(x.numel())
        return original(x, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_reduce", all_reduce)
        yield sizes


def run_group(folder: Path, world: int, cases: list[Callable], **options) -> list[dict[str, str | None]]:
    """Run all cases, one after the other, in a group of processes. The errors of each process, by case."""
    log = folder / "log"
    codes = forked.run_group(log, world, _run_cases, folder, cases, **options)
    assert codes == [0] * world, log.read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _run_cases(folder: Path, cases: list[Callable], device: str = "cpu", prepare: Callable | None = None) -> None:
    """Call `prepare`, then each case with a mesh of all processes."""
    if prepare is not None:
        prepare()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    errors = {}
    for case in cases:
        torch.manual_seed(0)
        try:
            case(mesh)
            errors[case.__name__] = None
        except BaseException:  # pytest.raises fails with one
            errors[case.__name__] = traceback.format_exc()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()
