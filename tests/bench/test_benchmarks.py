"""The benchmarks run on small shapes, refuse wrong results, and have rows of every case."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sima_attn.bench import cpu, demo
from sima_attn.bench.cores import FORWARD, TRAINING
from sima_attn.bench.cpu import CASES, Case, CpuRow, bench_cpu
from sima_attn.bench.figures import plot_time_against_tokens
from sima_attn.bench.tables import cpu_table
from sima_attn.nn import ATTENTIONS
from sima_attn.report.rows import read_rows

pytestmark = pytest.mark.usefixtures("brief_timing")
REPOSITORY = Path(__file__).parents[2]
SMALL = (Case(1, 2, 9, 4, goal=1.0, goal_training=2.0), Case(2, 2, 3, 4, goal=1.0, goal_training=2.0))


def test_cpu_benchmark_has_a_row_for_every_method_and_shape():
    (first, second) = bench_cpu(cases=SMALL, seconds=0.0, compiled=False)
    methods = [(row.direction, row.method) for row in first]
    assert methods == [(way, method) for way in (FORWARD, TRAINING) for method in ("softmax", "paper", "sima")]
    assert first[0].speedup == first[3].speedup == 1.0
    assert [row.goal for row in (first[2], first[5])] == [1.0, 2.0]
    assert [(row.order, row.N) for row in (first[2], second[2])] == [("kv", 9), ("qk", 3)]
    for row in first + second:
        assert row.p20_us <= row.p50_us <= row.p80_us
        assert row.p50_us > 0
        assert row.error < 1e-5
        assert row.torch == torch.__version__


def test_cpu_benchmark_gives_the_threads_back():
    before = torch.get_num_threads()
    rows = next(bench_cpu(cases=SMALL[:1], threads=2, seconds=0.0, compiled=False))
    assert rows[0].threads == 2
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "wrong",
    [
        lambda qkv: 0 * cpu.sima_attention_qkv(qkv),
        lambda qkv: cpu.sima_attention_qkv(qkv).detach() + 0 * qkv[:, :, 0],  # no gradient
    ],
    ids=["output", "gradient"],
)
def test_no_time_is_reported_for_a_wrong_result(wrong, monkeypatch):
    monkeypatch.setitem(cpu.METHODS, "sima", wrong)
    with pytest.raises(RuntimeError, match=r"sima .* is off by 1.0e\+00"):
        next(bench_cpu(cases=SMALL, seconds=0.0, compiled=False))


def test_the_demo_has_every_attention_right_at_every_size(tmp_path):
    steps = []
    rows = demo.run_demo(tokens=(49, 196), seconds=0.0, on_step=steps.append)
    assert [(row.attention, row.N) for row in rows] == [(name, N) for N in (49, 196) for name in ATTENTIONS]
    assert all(row.error < 1e-5 for row in rows)
    exp_free = {"sima", "sima_local", "relu2", "relu2_wide", "cosformer", "cosformer_2d"}
    assert exp_free <= {row.attention for row in rows if row.exps == 0}
    assert all(row.exps > 0 for row in rows if row.attention.startswith("softmax"))
    assert [row.order for row in rows if row.attention == "sima"] == ["qk", "kv"]
    assert len(steps) == len(ATTENTIONS) + 2
    figure = tmp_path / "figures" / "time.png"
    plot_time_against_tokens(rows, figure)
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_demo_stops_when_a_count_is_wrong(monkeypatch):
    true_cost = ATTENTIONS["elu"].cost
    monkeypatch.setattr(ATTENTIONS["elu"], "cost", lambda self, shape: replace(true_cost(self, shape), exps=7))
    with pytest.raises(RuntimeError, match=r"elu evaluated .* its cost says 7"):
        demo.run_demo(tokens=(49,), seconds=0.0)


def committed_rows():
    return read_rows(REPOSITORY / "benchmarks" / "results" / "cpu.csv", CpuRow)


def test_committed_rows_cover_every_case_on_one_and_two_threads():
    rows = committed_rows()
    found = {(row.method, row.compiled, row.direction, row.threads, row.B, row.H, row.N, row.D) for row in rows}
    forms = [(method, False, direction) for method in cpu.METHODS for direction in (FORWARD, TRAINING)]
    forms += [("paper", True, FORWARD), ("sima", True, FORWARD)]
    assert found == {
        (*form, threads, case.B, case.H, case.N, case.D) for form in forms for threads in (1, 2) for case in CASES
    }


def test_a_table_of_threads_that_were_not_measured_is_an_error():
    with pytest.raises(ValueError, match=re.escape("no rows for 64 threads; there are: [1, 2]")):
        cpu_table(committed_rows(), 64, FORWARD)
