"""Whole models: which cases are measured, the step that is timed, and the tables of the rows. No GPU is needed."""

from functools import partial

import pytest
import torch
from test_gpu import row_of
from torch import nn
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.bench import model as bench
from sima_attn.bench.model import (
    CASES,
    COMPILE,
    DIRECTIONS,
    EAGER,
    GRAPH,
    INFERENCE,
    REDUCE_OVERHEAD,
    TRAINING,
    TWINS,
    ModelCase,
    ModelSpeedRow,
    Twins,
    bench_models,
    create_step,
    select_cases,
)
from sima_attn.bench.tables import model_table, step_table, targets_table
from sima_attn.report.rows import read_rows, write_rows
from sima_attn.report.timing import time_interleaved

TINY = Twins("softmax", "deit_tiny_patch16_224", "sima_deit_tiny_patch16_224", {"dynamic_img_size": True, "depth": 1})


@pytest.fixture
def on_cpu(monkeypatch):
    """The benchmark without a GPU and without importing Dynamo; it gives the list of resets of torch.compile."""
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    timer = partial(time_interleaved, sample_seconds=0, least_samples=1)
    for name, value in {
        "DEVICE": "cpu",
        "check_cuda": lambda: None,
        "time_calls": timer,
        "time_graphs": timer,
        "peak_mib": lambda step, warmup: 0.0,
    }.items():
        monkeypatch.setattr(bench, name, value)
    return resets


def pair_of_rows(mode=EAGER, direction=INFERENCE, pixels=224, batch=8, speedup=1.0, target=0.0, pair=TWINS[0]):
    common = {"mode": mode, "direction": direction, "pixels": pixels, "batch": batch}
    return [
        row_of(ModelSpeedRow, model=pair.timm_name, attention=pair.attention, p50_ms=9.0, target=0.0, **common),
        row_of(
            ModelSpeedRow,
            model=pair.sima_name,
            attention="sima",
            p50_ms=9.0 / speedup,
            speedup=speedup,
            target=target,
            **common,
        ),
    ]


def test_every_mode_is_measured_at_batch_1_and_8_and_the_full_batch():
    sizes = {(224, 1), (224, 8), (224, 256), (512, 1), (512, 64), (1024, 1), (1024, 16)}
    for mode in (EAGER, COMPILE, REDUCE_OVERHEAD):
        found = [(c.pixels, c.batch) for c in CASES if (c.mode, c.direction) == (mode, INFERENCE)]
        assert sorted(found) == sorted(sizes)
    for direction in DIRECTIONS:
        found = {(c.pixels, c.batch) for c in CASES if (c.mode, c.direction) == (GRAPH, direction)}
        assert found == {(224, 256), (512, 64), (1024, 16), (1536, 8)}


def test_each_model_is_compiled_once_for_all_cases_that_can_share_it(monkeypatch):
    builds = []

    def record(pair, build, cases, seconds):
        builds.append((pair.family, build))
        yield from ([case] for case in cases)

    monkeypatch.setattr(bench, "_bench_build", record)
    monkeypatch.setattr(bench, "check_cuda", lambda: None)
    cases = select_cases()
    assert [case for (case,) in bench_models(cases)] == [case for _, case in cases]
    assert len(set(builds)) == len(builds) < len(cases)


def test_cases_are_selected_by_all_that_makes_them():
    everything = select_cases()
    assert {pair.family for pair, _ in everything} == {"deit", "xcit"}
    assert {case.mode for pair, case in everything if pair.family == "xcit"} == {GRAPH}
    (only,) = select_cases(models=["deit"], modes=[COMPILE], directions=[TRAINING], pixels=[224], batches=[8])
    assert only == (TWINS[0], ModelCase(COMPILE, TRAINING, 224, 8, target=1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": ["jit"]}, "the mode 'jit'; choose from: eager, compile, graph, reduce-overhead"),
        ({"models": ["cvt"]}, "the model 'cvt'; choose from: deit, xcit"),
        ({"models": ["xcit"], "modes": [EAGER]}, "the mode 'eager'; choose from: graph"),
        ({"modes": [EAGER], "pixels": [1536]}, "the image side 1536; choose from: 224, 512, 1024"),
        ({"directions": ["back"]}, "the direction 'back'; choose from: inference, training"),
        ({"pixels": [512], "batches": [8]}, "the batch 8; choose from: 1, 64"),
    ],
)
def test_a_selection_that_nothing_meets_says_what_there_is(options, message):
    with pytest.raises(ValueError, match=message):
        select_cases(**options)


