"""`sima bench detect`: rows come in pairs and say what was measured."""

from dataclasses import replace

import pytest
import torch

from sima_attn.bench import detect
from sima_attn.bench.detect import BACKBONE, BOX_DETECTOR, CALLED, DETECTOR, GRAPH, bench_detect, detect_table
from sima_attn.report.rows import read_rows, write_rows

PAIR = {"sima_xcit_nano_12_p16_224": "xca"}


def measured(device, **options):
    (rows,) = bench_detect(device, twins=PAIR, pixels=[64], seconds=0.0, depth=1, proposals=8, **options)
    return rows


@pytest.mark.usefixtures("brief_timing")
def test_twins_are_measured_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(detect, "DETECTIONS", 1)
    rows = measured("cpu")
    assert [(row.attention, row.part) for row in rows] == [
        (attention, part) for part in (BACKBONE, DETECTOR) for attention in ("xca", "sima")
    ]
    assert rows[0].speedup == rows[2].speedup == 1
    assert all(row.p50_ms > 0 and row.pixels == 64 for row in rows)
    assert rows[2].detections > 0
    assert rows[3].detections == rows[2].detections
    write_rows(tmp_path / "rows.csv", rows)
    assert read_rows(tmp_path / "rows.csv", type(rows[0])) == rows
    assert all(row.timed == CALLED and row.called_ms == row.p50_ms for row in rows)
    table = detect_table(rows)
    assert len(table.lines) == 2
    with_graphs = detect_table([replace(row, timed=GRAPH) if row.part == BACKBONE else row for row in rows])
    assert set(with_graphs.header) - set(table.header) == {"timed", "baseline called, ms", "SimA called, ms"}
    assert {len(line) for line in with_graphs.lines} == {len(with_graphs.header)}


@pytest.mark.usefixtures("brief_timing")
def test_without_masks_the_rows_say_so():
    assert [row.part for row in measured("cpu", masks=False)] == [BACKBONE] * 2 + [BOX_DETECTOR] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_backbone_is_timed_as_a_graph():
    rows = measured("cuda")
    assert {(row.part, row.timed) for row in rows} == {(BACKBONE, GRAPH), (DETECTOR, CALLED)}
    assert all(row.p50_ms > 0 and row.called_ms > 0 and row.peak_mib > 0 for row in rows)
