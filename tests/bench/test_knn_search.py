"""benchmarks/knn_search.py: its rows, its check of the search, and the memory that it measures."""

import math
import time

import numpy as np
import pytest
import torch

import knn_search
from knn_search import KnnSpeedRow, Size, bench_knn, common_share, exact_neighbors, peak_memory
from sima_attn.report.rows import read_rows


def test_the_script_writes_one_row_for_the_file_and_one_for_memory(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    knn_search.main(["--bank", "2000", "--dim", "16", "--queries", "100", "--device", "cpu", "--out", str(out)])
    assert "| bank in |" in capsys.readouterr().out
    rows = read_rows(out, KnnSpeedRow)
    assert [row.source for row in rows] == ["file", "memory"]
    for row in rows:
        assert (row.bank, row.dim, row.queries, row.k) == (2000, 16, 100, 20)
        assert row.recall >= knn_search.MIN_RECALL
        assert row.images_per_second == pytest.approx(100 / row.seconds, rel=0.2)
        assert row.peak_device_mib == 0
    assert rows[0].top1 == rows[1].top1


def test_blocks_may_be_smaller_than_the_bank():
    rows = bench_knn(Size(500, 8, 40), device="cpu", k=5, bank_block=64, query_block=16)
    assert [row.recall for row in rows] == [1.0, 1.0]


def test_a_search_that_misses_neighbors_is_an_error(monkeypatch):
    right = knn_search.nearest

    def wrong(queries, bank, k, **options):
        cosines, indices = right(queries, bank, k, **options)
        return cosines, (indices + 1) % len(bank)

    monkeypatch.setattr(knn_search, "nearest", wrong)
    with pytest.raises(RuntimeError, match=r"of the exact neighbors of 32 images, but at least 99% are required"):
        bench_knn(Size(500, 8, 40), device="cpu")


def test_the_exact_search_and_the_share_in_common():
    generator = np.random.default_rng(0)
    queries, bank = (generator.normal(size=(n, 6)).astype(np.float16) for n in (4, 30))
    unit = [x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in (queries, bank)]
    expected = np.argsort(-(unit[0] @ unit[1].T), axis=1)[:, :3]
    assert np.array_equal(exact_neighbors(queries, bank, 3, "cpu", block=7).numpy(), expected)
    assert common_share(torch.tensor([[2, 1], [5, 6]]), torch.tensor([[1, 2], [5, 7]])) == 0.75


def test_peak_memory_includes_what_the_block_freed():
    with peak_memory("cpu") as peak:
        large = np.ones((64, 2**17))  # 64 MiB
        time.sleep(0.2)  # long enough to be sampled
        del large
    if not math.isnan(peak.host):
        assert 60 < peak.host < 200
