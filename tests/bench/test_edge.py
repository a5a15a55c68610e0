"""The edge benchmarks on tiny models: right rows, ratios of one run, refusals; and the paper's numbers as printed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.bench import edge, paper_edge
from sima_attn.bench.edge import EdgeRow, bench_edge, edge_table, peak_mib
from sima_attn.bench.figures import plot_edge
from sima_attn.bench.paper_edge import (
    CASES,
    OURS,
    SWEEPS,
    PaperEdgeRow,
    bench_paper_edge,
    bench_paper_gpu,
    paper_edge_table,
    paper_gpu_table,
)
from sima_attn.export.quantize import FileRow
from sima_attn.export.runtimes import installed_runtimes, read_metadata
from sima_attn.models import loading
from sima_attn.models.pretrained import weights_file
from sima_attn.report.rows import read_rows, write_rows

needs_onnx = pytest.mark.skipif("onnxruntime" not in installed_runtimes(), reason="needs onnxruntime")
TINY = {"depth": 1, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("edge")
    options = {"families": ["deit_tiny"], "sizes": [32], "threads": [1], "wanted_runtimes": ["onnxruntime"]}
    (found,) = bench_edge(folder, **options, seconds=0.0, **TINY)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge, "peak_mib", lambda path, runtime: 1.0)  # each would start a process
        list(bench_edge(folder, **options, seconds=0.0, on_step=steps.append, **TINY))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before  # files are reused
    assert steps == ["memory of deit_tiny, 32 px", "deit_tiny, 32 px, 1 thread"]
    return found


def test_there_is_a_row_for_every_model_and_precision(rows):
    assert [(row.variant, row.precision) for row in rows] == [
        (variant, precision) for variant in ("softmax", "sima", "sima + relu") for precision in ("fp32", "int8")
    ]
    assert {row.exp_like_nodes for row in rows if row.variant == "sima + relu"} == {0}
    assert {row.exp_like_nodes for row in rows if row.variant == "softmax"} == {2}  # a softmax, a GELU
    assert all(row.peak_mib > 0 for row in rows)
    assert all(row.error < 1e-5 for row in rows if row.precision == "fp32")


def test_ratios_are_those_of_the_times(rows):
    times = {(row.variant, row.precision): row.p50_ms for row in rows}
    for row in rows:
        assert row.speedup == pytest.approx(times["softmax", "fp32"] / row.p50_ms, rel=0.05)
        assert row.speedup_same_precision == pytest.approx(times["softmax", row.precision] / row.p50_ms, rel=0.05)


def test_rows_make_a_table_and_a_figure(rows, tmp_path):
    write_rows(tmp_path / "edge.csv", rows)
    again = read_rows(tmp_path / "edge.csv", EdgeRow)
    assert again == rows
    table = edge_table(again, threads=1)
    assert len(table.lines) == 6
    assert table.bold == {2, 3, 4, 5}
    plot_edge([*again, *(replace(row, runtime="openvino") for row in again)], tmp_path / "edge.png")
    assert (tmp_path / "edge.png").read_bytes().startswith(b"\x89PNG")


def test_goals_are_those_asked_for():
    deit, xcit, shipped = (edge.FAMILIES[name] for name in ("deit_tiny", "xcit_tiny", "xcit_mini"))
    assert deit.goal("softmax", "fp32", 512) == 0
    assert deit.goal("sima", "fp32", 512) == 1.4
    assert (deit.goal("sima", "fp32", 224), deit.goal("sima + relu", "fp32", 224)) == (1.05, 1.08)
    assert deit.goal("sima + relu", "int8", 224) == 2.5
    assert deit.goal("sima", "int8", 224) == 0
    assert xcit.goal("sima", "fp32", 224) == 1.0
    assert (shipped.goal("sima + relu", "fp32", 64), shipped.goal("sima + relu", "fp32", 128)) == (1.08, 1.4)


def test_the_model_with_weights_stands_beside_its_softmax_twin():
    family = edge.FAMILIES["xcit_mini"]
    twin, sima, shipped = (
        timm.create_model(name, **{**options, "pretrained": False}) for _, name, options in family.variants.values()
    )
    assert type(twin.blocks[0].attn).__name__ == "SoftmaxAttention"
    assert type(sima.blocks[0].attn).__name__ == "SimAttention"
    assert [p.shape for p in twin.parameters()] == [p.shape for p in sima.parameters()]
    assert family.variants["sima + relu"].options["pretrained"]
    assert weights_file(family.variants["sima + relu"].name).is_file()
    assert isinstance(shipped.blocks[0].mlp.act, torch.nn.ReLU)
    called = [variant.called for family in edge.FAMILIES.values() for variant in family.variants.values()]
    assert len(set(called)) == len(called)  # each has a file of its own


def test_a_wrong_result_is_not_timed(rows, monkeypatch):
    class Wrong:
        def __call__(self, images):
            return np.ones((1, 5), dtype=np.float32)

    form = edge._Form("sima", "fp32", "openvino")
    monkeypatch.setattr(edge, "open_model", lambda path: lambda images: np.zeros((1, 5), dtype=np.float32) + 2)
    with pytest.raises(RuntimeError, match="sima in openvino is off by"):
        edge._check({form: Wrong()}, {("sima", "fp32"): None}, None)


def test_unknown_choices_are_said(tmp_path):
    with pytest.raises(ValueError, match=r"unknown family 'diet_tiny'.*did you mean 'deit_tiny'"):
        next(bench_edge(tmp_path, families=["diet_tiny"]))
    with pytest.raises(ValueError, match="unknown runtime 'tensorrt'; known: onnxruntime, openvino"):
        next(bench_edge(tmp_path, wanted_runtimes=["tensorrt"]))
    with pytest.raises(ValueError, match="unknown precision 'int4'"):
        next(bench_edge(tmp_path, precisions=["int4"]))


def test_memory_that_cannot_be_measured_is_an_error(tmp_path):
    pytest.importorskip("onnxruntime")
    with pytest.raises(RuntimeError, match="could not be measured"):
        peak_mib(tmp_path / "none.onnx", "onnxruntime")


def test_table_3_runs_at_its_own_shapes_and_prints_the_paper_beside():
    groups = list(bench_paper_edge(runs=2))
    assert [(group[0].N, group[0].D) for group in groups] == [(256, 64), (64, 256)]
    for group, pinned, free in zip(groups, ("qk", "kv"), ("kv", "qk"), strict=True):
        orders = {row.attention: row.order for row in group}
        assert (orders["SimA"], orders["ELU"], orders[OURS]) == (pinned, pinned, free)
        assert all(row.error < 1e-5 and row.runs == 2 for row in group)
    paper = {line[0]: line[-3:] for line in paper_edge_table(groups[0]).lines}
    assert paper["vanilla"] == ["177.4", "35.8", "180.6"]
    assert paper[OURS] == ["-", "-", "-"]
    assert CASES[1].paper_ms["XCA"] == (144.4, 36.1, 178.7)


def test_rows_of_table_3_are_read_back(tmp_path):
    rows = next(bench_paper_edge(runs=1))
    write_rows(tmp_path / "rows.csv", rows)
    assert read_rows(tmp_path / "rows.csv", PaperEdgeRow) == rows


@pytest.mark.usefixtures("brief_timing")
def test_figure_a1_runs_the_same_code_on_a_processor():
    """On a GPU it is the same functions with another device."""
    small = [
        replace(SWEEPS[0], shapes=((64, 16, 6, 64), (96, 36, 6, 64))),
        replace(SWEEPS[1], shapes=((32, 49, 1, 32),)),
    ]
    points = list(bench_paper_gpu(sweeps=small, seconds=0.0, device="cpu", batch=2))
    assert [[row.attention for row in point] for point in points] == [
        ["vanilla", "SimA", OURS],
        ["vanilla", "SimA", OURS],
        ["XCA", "SimA", OURS],
    ]
    assert [row.paper_slower for point in points for row in point if row.attention == "SimA"] == [0, 0.58, 0.22]
    assert {row.order for row in points[0] if row.attention == "SimA"} == {"qk"}
    assert {row.order for row in points[2] if row.attention == "SimA"} == {"kv"}
    lines = paper_gpu_table([row for point in points for row in point]).lines
    assert [line[6] for line in lines] == ["-", "+58%", "+22%"]
    assert (SWEEPS[0].shapes[-1], SWEEPS[1].shapes[-1]) == ((1536, 9216, 6, 64), (8192, 196, 1, 8192))


def test_a_wrong_core_is_not_timed(monkeypatch):
    monkeypatch.setattr(paper_edge, "algorithm_1", lambda q, k, v, order: 1.01 * q)
    with pytest.raises(RuntimeError, match="SimA is off by"):
        next(bench_paper_edge(runs=1))


def test_paper_gpu_needs_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        next(bench_paper_gpu())


def sima(*arguments):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@needs_onnx
def test_export_quantize_and_audit_from_the_command_line(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    load = loading.load_model

    def small(what, **options):
        name = what if timm.is_model(str(what)) else "sima_deit_tiny_patch16_224_relu"
        loaded = load(name, **options)
        model = timm.create_model(name, img_size=32, **TINY)
        return replace(loaded, name=Path(what).name, model=model, preprocessing=replace(loaded.preprocessing, size=32))

    monkeypatch.setattr(loading, "load_model", small)
    (tmp_path / "labels.txt").write_text("\n".join(f"class {k}" for k in range(5)))
    out = sima(
        *("export", "sima_deit_tiny_patch16_224_relu", "-o", tmp_path / "m.onnx", "--size", 32),
        *("--labels", tmp_path / "labels.txt", "--fail-on-exp"),
    )
    assert "weights: random" in out
    assert "no exp-like call in the whole network" in out
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    for i in range(32):
        noise = np.random.default_rng(i).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        image.fromarray(noise).save(tmp_path / "photos" / f"{i}.png")
    rows = tmp_path / "rows.csv"
    common = ("--data", tmp_path / "photos", "--compare", 8, "--rows", rows)
    out = sima("quantize", tmp_path / "m.onnx", *common)
    assert "int8 against float32" in out
    full, small_one = read_rows(rows, FileRow)
    assert (full.format, full.images, full.data) == ("fp32", 8, "photos")
    assert (small_one.file, small_one.calibration_images, small_one.exp_like_nodes) == ("m.int8.onnx", 32, 0)

    # A run's folder is exported first; its rows join those of the other model, and a second time replace their own.
    run = tmp_path / "a-run"
    run.mkdir()
    (run / "model.onnx").write_text("exported by the user, with other options")
    for _ in range(2):
        sima("quantize", run, *common)
        assert [row.model for row in read_rows(rows, FileRow)] == [full.model] * 2 + ["a-run"] * 2
    assert read_metadata(run / "model.int8.onnx")["model"] == "a-run"
    assert (run / "model.onnx").read_text() == "exported by the user, with other options"
    assert "no exp-like call" in sima("audit", tmp_path / "m.int8.onnx", "--fail-on-exp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "sima_deit_tiny_patch16_224", "-o", "m.onnx", "--size", "100"], "a multiple of the patch size 16"),
        (["export", "sima_diet", "-o", "m.onnx"], "unknown model, run folder or file 'sima_diet'"),
        (["export", "runs/none", "-o", "m.onnx", "--pretrained"], "unknown model, run folder or file 'runs/none'"),
        (["quantize", "none.onnx", "--data", "digits"], "there is no .onnx file or run folder none.onnx"),
        (["quantize", "sima_cvt_13", "--data", "digits"], "there is no .onnx file or run folder sima_cvt_13"),
        (["bench", "edge", "--runtime", "openvino"], "openvino, which is not installed"),
        (["quantize", "a.onnx", "b.onnx", "-o", "c.onnx", "--data", "digits"], "--out names one file"),
    ],
)
@needs_onnx
def test_wrong_commands_are_said(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sima_attn._errors.find_spec", lambda package: None if package == "openvino" else package)
    result = CliRunner().invoke(cli.app, arguments)
    assert isinstance(result.exception, ValueError | FileNotFoundError)  # which `sima` prints as one line
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []
