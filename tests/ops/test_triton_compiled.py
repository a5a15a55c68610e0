"""What the compiler makes of the kernels for Hopper, looked at without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")


@pytest.fixture(scope="module")
def products_left_running(tmp_path_factory):
    """{kernel: products that still run behind each wait}."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("compiled_for_hopper.py")
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_tile_is_written_over_while_it_is_multiplied(products_left_running):
    """k is multiplied and summed: no product may be left running when the next k is fetched into its place.

    Without norms it is only multiplied and has a place more, so that a product may run on.
    """
    loops = {name: left for name, left in products_left_running.items() if name.startswith(("forward", "outer"))}
    free = {name: left for name, left in loops.items() if "without norms" in name}
    if not any(left and max(left) for left in free.values()):
        pytest.skip(f"this Triton lets no product run on where it may, or says so in other words: {free}")
    for name in loops.keys() - free.keys():
        # Empty without a loop: all tokens in one tile.
        assert max(loops[name], default=0) == 0, f"{name}: {max(loops[name])} products run on"
    assert any(loops[name] for name in loops.keys() - free.keys()), "no tensor cores of Hopper at all"


def test_every_kernel_compiles(products_left_running):
    compiled = {name.split()[0] for name in products_left_running}
    few_tokens = {"forward_head", "backward_head", "attend", "attend_backward"}
    many_tokens = {"outer_products", "finish_forward", "apply_forward", "finish_backward", "apply_backward"}
    relu2 = {"relu2_sums_backward", "relu2_apply_backward"}
    of_tokens = {"convolve_tokens", "filter_gradient_shares", "rotate_tokens"}
    assert compiled == few_tokens | many_tokens | relu2 | of_tokens
    of_a_part = {name.split()[0] for name in products_left_running if "of a part" in name}
    assert of_a_part == many_tokens
