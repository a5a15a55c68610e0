"""Models split over processes: logits, gradients and running statistics equal those of one process.

The cases are in `split_models.py`. One group of each size runs all of them.
"""

import re
from pathlib import Path

import pytest
import split_models

import forked
import token_parts
from sima_attn.parallel.model import rows_of


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The errors of each of three processes, of which one has two neighbors, by case."""
    return token_parts.run_group(tmp_path_factory.mktemp("group"), 3, split_models.CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in split_models.CASES])
def test_equals_one_process(errors, case):
    for rank, found in enumerate(errors):
        assert found[case] is None, f"process {rank}:\n{found[case]}"


def test_every_row_is_taken_once_and_no_part_is_empty():
    for processes in (1, 2, 3, 5, 8):
        for height in (processes * 4, processes * 4 + 3, processes * 7 + 1, 224):
            parts = [rows_of(rank, processes, height, 4) for rank in range(processes)]
            assert [row for part in parts for row in range(height)[part]] == list(range(height))
            assert all(part.start % 4 == 0 and part.stop - part.start >= 4 for part in parts)


def test_the_example_of_the_docs_runs(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "scale.md"
    (example,) = re.findall(r"^```py\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    log = tmp_path / "log"
    assert forked.run_group(log, 3, exec, example, {}) == [0, 0, 0], log.read_text()
    assert "process 1: the same 100 logits" in log.read_text()
