"""Tokens split over processes: the operator and the modules equal one process that holds all tokens.

The cases are in `split_tokens.py`. One group of each size runs all of them.
"""

import re
from pathlib import Path

import pytest
import split_tokens

import forked
import token_parts


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """The errors of each of three processes, of which one has two neighbors, by case."""
    return token_parts.run_group(tmp_path_factory.mktemp("group"), 3, split_tokens.CASES)


@pytest.mark.parametrize("case", [case.__name__ for case in split_tokens.CASES])
def test_equals_one_process(errors, case):
    for rank, found in enumerate(errors):
        assert found[case] is None, f"process {rank}:\n{found[case]}"


def test_the_example_of_the_docs_runs(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "operator.md"
    (example,) = re.findall(r"^```py\n(# split.py\n.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    log = tmp_path / "log"
    assert forked.run_group(log, 3, exec, example, {}) == [0, 0, 0], log.read_text()
    assert "process 1: 333 of 1000 tokens, equal to one process" in log.read_text()
