"""Tokens split over processes: the operator and the modules equal one process that holds all tokens.

The cases are in `split_tokens.py`. One group of each size runs all of them.
"""

import json
import re
from pathlib import Path

import pytest
import split_tokens

import forked


@pytest.fixture(scope="module", params=[2, 3], ids="{} processes".format)
def errors(request, tmp_path_factory):
    """The errors of each process, by case."""
    folder = tmp_path_factory.mktemp("group")
    log = folder / "log"
    codes = forked.run_group(log, request.param, split_tokens.run_cases, folder)
    assert codes == [0] * request.param, log.read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("case", split_tokens.CASES)
def test_equals_one_process(errors, case):
    for rank, found in enumerate(errors):
        assert found[case] is None, f"process {rank}:\n{found[case]}"


def test_the_example_of_the_docs_runs(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "operator.md"
    (example,) = re.findall(r"^```py\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    log = tmp_path / "log"
    assert forked.run_group(log, 3, exec, example, {}) == [0, 0, 0], log.read_text()
    assert "process 1: 333 of 1000 tokens, equal to one process" in log.read_text()
