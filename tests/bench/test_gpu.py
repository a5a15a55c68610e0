"""The benchmarks of the GPU: what they select and make of rows, and on a GPU that they measure at all."""

from dataclasses import fields

import pytest
import torch
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.bench.call_overhead import MODULE, OPERATOR, CallOverheadRow, bench_call_overhead, create_calls
from sima_attn.bench.figures import plot_gpu
from sima_attn.bench.gpu import (
    CASES,
    DTYPE_CASES,
    FIGURE_CASES,
    FORWARD,
    SOFTMAX_KERNELS,
    TENSORS,
    TRAINING,
    GpuCase,
    GpuRow,
    bench_gpu,
    select_cases,
)
from sima_attn.bench.model import COMPILE, EAGER, GRAPH, INFERENCE, REDUCE_OVERHEAD, TWINS, ModelCase, bench_models
from sima_attn.bench.tables import call_overhead_table, dtype_table, gpu_summary, gpu_table, targets_table
from sima_attn.report.cuda_timing import check_cuda, copy_bandwidth, time_calls, time_enqueuing, time_graphs
from sima_attn.report.rows import read_rows, write_rows

METHODS = [("flash", False), ("cudnn", False), ("sima", False)]
MORE = [("sdpa", False), ("paper", False), ("paper", True), ("xca", False), ("elu", False)]


def row_of(kind, **values):
    defaults = {"int": 0, "float": 1.0, "str": "", "bool": False}
    return kind(**{f.name: defaults[getattr(f.type, "__name__", f.type)] for f in fields(kind)} | values)


def gpu_rows(case, methods, **values):
    shape = {"B": case.B, "N": case.N, "H": case.H, "D": case.D, "dtype": case.dtype}
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
    # Without rows of training the summary has none.
    assert gpu_summary(rows).lines == [["256, 196, 6, 64", *["51.3"] * 4, "1.50x", *"----"]]


