"""The miniature grid: its table of runs, and how runs are made, skipped, resumed and reported."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib.figure
import pytest
import torch
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn._settings import check, differences
from sima_attn.models.building import build_model
from sima_attn.models.loading import load_model
from sima_attn.report.rows import read_rows
from sima_attn.reproduce import miniature, miniature_report
from sima_attn.reproduce.miniature import (
    GRID,
    RUNS,
    XCIT,
    CurveRow,
    MiniatureRun,
    ResultRow,
    SizeRow,
    miniature_recipe,
    planned_runs,
)
from sima_attn.reproduce.miniature_report import paper_to_twin, plot, results_table, sizes_table, to_twin
from sima_attn.reproduce.table_1 import TABLE_1
from sima_attn.train.logs import read_log
from small_runs import class_folders

DOCS = Path(__file__).parents[2] / "docs" / "miniature.md"
SMALL = (
    "data.size=16",
    "run.batch=8",
    "run.log_steps=1",
    "run.precision=fp32",
    "augment.padding=2",
    *(f"model.kwargs.{name}" for name in ("img_size=16", "depth=1", "embed_dim=16", "num_heads=2")),
)
HEAD = MiniatureRun("sima", "SimA", epochs=2, settings=SMALL, headline=True)
BROKEN = MiniatureRun("sima_lr", "SimA, far too fast", epochs=2, settings=(*SMALL, "optim.lr=1e38", "optim.clip=none"))


@pytest.fixture
def data(tmp_path):
    return str(class_folders(tmp_path / "data", (8, 4), tuple("abcdef")))


def row(name, top1=50.0, status="finished", seed=0, epochs=60, **changes):
    given = {"model": "m", "attention": "sima", "options": "", "heads": 3, "params": 5_400_000, "top5": 80.0}
    facts = {"steps": 1, "seconds": 1.0, "images_per_second": 1.0, "device": "cpu", "torch": "2", "date": "2026-01-01"}
    given = {**given, **facts, **changes}
    return ResultRow(name=name, top1=top1, status=status, seed=seed, epochs=epochs, ema_top1=math.nan, **given)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_run_of_the_grid_can_be_made(run):
    recipe = miniature_recipe(run, "somewhere", True)
    check(recipe)
    assert recipe.run.compile
    with torch.device("meta"):
        model = build_model(replace(recipe.model, kwargs={**recipe.model.kwargs, "depth": 1}), 100)
        assert model.eval()(torch.empty(1, 3, 64, 64)).shape == (1, 100)
    attention = next(m for n, m in model.named_modules() if n.endswith("blocks.0.attn"))
    assert attention.num_heads == run.heads
    assert run.twin in {other.name for other in RUNS}


def test_names_are_unique_and_the_headline_pair_differs_in_one_word():
    assert len({run.name for run in RUNS}) == len(RUNS)
    pair = [miniature_recipe(run, "d", False) for run in RUNS if run.headline]
    assert differences(*(replace(recipe, name="") for recipe in pair)) == ["model.attention: softmax -> sima"]


def test_the_papers_numbers_are_those_of_its_table():
    ours = {run.name: run.paper for run in RUNS}
    assert [row.top1 for row in TABLE_1 if row.ours == "sima_deit_small_patch16_224"] == [ours["sima"]]
    assert [row.top1 for row in TABLE_1 if row.ours.endswith("_1head")] == [ours["sima_1head"]]
    assert [row.top1 for row in TABLE_1 if row.ours.endswith("_relu")] == [ours["sima_relu"]]
    assert [row.top1 for row in TABLE_1 if row.ours == "sima_xcit_small_12_p16_224"] == [ours["xcit_sima"]]
    assert paper_to_twin(next(run for run in RUNS if run.name == "softmax_1head")) == pytest.approx(-2.8)


def test_the_docs_list_the_grid():
    text = DOCS.read_text()
    assert [run.name for run in RUNS if f"| `{run.name}` | {run.about} |" not in text] == []


def test_a_scale_given_by_token_ref_is_that_scale_at_the_training_size():
    """l2 with the output divided by N: the factor N / token_ref is 1 / N."""
    run = next(run for run in RUNS if run.name == "sima_l2_scaled")
    assert miniature.TOKENS / run.options["token_ref"] == 1 / miniature.TOKENS


def test_headline_runs_take_every_seed_and_the_others_the_first():
    runs = planned_runs(["sima", "elu"], epochs=9, seeds=[3, 4])
    assert [(run.name, run.seed, run.epochs) for run in runs] == [("sima", 3, 9), ("sima", 4, 9), ("elu", 3, 9)]
    assert len(planned_runs()) == len(RUNS) + 2
    with pytest.raises(ValueError, match=r"unknown run 'smia'; .* did you mean 'sima'\?"):
        planned_runs(["smia"])


def test_a_run_writes_rows_is_not_made_twice_and_is_resumed(data, tmp_path, monkeypatch):
    sizes = miniature.evaluate_sizes

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(miniature, "OTHER_SIZES", (16, 24))
    monkeypatch.setattr(miniature, "evaluate_sizes", stop)
    with pytest.raises(KeyboardInterrupt):
        GRID.make_run(HEAD, tmp_path, data, device="cpu", quiet=True)
    monkeypatch.setattr(miniature, "evaluate_sizes", sizes)
    resumed = []
    train = miniature.train_classifier
    monkeypatch.setattr(
        miniature,
        "train_classifier",
        lambda *args, resume, **options: resumed.append(resume) or train(*args, resume=resume, **options),
    )
    ((run, made),) = GRID.make_runs(lambda: [HEAD], tmp_path, data, device="cpu")
    assert resumed == [True]
    assert run is HEAD
    assert (made.status, made.steps, made.seed, made.heads) == ("finished", 12, 0, 3)
    assert made.params == sum(p.numel() for p in load_model(tmp_path / HEAD.folder).model.parameters())
    assert not list((tmp_path / HEAD.folder / "checkpoints").iterdir())

    monkeypatch.setattr(miniature, "train_classifier", None)
    assert repr(GRID.make_run(HEAD, tmp_path, data, device="cpu")) == repr(made)
    results, at_sizes, curves = GRID.read_collected(tmp_path)
    assert [r.top1 for r in results] == [made.top1]
    assert [(r.px, r.token_ref) for r in at_sizes] == [(16, False), (24, False), (24, True)]
    assert at_sizes[0].top1 == pytest.approx(made.top1)
    assert [(r.epoch, r.top1) for r in curves][-1] == (2.0, pytest.approx(made.top1))


def test_the_seconds_are_those_of_the_batch_that_the_images_allow(data, tmp_path):
    run = replace(HEAD, headline=False, settings=(*SMALL, "run.batch=4800"))  # of 48 images
    made = GRID.make_run(run, tmp_path, data, device="cpu", quiet=True)
    log = read_log(tmp_path / run.folder / "train.csv")
    assert made.seconds == pytest.approx(sum(48 / float(row["images_per_second"]) for row in log), abs=0.051)


def test_a_loss_that_is_not_finite_is_a_result(data, tmp_path):
    made = GRID.make_run(BROKEN, tmp_path, data, device="cpu", quiet=True)
    assert made.status.startswith("diverged at step ")
    assert math.isnan(made.top1)
    assert read_rows(tmp_path / BROKEN.folder / "results.csv", ResultRow)[0].status == made.status


def test_another_error_is_no_result(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        GRID.make_run(HEAD, tmp_path, str(tmp_path / "nothing"), device="cpu", quiet=True)
    assert not (tmp_path / HEAD.folder / "results.csv").exists()


@pytest.mark.timeout(300)  # a new process imports torch, on a busy machine for a minute
def test_a_run_in_a_process_is_the_run_made_here(data, tmp_path):
    runs = [replace(HEAD, headline=False, seed=seed) for seed in (0, 1)]
    alone = [GRID.make_run(run, tmp_path / "alone", data, device="cpu", quiet=True) for run in runs]
    ((_, made),) = GRID.make_runs(lambda: runs[1:], tmp_path / "process", data, device="cpu", jobs=2)
    assert (made.top1, made.top5) == (alone[1].top1, alone[1].top5)
    GRID.collect(tmp_path / "alone")
    assert [r.seed for r in GRID.read_collected(tmp_path / "alone")[0]] == [0, 1]
    assert [r.seed for r in GRID.read_collected(tmp_path / "process")[0]] == [1]


ROWS = [
    row("softmax", 60.0),
    row("softmax", 61.0, seed=1),
    row("sima", 60.25),
    row("sima_no_norm", math.nan, "diverged at step 3"),
    row("xcit_sima", 70.0, model=XCIT),
    row("sima", 40.0, epochs=30),
]


def test_the_table_has_means_differences_and_the_papers_numbers():
    runs = {run.name: run for run in RUNS}
    assert to_twin(runs["sima"], ROWS, 60) == -0.25
    assert to_twin(runs["sima_no_norm"], ROWS, 60) is None
    assert to_twin(runs["xcit_sima"], ROWS, 60) is None  # its twin was not run
    lines = {(line[0], line[4]): line[5:] for line in results_table(ROWS).lines}
    assert lines["softmax", "60"] == ["60.5 (60.0 to 61.0, 2 seeds)", "-", "79.8, DeiT-S", "+0.0"]
    assert lines["sima", "60"] == ["60.2", "-0.2", "79.8, DeiT-S", "+0.0"]
    assert lines["sima", "30"] == ["40.0", "-", "79.8, DeiT-S", "+0.0"]
    assert lines["sima_no_norm", "60"] == ["diverged at step 3", "-", "did not converge, XCiT-S12/16", "-"]
    assert results_table(ROWS).markdown().count("**sima**") == 2


def test_sima_at_the_doubled_rate_is_compared_with_softmax_at_its_better_rate():
    run = next(run for run in RUNS if run.name == "sima_lr")
    assert to_twin(run, [row("sima_lr", 61.0), row("softmax_lr", 59.0), row("softmax", 60.0)], 60) == 1.0
    assert to_twin(run, [row("sima_lr", 61.0), row("softmax_lr", 59.0)], 60) is None


def test_the_table_of_sizes_takes_the_training_size_for_both():
    rows = [SizeRow("sima", 0, 60, 64, False, 50.0, 80.0)]
    rows += [SizeRow("sima", 0, 60, 96, use, top1, 80.0) for use, top1 in ((False, 30.0), (True, 51.0))]
    assert [line[2:] for line in sizes_table(rows).lines] == [["no", "50.0", "30.0"], ["yes", "50.0", "51.0"]]


def test_the_figure_is_drawn_with_curves_and_without(tmp_path):
    curves = [CurveRow("sima", 0, 60, epoch, 10.0 * epoch, 1.0) for epoch in (1.0, 2.0)]
    for name, drawn in (("with.png", curves), ("without.png", [])):
        plot(ROWS, [], drawn, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_figure_has_pairs_of_other_schedules(tmp_path, monkeypatch):
    drawn = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda whole, *a, **o: drawn.append(whole) or save(whole, *a, **o)
    )
    shorter = [replace(row, epochs=30) for row in ROWS if row.name == "softmax"]
    curves = [CurveRow("sima", 0, epochs, float(epochs), 10.0, 1.0) for epochs in (30, 60)]
    for rows in (ROWS, [*ROWS, *shorter]):
        plot(rows, [], curves, tmp_path / "figure.png")
        assert [line.get_xdata()[0] for line in drawn[-1].axes[0].get_lines()] == [60.0]  # curves of one schedule
    alone, paired = ([label.get_text() for label in figure.axes[1].get_yticklabels()] for figure in drawn)
    assert paired == [*alone, "SimA, 3 heads, 30 epochs"]  # softmax itself is no pair


def test_the_command_runs_the_grid_and_names_wrong_data_first(data, tmp_path, monkeypatch):
    runs = (replace(HEAD, headline=False), BROKEN)
    monkeypatch.setattr(miniature, "GRID", replace(GRID, runs=runs))
    monkeypatch.setattr(miniature_report, "RUNS", runs)
    arguments = ["reproduce", "miniature", "--out", str(tmp_path / "out"), "--device", "cpu", "--epochs", "2"]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        CliRunner().invoke(cli.app, [*arguments, "--data", str(tmp_path / "none")], catch_exceptions=False)
    done = CliRunner().invoke(cli.app, [*arguments, "--data", data], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "run 2 of 2: sima_lr-2epochs-seed0" in done.output
    assert "diverged at step" in done.output
    files = {p.name for p in (tmp_path / "out").iterdir() if p.is_file()}
    assert files == {"results.csv", "curves.csv", "tables.md", "miniature.png"}
    assert (tmp_path / "out" / "tables.md").read_text().startswith("| run | what it is |")
    other = tmp_path / "other"
    shutil.copytree(data, other)
    with pytest.raises(ValueError, match=r"on the images in .*, not on those in .*other"):
        CliRunner().invoke(cli.app, [*arguments, "--data", str(other)], catch_exceptions=False)
