"""The benchmarks of the GPU: what they make of rows, and on a GPU that they measure at all."""

from dataclasses import fields

import pytest
import torch
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.bench.cuda_timing import check_cuda, copy_bandwidth, time_calls, time_graphs
from sima_attn.bench.figures import plot_gpu
from sima_attn.bench.gpu import CASES, FIGURE_CASES, FORWARD, TENSORS, TRAINING, GpuCase, GpuRow, bench_gpu
from sima_attn.bench.model import SIZES, TWINS, ModelSpeedRow, Size, bench_models
from sima_attn.bench.rows import read_rows, write_rows
from sima_attn.bench.tables import called_table, gpu_summary, gpu_table, model_table

METHODS = [("flash", False), ("cudnn", False), ("sima", False)]
MORE = [("sdpa", False), ("paper", False), ("paper", True), ("xca", False), ("elu", False)]


def row_of(kind, **values):
    defaults = {"int": 0, "float": 1.0, "str": "", "bool": False}
    return kind(**{f.name: defaults[getattr(f.type, "__name__", f.type)] for f in fields(kind)} | values)


def gpu_rows(case, methods, **values):
    shape = {"B": case.B, "N": case.N, "H": case.H, "D": case.D}
    return [row_of(GpuRow, method=m, compiled=c, direction=FORWARD, **shape, **values) for m, c in methods]


def test_the_table_has_a_line_for_each_shape_that_all_methods_ran(tmp_path):
    rows = gpu_rows(CASES[0], METHODS + MORE, p50_us=51.26, limit_us=36.0, share_of_limit=0.702, speedup=1.5)
    rows += gpu_rows(FIGURE_CASES[0], METHODS)
    write_rows(tmp_path / "gpu.csv", rows)
    table = gpu_table(read_rows(tmp_path / "gpu.csv", GpuRow), FORWARD)
    assert [line[0] for line in table.lines] == ["256, 196, 6, 64"]
    assert dict(zip(table.header, table.lines[0], strict=True))["SimA"] == "51.3"
    assert dict(zip(table.header, table.lines[0], strict=True))["of the limit"] == "70%"
    assert gpu_table(rows, TRAINING).lines == []
    assert called_table(gpu_rows(CASES[0], METHODS + MORE, called_us=16.04)).lines == [
        ["256, 196, 6, 64", FORWARD, "16.0", "16.0"]
    ]
    # Without rows of training the summary has none.
    assert gpu_summary(rows).lines == [["256, 196, 6, 64", *["51.3"] * 4, "1.50x", *"----"]]


def test_the_figure_is_drawn_from_rows(tmp_path):
    rows = [row for case in FIGURE_CASES for row in gpu_rows(case, METHODS, p50_us=10.0 + case.N, limit_us=20.0)]
    plot_gpu(rows, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes()[:4] == b"\x89PNG"


def test_twins_stand_side_by_side():
    twin = row_of(ModelSpeedRow, model="deit", attention="softmax", images_per_second=1000.0)
    sima = row_of(ModelSpeedRow, model="sima_deit", attention="sima", images_per_second=1500.0, speedup=1.5, goal=1.1)
    line = dict(zip(*(lambda t: (t.header, t.lines[0]))(model_table([twin, sima])), strict=True))
    assert (line["twin"], line["SimA"], line["speed"], line["goal"]) == ("1,000", "1,500", "1.50x", "1.10x")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["gpu", "model"])
def test_without_a_gpu_the_error_says_so(command):
    result = CliRunner().invoke(cli.app, ["bench", command])
    assert isinstance(result.exception, ValueError)
    assert "needs a CUDA device" in str(result.exception)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        check_cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_measures():
    slow, fast = torch.randn(2**26, device="cuda"), torch.randn(2**20, device="cuda")
    timings = time_graphs({"slow": slow.sum, "fast": fast.sum}, seconds=0.01)
    assert timings["slow"].p50 > timings["fast"].p50
    assert time_calls(slow.sum, seconds=0.01) > timings["fast"].p50
    rows = next(bench_gpu(cases=[GpuCase(8, 196, 6, 64, goal_training=100)], seconds=0.01))
    assert {row.direction for row in rows} == {FORWARD, TRAINING}
    limit = TENSORS[FORWARD] * 8 * 196 * 6 * 64 * 2 / copy_bandwidth()
    assert 0.5 < rows[0].limit_us / (limit * 1e6) < 2
    for pair in TWINS[:1]:  # XCiT takes minutes to compile
        inference, training = bench_models(twins=[pair], sizes=[Size(64, 2, 1.0)], seconds=0.01)
        assert [row.attention for row in inference] == [pair.attention, "sima"]
        assert training[0].peak_mib > inference[0].peak_mib
    assert SIZES[0].pixels == 224
