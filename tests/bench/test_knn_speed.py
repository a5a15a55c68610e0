"""The k-NN benchmark: its rows, its check of the search, and the memory that it measures."""

import math
import time

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.bench import knn
from sima_attn.bench.knn import KnnSpeedRow, Size, bench_knn, common_share, exact_neighbours, peak_memory
from sima_attn.report.rows import read_rows


def test_the_command_writes_a_row_for_the_file_and_one_for_memory(tmp_path):
    out = tmp_path / "rows.csv"
    sizes = ["--bank", "2000", "--dim", "16", "--queries", "100"]
    done = CliRunner().invoke(cli.app, ["bench", "knn", *sizes, "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = read_rows(out, KnnSpeedRow)
    assert [row.source for row in rows] == ["file", "memory"]
    for row in rows:
        assert (row.bank, row.dim, row.queries, row.k) == (2000, 16, 100, 20)
        assert row.recall >= knn.LEAST_RECALL
        assert row.seconds > 0
        assert row.images_per_second == pytest.approx(100 / row.seconds, rel=0.2)
        assert row.peak_device_mib == 0
    assert rows[0].top1 == rows[1].top1


def test_blocks_smaller_than_the_bank_and_steps():
    steps = []
    rows = bench_knn(
        Size(500, 8, 40),
        device="cpu",
        k=5,
        bank_block=64,
        query_block=16,
        on_step=lambda what, done, total: steps.append((what, done, total)),
    )
    assert [row.recall for row in rows] == [1.0, 1.0]
    assert [step for step in steps if step[1] == 500] == [
        ("making the bank", 500, 500),
        ("bank in a file", 500, 500),
        ("bank in memory", 500, 500),
    ]


def test_a_search_that_misses_neighbours_has_no_time(monkeypatch):
    right = knn.nearest

    def wrong(queries, bank, k, **options):
        cosines, indices = right(queries, bank, k, **options)
        return cosines, (indices + 1) % len(bank)

    monkeypatch.setattr(knn, "nearest", wrong)
    with pytest.raises(ValueError, match=r"of the exact neighbours of 32 images, 99% are needed"):
        bench_knn(Size(500, 8, 40), device="cpu")


def test_the_exact_search_and_the_share_in_common():
    generator = np.random.default_rng(0)
    queries, bank = (generator.normal(size=(n, 6)).astype(np.float16) for n in (4, 30))
    unit = [x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in (queries, bank)]
    expected = np.argsort(-(unit[0] @ unit[1].T), axis=1)[:, :3]
    assert np.array_equal(exact_neighbours(queries, bank, 3, "cpu", block=7).numpy(), expected)
    assert common_share(torch.tensor([[2, 1], [5, 6]]), torch.tensor([[1, 2], [5, 7]])) == 0.75


def test_the_peak_is_what_the_block_needed_and_not_what_it_left():
    with peak_memory("cpu") as peak:
        large = np.ones((64, 2**17))  # 64 MiB
        time.sleep(0.2)  # the watcher looks
        del large
    if not math.isnan(peak.host):
        assert 60 < peak.host < 200


@pytest.mark.parametrize(("size", "k"), [(Size(0, 8, 4), 1), (Size(10, 8, 4), 11)])
def test_sizes_that_cannot_be_are_refused(size, k):
    with pytest.raises(ValueError, match="k at most the bank, got Size"):
        bench_knn(size, device="cpu", k=k)
