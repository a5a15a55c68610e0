"""`sima bench detect`: rows come in pairs and say what was measured."""

import pytest

from sima_attn.bench import detect
from sima_attn.bench.detect import BACKBONE, DETECTOR, Twins, bench_detect, detect_table
from sima_attn.bench.rows import read_rows, write_rows


def test_twins_are_measured_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(detect, "DETECTIONS", 1)
    pair = Twins("sima_xcit_nano_12_p16_224", "xca")
    (rows,) = bench_detect("cpu", twins=[pair], pixels=[64], seconds=0.0, depth=1, proposals=8)
    assert [(row.attention, row.part) for row in rows] == [
        (attention, part) for part in (BACKBONE, DETECTOR) for attention in ("xca", "sima")
    ]
    assert rows[0].speedup == rows[2].speedup == 1
    assert all(row.p50_ms > 0 and row.pixels == 64 for row in rows)
    assert rows[2].detections > 0
    assert rows[3].detections == rows[2].detections
    write_rows(tmp_path / "rows.csv", rows)
    assert read_rows(tmp_path / "rows.csv", type(rows[0])) == rows
    assert len(detect_table(rows).lines) == 2
    with pytest.raises(ValueError, match="device must be one of cuda, cpu"):
        next(bench_detect("tpu"))
