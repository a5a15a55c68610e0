"""Compile kernels for Hopper, without a GPU: prints {name: [products left running at each wait]} as JSON.

A program of its own, because in the tests' own process the kernels are interpreted. Every kernel is compiled for packed
inputs without masks and for separate ones with masks, so that neither way depends on a GPU to be compiled at all. One
shape is also compiled as a part of tokens that are split over processes.
"""

import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sima_attn.ops import triton_launchers, triton_tiles, triton_token_convolution
from sima_attn.ops.triton_launch import (
    backward,
    backward_of_part,
    forward,
    forward_of_part,
    gradient_sums_of_part,
    read_inputs,
    sums_of_part,
)
from sima_attn.ops.triton_token_convolution import differentiate
from sima_attn.ops.triton_token_rotation import rotate

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8"}
HOPPER = triton_tiles.Chip(multiprocessors=132, shared_memory=232448)


class CompilingLauncher:
    """Compiles what it is to launch.

    Args:
        found: Where the results go.
        case: The inputs, for the name.
        float_type: Of numbers such as eps: "fp64" as torch.compile compiles them, or "constexpr" as it reads the kernel
            before, to find what is written (torch 2.11).
    """

    called_from_python = True

    def __init__(self, found: dict[str, list[int]], case: str, float_type: str) -> None:
        self.found, self.case, self.float_type = found, case, float_type

    def empty(self, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(self, kernel, grid, tensors, numbers, tile, **constants):
        types, aligned = {}, {}
        for i, (name, value) in enumerate(zip(kernel.arg_names, (*tensors, *numbers), strict=False)):
            if value is None:
                types[name], constants[name] = "constexpr", None
            elif isinstance(value, torch.Tensor):
                types[name] = POINTERS[value.dtype]
            elif isinstance(value, float):
                types[name] = self.float_type
                if self.float_type == "constexpr":
                    constants[name] = value
            else:
                types[name] = "i32"
            if types[name].startswith("*") or (types[name] == "i32" and value % 16 == 0):
                aligned[(i,)] = [["tt.divisibility", 16]]  # 16 bytes at once: without it nothing is fetched ahead
        types |= dict.fromkeys(constants, "constexpr")
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        if tile.registers is not None:
            options["maxnreg"] = tile.registers
        source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, values, aligned)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
        norms = "" if constants.get("NORMS", True) else " without norms"
        left = [int(count) for count in re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", code)]
        self.found[f"{kernel.fn.__name__} {self.case}{norms}"] = left


def main() -> None:
    triton_tiles.chip = triton_token_convolution.chip = lambda device: HOPPER
    found: dict[str, list[int]] = {}
    shapes = (
        (128, 500, 64, torch.bfloat16, "kv", ("packed", "masked")),
        (8, 4096, 80, torch.float16, "kv", ("masked",)),
        (1, 1024, 64, torch.float32, "kv", ("packed",)),
        (1, 196, 64, torch.bfloat16, "kv", ("packed", "masked")),
        (1, 60, 64, torch.bfloat16, "qk", ("packed", "masked")),
    )
    for B, N, D, dtype, order, wanted in shapes:
        case = f"{B}x{N}x{D} {dtype}"
        qkv = torch.empty(B, N, 3, 6, D, dtype=dtype, device="meta")
        do = torch.empty(B, N, 6, D, dtype=dtype, device="meta")
        mask = torch.empty(B, N, dtype=torch.uint8, device="meta")
        gains = torch.empty(B, device="meta")
        ways = {
            "packed": read_inputs((qkv,), None, None, None, 1.0, 1e-12),
            "masked": read_inputs(qkv.permute(2, 0, 3, 1, 4).unbind(0), mask, mask, gains, 1.0, 1e-12),
        }
        for way in wanted:
            inputs = ways[way]
            launcher = CompilingLauncher(found, f"{case} {way}", "fp64" if way == "masked" else "constexpr")
            _, state = forward(launcher, inputs, order=order, keep=True)
            backward(launcher, inputs, do, state, order=order)
            if (B, N) == (128, 500):
                launcher.case += " of a part"
                _, state = forward_of_part(launcher, inputs, sums_of_part(launcher, inputs))
                backward_of_part(launcher, inputs, do, state, gradient_sums_of_part(launcher, inputs, do, state))
    for B, N, D, dtype, float_type in (
        (8, 4096, 80, torch.float16, "fp64"),
        (1, 196, 64, torch.bfloat16, "constexpr"),
    ):
        launcher = CompilingLauncher(found, f"relu2 {B}x{N}x{D} {dtype}", float_type)
        v, do = torch.empty(2, B, 6, N, D, dtype=dtype, device="meta")
        inputs = read_inputs((v, v, v), None, None, None, 1.0, 1e-6, kind="relu2")
        _, state = forward(launcher, inputs, order="kv", keep=True)
        backward(launcher, inputs, do.transpose(1, 2), state, order="kv")
        for back in (False, True):
            rotate(launcher, v, *torch.empty(2, N, D // 2, device="meta"), back=back)
        differentiate(launcher, v, torch.empty(6 * D, 1, 3, 3, device="meta"), do, (N % 4, N // 4, 4))
    assert triton_launchers.INTERPRETED is False
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