class Probe(nn.Module):
    """A model that notes how it is run."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)
        self.seen = []

    def forward(self, images):
        logits = self.head(images.mean((2, 3)))
        self.seen.append((torch.is_inference_mode_enabled(), logits.dtype, self.training))
        return logits


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_step_is_what_a_user_writes(direction):
    model, images, labels = Probe(), torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    gradients = []
    model.head.weight.register_hook(gradients.append)
    out = create_step(model, EAGER, images, labels, direction)()
    training = direction == TRAINING
    assert model.seen == [(not training, torch.bfloat16, training)]
    assert [gradient.shape for gradient in gradients] == [(4, 3)] * training
    assert model.head.weight.grad is None  # a step leaves nothing behind
    assert (out is None) == training


@pytest.mark.parametrize(
    ("mode", "options"), [(EAGER, None), (COMPILE, {}), (REDUCE_OVERHEAD, {"mode": REDUCE_OVERHEAD})]
)
def test_modes_are_plain_calls_of_torch_compile(mode, options, monkeypatch):
    given, marks = [], []
    monkeypatch.setattr(torch, "compile", lambda model, **options: given.append(options) or model)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    assert create_step(Probe(), mode, images, labels, INFERENCE)().shape == (2, 4)
    assert given == ([] if options is None else [options])
    assert bool(marks) == (mode == REDUCE_OVERHEAD)


def test_a_case_gives_a_pair_of_rows(on_cpu):
    cases = [ModelCase(EAGER, direction, 32, 2, target=1.5) for direction in DIRECTIONS]
    for rows, direction in zip(bench_models([(TINY, case) for case in cases], seconds=0), DIRECTIONS, strict=True):
        assert [(row.model, row.attention) for row in rows] == [
            (TINY.timm_name, "softmax"),
            (TINY.sima_name, "sima"),
        ]
        twin, sima = rows
        assert (twin.speedup, twin.target, sima.target) == (1.0, 0.0, 1.5)
        assert sima.speedup == pytest.approx(twin.p50_ms / sima.p50_ms, rel=0.01)
        assert sima.images_per_second == pytest.approx(2 / sima.p50_ms * 1e3, rel=0.01)
        assert (sima.mode, sima.direction, sima.pixels, sima.batch) == (EAGER, direction, 32, 2)
        assert len({row.key for row in rows}) == 2
    assert len(on_cpu) == 2  # each size is compiled afresh


def test_calls_of_the_command_add_up_in_one_file(monkeypatch, tmp_path):
    """Rows of other cases stay with --update, and the order is that of one run over everything."""

    def measure(cases, seconds):
        for pair, case in cases:
            target = case.target if pair.attention == "softmax" else 0.0
            yield pair_of_rows(case.mode, case.direction, case.pixels, case.batch, target=target, pair=pair)

    monkeypatch.setattr(bench, "bench_models", measure)
    monkeypatch.setattr("sima_attn.report.cuda_timing.check_cuda", lambda: None)

    def run(name, *options):
        result = CliRunner().invoke(cli.app, ["bench", "model", "--out", str(tmp_path / name), *options])
        assert result.exit_code == 0, result.output
        return result.output

    deit, graph = ["--model", "deit"], ["--mode", GRAPH]
    for options in (graph, [*deit, "--mode", REDUCE_OVERHEAD, "--mode", COMPILE], ["--mode", EAGER], [*deit, *graph]):
        run("parts.csv", *options, "--update")
    output = run("whole.csv")
    assert (tmp_path / "parts.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert output.count(" met ") + output.count(" missed ") == sum(case.target > 0 for case in CASES)
    run("whole.csv", "--mode", EAGER)  # without --update the file has these rows alone
    assert {row.mode for row in read_rows(tmp_path / "whole.csv", ModelSpeedRow)} == {EAGER}


def test_a_file_of_another_version_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr("sima_attn.report.cuda_timing.check_cuda", lambda: None)
    (tmp_path / "old.csv").write_text("model,called_ms\ndeit,1\n")
    result = CliRunner().invoke(cli.app, ["bench", "model", "--update", "--out", str(tmp_path / "old.csv")])
    assert isinstance(result.exception, ValueError)
    assert "another version wrote the file" in str(result.exception)


def test_graphs_and_calls_have_their_own_tables(tmp_path):
    rows = pair_of_rows(EAGER, speedup=0.9, target=1.0) + pair_of_rows(GRAPH, batch=256, speedup=1.5, target=1.1)
    rows += pair_of_rows(GRAPH, pair=TWINS[1], batch=256, speedup=1.2)
    write_rows(tmp_path / "model.csv", rows)
    rows = read_rows(tmp_path / "model.csv", ModelSpeedRow)
    assert step_table(rows).lines == [[EAGER, INFERENCE, "224, 8", "9.00", "10.00", "0.90x", "1.00x"]]
    assert [line[0] for line in model_table(rows).lines] == [pair.timm_name for pair in TWINS]
    assert [line[5:7] for line in model_table(rows).lines] == [["1.50x", "1.10x"], ["1.20x", "-"]]
    assert targets_table(rows).lines == [
        ["eager, inference, 224 px, batch 8", "9.00 ms", "10.00 ms", "0.900", ">= 1.00", "missed"],
        ["graph, inference, 224 px, batch 256", "9.00 ms", "6.00 ms", "1.500", ">= 1.10", "met"],
    ]
