"""Times the Triton kernels with many tiles, on the GPU that is here: how the table in ops/triton_tiles.py was found.

    python benchmarks/tune_tiles.py --out tiles.csv            # all shapes, several minutes
    python benchmarks/tune_tiles.py --kernel forward_head --shape 256,196,6,64

Tiles are compiled by all cores first, then checked and timed one after the other. The best ones are printed, all are
written. A tile whose result is wrong is named: compilers have bugs.
"""

import argparse
import csv
import itertools
import os
import subprocess
import sys
from pathlib import Path

import torch
import triton

from sima_attn.ops import prepared_calls, sima_attention_qkv, triton_launch
from sima_attn.ops.triton_tiles import Tile, choose_tile, padded
from sima_attn.report.cuda_timing import time_graphs

SHAPES = {
    "forward_head": ["256,196,6,64", "256,196,8,48", "32,196,6,64", "1,196,6,64", "256,64,3,64", "256,128,6,64",
                     "512,64,6,64", "128,256,6,64", "64,512,6,64", "32,1024,6,64", "1,577,6,64", "4,784,16,96"],
    "outer_products": ["8,4096,6,64", "8,9216,6,64", "1,36864,6,64", "16,2048,6,64", "1,1025,6,64"],
    "apply_forward": ["8,4096,6,64", "8,9216,6,64", "1,36864,6,64", "16,2048,6,64", "1,1025,6,64"],
    "backward_head": ["256,196,6,64", "256,196,8,48", "256,64,3,64"],
    "apply_backward": ["32,1024,6,64", "8,4096,6,64", "8,9216,6,64"],
}  # fmt: skip
ROWS, WARPS, STAGES, COLUMNS, REGISTERS, TILES = (
    (16, 32, 64, 128, 256),
    (1, 2, 4, 8),
    (1, 2, 3, 4),
    (16, 32, 64, 128),
    (None, 96, 128, 168),
    (1, 2, 4, 8),
)


def tiles(kernel: str, B: int, tokens: int, H: int, D: int) -> list[Tile]:
    """A grid of tiles, without those that cannot be good. Heads are divided into columns where they are few or wide."""
    columns = [c for c in COLUMNS if c <= padded(D)] if B * H < 132 or D > 64 else [64]
    many = TILES if kernel.startswith("apply") else (4,)
    registers = REGISTERS if kernel.endswith("head") else (None,)
    return [
        tile
        for tile in map(Tile._make, itertools.product(ROWS, WARPS, STAGES, columns, many, registers))
        if tile.rows <= max(16, 2 * tokens)
        and 16 <= tile.rows // tile.warps <= 64
        and (tile.stages == 1) == (tokens <= tile.rows)
        and tile.rows * tile.stages <= 384
    ]


def runner(kernel: str, shape: str):
    """What calls the kernel at a shape."""
    B, N, H, D = map(int, shape.split(","))
    qkv = torch.randn(B, N, 3, H, D, device="cuda", dtype=torch.bfloat16)
    if "backward" not in kernel:
        return lambda: (sima_attention_qkv(qkv),)
    qkv.requires_grad_()
    grad = torch.randn(B, N, H, D, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(sima_attention_qkv(qkv), qkv, grad)


def force(kernel: str, tile: Tile | None) -> None:
    """Make a kernel take a tile; None: as the table says."""
    prepared_calls._prepared.clear()  # they have launches recorded

    def choose(name, problem):
        return tile if tile is not None and name == kernel else choose_tile(name, problem)

    triton_launch.choose_tile = choose


def main() -> None:
    """Compile, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=SHAPES, action="append", help="repeat for several; default: all")
    parser.add_argument("--shape", action="append", help="B,N,H,D; repeat for several; default: those of the kernel")
    parser.add_argument("--out", type=Path, help="CSV file for all times")
    parser.add_argument("--compile-share", help=argparse.SUPPRESS)  # i/n: what one of n processes compiles
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA device")
    share, shares = map(int, (arguments.compile_share or "0/1").split("/"))
    compiling = arguments.compile_share is not None
    if not compiling:
        cores = os.cpu_count() or 1
        command = [sys.executable, *sys.argv, "--compile-share"]
        for process in [subprocess.Popen([*command, f"{i}/{cores}"]) for i in range(cores)]:
            process.wait()

    rows, number = [], 0
    for kernel in arguments.kernel or SHAPES:
        for shape in arguments.shape or SHAPES[kernel]:
            call, expected, timed = None, None, []
            for tile in tiles(kernel, *map(int, shape.split(","))):
                number += 1
                if number % shares != share:
                    continue
                if call is None:
                    call = runner(kernel, shape)
                    force(kernel, None)
                    (expected,) = call()
                force(kernel, tile)
                try:
                    (found,) = call()
                    if compiling:
                        continue
                    if not (found - expected).float().norm() < 1e-2 * expected.float().norm():
                        print(f"{kernel:15} {shape:14} WRONG RESULT  {tile}", flush=True)
                        continue
                    timed.append((time_graphs({"": call}, seconds=0.01, least_samples=5)[""].p50 * 1e6, tile))
                except triton.runtime.errors.OutOfResources:
                    continue
            force(kernel, None)
            timed.sort(key=lambda pair: pair[0])
            rows += [[kernel, shape, round(us, 2), *tile] for us, tile in timed]
            for us, tile in timed[:4]:
                print(f"{kernel:15} {shape:14} {us:7.1f} us  {tile}", flush=True)
    if arguments.out and not compiling:
        with open(arguments.out, "w", newline="") as file:
            csv.writer(file).writerows([["kernel", "shape", "us", *Tile._fields], *rows])


if __name__ == "__main__":
    main()
