"""The fused kernels with tokens split over processes: they equal one process that holds all tokens.

The cases are in `split_kernels.py`. One group of each size runs all of them, without a GPU in Triton's interpreter.
"""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
import split_kernels

import token_parts
from sima_attn.ops import triton_sequence_parallel as operators


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The errors of each of three processes, by case."""
    options = {"device": split_kernels.DEVICE, "prepare": split_kernels.prepare}
    return token_parts.run_group(tmp_path_factory.mktemp("group"), 3, split_kernels.CASES, **options)


@pytest.mark.parametrize("case", [case.__name__ for case in split_kernels.CASES])
def test_equals_one_process(errors, case):
    for rank, found in enumerate(errors):
        assert found[case] is None, f"process {rank}:\n{found[case]}"


def test_opcheck():
    qkv, do, sums, gains = (split_kernels.make(*shape) for shape in ((1, 20, 3, 2, 16), (1, 20, 2, 16), (2, 288), (1,)))
    mask = torch.ones(1, 20, dtype=torch.uint8, device=split_kernels.DEVICE)
    for operator, arguments in (
        (operators.part_sums, (qkv, None, None, mask, mask)),
        (operators.part_forward, (sums, qkv, None, None, mask, gains, 1e-12)),
        (operators.part_gradient_sums, (do, sums, qkv, None, None, mask, gains, 1e-12)),
        (operators.part_backward, (do, sums, sums, qkv, None, None, mask, mask)),
    ):
        torch.library.opcheck(operator, arguments)