def test_the_figure_is_drawn_from_rows(tmp_path):
    rows = [row for case in FIGURE_CASES for row in gpu_rows(case, METHODS, p50_us=10.0 + case.N, limit_us=20.0)]
    plot_gpu(rows, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes()[:4] == b"\x89PNG"


def test_the_figure_has_only_bfloat16(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axes, xs, ys, *args, **kwargs: drawn.append(ys))
    rows = gpu_rows(CASES[3], METHODS, p50_us=10.0) + gpu_rows(DTYPE_CASES[1], METHODS, p50_us=99.0)
    assert CASES[3].N == DTYPE_CASES[1].N == 1024
    plot_gpu(rows, tmp_path / "gpu.png")
    assert drawn[0] == [10.0]


def test_no_two_cases_of_the_gpu_are_the_same_measurement():
    cases = select_cases()
    assert len({(str(case), case.dtype) for case in cases}) == len(cases)


def test_cases_are_selected_by_shape_and_dtype():
    assert [case.dtype for case in select_cases(shapes=["256,196,6,64"])] == ["bfloat16", "float16", "float32"]
    assert select_cases(shapes=["1,196,6,64"], dtypes=["bfloat16"]) == [GpuCase(1, 196, 6, 64, goal=5)]
    with pytest.raises(ValueError, match=r"the shape '7,7,7,7'; choose from: 256,196,6,64, "):
        select_cases(shapes=["7,7,7,7"])
    with pytest.raises(ValueError, match=r"the dtype 'float16'; choose from: bfloat16$"):
        select_cases(shapes=["1,196,6,64"], dtypes=["float16"])


def test_a_goal_is_a_time_or_a_speed_over_softmax():
    timed = GpuCase(1, 1, 1, 1, goal=5, goal_training=9)
    assert (timed.goal_us(FORWARD, 1.0), timed.goal_us(TRAINING, 1.0)) == (5, 9)
    assert GpuCase(1, 1, 1, 1, goal_speedup=1.1).goal_us(FORWARD, 33e-6) == 30.0


def test_other_dtypes_have_their_own_table_and_the_fastest_softmax_kernel_of_it():
    bfloat16 = gpu_rows(CASES[0], METHODS + MORE)
    float32 = [
        row
        for method, us in (("efficient", 300.0), ("math", 250.0), ("sima", 100.0))
        for row in gpu_rows(DTYPE_CASES[2], [(method, False)], p50_us=us, goal_us=227.3, speedup=2.5)
    ]
    expected = [["256, 196, 6, 64", "float32", FORWARD, "math", "250", "100", "227", "2.50x"]]
    assert set(SOFTMAX_KERNELS["float32"]) == {"efficient", "math"}
    assert dtype_table(bfloat16 + float32).lines == expected
    assert dtype_table(bfloat16).lines == []
    for table in (lambda rows: gpu_table(rows, FORWARD), gpu_summary):
        assert table(bfloat16 + float32) == table(bfloat16)


@pytest.mark.parametrize("direction", [FORWARD, TRAINING])
@pytest.mark.parametrize("method", ["softmax", "sima"])
def test_the_operator_alone_gives_what_it_gives_within_a_module(method, direction):
    B, N, H, D = 2, 5, 3, 4
    calls = create_calls(B, N, H, D, direction, "cpu")
    module, operator = calls[method, MODULE](), calls[method, OPERATOR]()
    if direction == FORWARD:
        heads_first = method == "softmax"
        assert torch.equal(module, (operator.transpose(1, 2) if heads_first else operator).flatten(2))
    else:
        parts = torch.stack(operator).permute(1, 3, 0, 2, 4) if method == "softmax" else operator[0]  # [B, N, 3, H, D]
        assert torch.equal(module[0], parts.flatten(2))


def overhead_rows(form, speedup, target):
    common = {"form": form, "direction": FORWARD, "B": 1, "N": 196, "H": 6, "D": 64}
    return [
        row_of(CallOverheadRow, method="softmax", p50_us=25.0, target=0.0, **common),
        row_of(CallOverheadRow, method="sima", p50_us=25.0 / speedup, speedup=speedup, target=target, **common),
    ]


def test_call_overhead_is_one_line_for_each_form_and_a_target_for_modules():
    rows = overhead_rows(MODULE, 1.25, 1.0) + overhead_rows(OPERATOR, 0.5, 0.0)
    assert call_overhead_table(rows).lines == [
        ["1, 196, 6, 64", FORWARD, MODULE, "25.0", "20.0", "1.25x"],
        ["1, 196, 6, 64", FORWARD, OPERATOR, "25.0", "50.0", "0.50x"],
    ]
    assert targets_table([], rows).lines == [
        ["call overhead, forward, 1 x 196", "25.0 us", "20.0 us", "1.250", ">= 1.00", "met"]
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["gpu", "model", "call-overhead"])
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
    sums = {"slow": slow.sum, "fast": fast.sum}
    timings = time_graphs(sums, seconds=0.01)
    assert timings["slow"].p50 > timings["fast"].p50
    assert time_calls(sums, seconds=0.01)["slow"].p50 > timings["fast"].p50
    assert time_enqueuing(sums, seconds=0.01)["slow"].p50 < timings["slow"].p50
    rows = next(bench_gpu([GpuCase(8, 196, 6, 64, directions=(FORWARD, TRAINING))], seconds=0.01))
    assert {row.direction for row in rows} == {FORWARD, TRAINING}
    limit = TENSORS[FORWARD] * 8 * 196 * 6 * 64 * 2 / copy_bandwidth()
    assert 0.5 < rows[0].limit_us / (limit * 1e6) < 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_on_a_gpu_it_measures_other_dtypes(dtype):
    case = GpuCase(2, 196, 6, 64, goal_speedup=1.1, dtype=dtype, directions=(FORWARD, TRAINING), full=False)
    rows = next(bench_gpu([case], seconds=0.01))
    assert [row.method for row in rows] == [*SOFTMAX_KERNELS[dtype], "sima"] * 2
    assert {row.dtype for row in rows} == {dtype}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_call_overhead_is_less_than_the_call():
    rows = [row for part in bench_call_overhead(shapes=[(1, 196, 6, 64)], seconds=0.01) for row in part]
    assert [(row.method, row.form) for row in rows[:4]] == [
        (method, form) for form in (MODULE, OPERATOR) for method in ("softmax", "sima")
    ]
    assert all(0 < row.p50_us < 10_000 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_whole_models_are_measured_in_each_mode():
    modes = (EAGER, COMPILE, GRAPH, REDUCE_OVERHEAD)
    cases = [(TWINS[0], ModelCase(mode, INFERENCE, 64, 2)) for mode in modes]
    training = (TWINS[0], ModelCase(GRAPH, "training", 64, 2))
    *measured, trained = bench_models([*cases, training], seconds=0.01)
    assert [[row.attention for row in rows] for rows in measured] == [["softmax", "sima"]] * 4
    assert [rows[0].mode for rows in measured] == list(modes)
    assert trained[0].peak_mib > measured[0][0].peak_mib
