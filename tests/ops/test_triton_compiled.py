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
    free = {name: left for name, left in products_left_running.items() if "without norms" in name}
    if not any(left and max(left) for left in free.values()):
        pytest.skip(f"this Triton lets no product run on where it may, or says so in other words: {free}")
    for name, left in products_left_running.items():
        assert name in free or left, f"{name}: no tensor cores of Hopper at all"
        assert name in free or max(left) == 0, f"{name}: {max(left)} products run on"
