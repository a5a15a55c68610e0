"""benchmarks/dino_step.py: one row per mode, and the table of them."""

import pytest

import dino_step
from dino_step import DinoStepRow, bench_dino_step, dino_step_table
from sima_attn.report.rows import read_rows

SMALL = ("model.kwargs.embed_dim=16", "model.kwargs.num_heads=2", "model.kwargs.depth=1", "run.precision=fp32")
SMALLER = (*SMALL, "run.batch=700", "data.size=16", "model.kwargs.img_size=16", "crops.local_size=8")
HEAD = ("distill.out_dim=16", "distill.hidden_dim=16", "distill.bottleneck_dim=8", "crops.local_count=1")


def test_the_modes_of_a_cpu_and_their_table(tmp_path, monkeypatch):
    without = {mode: flags for mode, flags in dino_step.MODES.items() if mode != "compiled"}
    monkeypatch.setattr(dino_step, "MODES", without)  # compiling would take longer than everything else
    out = tmp_path / "rows.csv"
    settings = [part for setting in (*SMALLER, *HEAD) for part in ("--set", setting)]
    dino_step.main(["--device", "cpu", "--only", "vit_softmax", "--epochs", "8", "--out", str(out), *settings])
    rows = read_rows(out, DinoStepRow)
    assert [(row.compiled, row.recorded) for row in rows] == [(False, False)]
    row = rows[0]
    assert (row.steps, row.views, row.batch) == (16, 3, 700)
    assert row.ms == pytest.approx(1e3 * row.batch / row.images_per_second, rel=0.01)
    table = dino_step_table(rows)
    assert table.header[2:] == ["plain, ms"]
    assert table.lines == [["vit_softmax", "ViT-T/8, softmax", f"{row.ms:.1f}"]]


def test_too_few_steps_are_an_error():
    settings = (*SMALLER, *HEAD)
    with pytest.raises(ValueError, match="4 steps are too few to time"):
        next(bench_dino_step(device="cpu", names=["vit_softmax"], epochs=2, settings=settings))
