"""Compile kernels for Hopper, without a GPU: prints {name: [products left running at each wait]} as JSON.

A program of its own, because in the tests' own process the kernels are interpreted.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sima_attn.ops import triton_kernels as kernels
from sima_attn.ops.triton_op import padded
from sima_attn.ops.triton_tuning import Problem, candidates

MASKS_AND_GAIN = {"QUERY_MASKED": False, "KEY_MASKED": False, "GAIN_BY_IMAGE": False}


def intermediate_code(name: str, D: int, dtype: str, tokens: int, **constants) -> str:
    """What Triton makes of a kernel before it becomes PTX, with the tile that an H200 takes."""
    kernel, width = getattr(kernels, name), padded(D)
    tile = candidates(name, Problem(tokens, 256, width, 2, False))[0]
    columns = width if name == "forward_head" else min(width, tile.columns)
    constants |= {"D": D, "DV": D, "BLOCK_D": width, "BLOCK_V": columns, "BLOCK_N": tile.rows, "STAGES": tile.stages}
    constants |= {"SUM_ROWS": 16, "PRECISION": "bf16" if dtype == "bf16" else "tf32"}
    types, aligned = {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            types[argument] = "constexpr"
        elif argument in ("q", "k", "v", "o", "x", "y", "z") or argument.endswith("mask"):
            types[argument] = f"*{dtype}"
        elif argument in ("state", "norms", "gains", "shares", "norm_shares"):
            types[argument] = "*fp32"
        else:
            types[argument] = "fp32" if argument in ("gain", "eps") else "i32"
        if types[argument].startswith("*") or re.fullmatch(r"[a-z]+_[bhn]", argument):
            aligned[(i,)] = [["tt.divisibility", 16]]  # 16 bytes at once: without it nothing is fetched ahead
    values = {(kernel.arg_names.index(constant),): value for constant, value in constants.items()}
    options = {key: value for key, value in tile.compiler_options().items() if value is not None}
    source = ASTSource(kernel, types, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]


def main() -> None:
    found = {}
    for D, dtype in ((64, "bf16"), (80, "fp16")):
        for name, tokens, constants in (
            ("forward_head", 500, {"WHOLE": False, "KEEP": True, **MASKS_AND_GAIN}),
            ("outer_products", 4096, {"NORMS": True, "X_MASKED": False, "Z_MASKED": False}),
            ("outer_products", 4096, {"NORMS": False, "X_MASKED": False, "Z_MASKED": False}),
        ):
            code = intermediate_code(name, D, dtype, tokens, **constants)
            case = f"{name} {D} {dtype}{'' if constants.get('NORMS', True) else ' without norms'}"
            found[case] = [int(left) for left in re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", code)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
