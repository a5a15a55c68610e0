"""The self-supervised grid: its table of runs, and how runs are made, evaluated, skipped, resumed and reported."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn._settings import check, differences
from sima_attn.data.cache import Cache
from sima_attn.data.loader import BrokenImages
from sima_attn.data.settings import Data
from sima_attn.data.splits import open_data
from sima_attn.dino.recipes import named_dino_recipe
from sima_attn.dino.task import Dino
from sima_attn.models.building import build_model
from sima_attn.probe.features import LayerFeatures, extract, features_of, with_workers
from sima_attn.report.rows import read_rows
from sima_attn.reproduce import dino, dino_report
from sima_attn.reproduce.dino import (
    GRID,
    RUNS,
    DinoCurveRow,
    DinoResultRow,
    dino_recipe,
    planned_dino_runs,
    supervised_recipe,
)
from sima_attn.reproduce.dino_report import dino_curve_table, dino_table
from sima_attn.reproduce.grid import training_speed
from sima_attn.reproduce.processes import in_processes
from small_runs import class_folders

SMALL = (
    "data.size=16",
    "crops.local_size=8",
    "crops.local_count=2",
    "run.batch=8",
    "run.log_steps=1",
    "run.eval_epochs=1",
    "run.precision=fp32",
    "distill.out_dim=12",
    "distill.hidden_dim=10",
    "distill.bottleneck_dim=6",
    "probe.k=3",
    "probe.epochs=3",
    *(f"model.kwargs.{name}" for name in ("img_size=16", "patch_size=8", "depth=2", "embed_dim=16", "num_heads=2")),
)


def small(name, **changes):
    run = next(run for run in RUNS if run.name == name)
    epochs = 0 if run.epochs == 0 else 2
    return replace(run, settings=(*run.settings, *SMALL), epochs=epochs, **changes)


SIMA = small("sima")


@pytest.fixture
def data(tmp_path):
    return str(class_folders(tmp_path / "data"))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_run_of_the_grid_can_be_made(run):
    recipe = dino_recipe(replace(run, epochs=run.epochs and 40), "somewhere", True)
    check(recipe)
    assert recipe.run.compile
    assert recipe.schedule.warmup_epochs == (4 if run.epochs else 10)
    with torch.device("meta"):
        model = build_model(replace(recipe.model, kwargs={**recipe.model.kwargs, "depth": 1}), 0).eval()
        for size in (recipe.data.size, recipe.crops.local_size):
            assert model(torch.empty(1, 3, size, size)).shape == (1, 192)


def test_the_twins_differ_in_one_word_and_the_supervised_run_sees_the_same():
    sima, xca, published, made_up = (
        replace(dino_recipe(run, "d", False), name="")
        for run in planned_dino_runs(["sima", "xca", "sima_paper", "sima_token_ref"])
    )
    assert differences(sima, published) == ["distill.class_token_ref: True -> False"]
    assert differences(sima, xca) == ["model.attention: sima -> xca"]
    assert differences(sima, made_up) == ["distill.token_ref: False -> True"]
    labeled = supervised_recipe(sima)
    assert (labeled.model, labeled.data, labeled.run) == (sima.model, sima.data, sima.run)
    assert labeled.schedule.epochs == sima.schedule.epochs


def test_the_rates_of_the_linear_classifier_add_up_to_the_papers():
    """Steps times rate: 100 epochs of 1.28 million images at 0.001, of some 40 thousand at the recipe's."""
    assert named_dino_recipe("miniature").probe.lr * 40_000 == pytest.approx(1e-3 * 1_281_167, rel=0.1)


def test_runs_are_chosen_by_name():
    assert [(run.name, run.epochs) for run in planned_dino_runs(["xca", "random"], epochs=9)] == [
        ("xca", 9),
        ("random", 0),
    ]
    assert planned_dino_runs() == list(RUNS)
    with pytest.raises(ValueError, match=r"unknown run 'smia'; .* did you mean 'sima'\?"):
        planned_dino_runs(["smia"])


def test_a_run_writes_rows_is_not_made_twice_and_is_resumed(data, tmp_path, monkeypatch):
    evaluate = dino.evaluate_features

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dino, "evaluate_features", stop)
    with pytest.raises(KeyboardInterrupt):
        GRID.make_run(SIMA, tmp_path, data, device="cpu", quiet=True)
    monkeypatch.setattr(dino, "evaluate_features", evaluate)
    resumed = []
    train = dino.train_dino
    monkeypatch.setattr(
        dino,
        "train_dino",
        lambda *args, resume, **options: resumed.append(resume) or train(*args, resume=resume, **options),
    )
    ((run, made),) = GRID.make_runs(lambda: [SIMA], tmp_path, data, device="cpu")
    assert resumed == [True]
    assert run is SIMA
    assert (made.status, made.steps, made.epochs, made.weights, made.jobs) == ("finished", 6, 2, "dino", 1)
    assert (made.bank, made.images, made.k) == (24, 12, 3)
    for value in (made.knn_top1, made.knn_top5, made.linear_top1, made.linear_top5):
        assert 0 <= value <= 100
    assert not list((tmp_path / SIMA.folder / "checkpoints").iterdir())
    results, curves = GRID.read_collected(tmp_path)
    assert results == [made]
    # The last evaluation of the run is the k-NN of the row: the same teacher, bank and images.
    assert [point.epoch for point in curves] == [1.0, 2.0]
    assert curves[-1].knn_top1 == pytest.approx(made.knn_top1)

    monkeypatch.setattr(dino, "train_dino", None)
    assert GRID.make_run(SIMA, tmp_path, data, device="cpu") == made


def test_the_evaluation_equals_the_two_commands(data, tmp_path):
    """Decoded images give the features that `extract` takes from files."""
    recipe = dino_recipe(SIMA, data, False)
    model = build_model(recipe.model, 0).eval()
    source = open_data(data, "val")
    cache = Cache(source, recipe.data, torch.device("cpu"), broken=BrokenImages(source))
    for reader in (model, LayerFeatures(model)):
        on_step = Mock()
        found = features_of(reader, cache, "cpu", on_step, batch=5)
        assert on_step.call_args_list[0].args == (5, len(source))
        assert on_step.call_args_list[-1].args == (len(source), len(source))
        expected = extract(reader, source, recipe.data, tmp_path / "features", batch=4)
        assert np.allclose(found.values, expected.values, atol=5e-3)
        assert np.array_equal(found.labels, expected.labels)
        assert np.array_equal(found.indices, expected.indices)


def test_a_collapse_and_a_loss_that_is_not_finite_are_results(data, tmp_path, monkeypatch):
    broken = replace(SIMA, settings=(*SIMA.settings, "optim.lr=1e38", "distill.clip=none"))
    made = GRID.make_run(broken, tmp_path / "broken", data, device="cpu", quiet=True)
    assert made.status.startswith("diverged at step ")
    assert math.isnan(made.knn_top1)
    crops = Dino.prepare
    monkeypatch.setattr(Dino, "prepare", lambda self, batch: [group * 0 for group in crops(self, batch)])
    flat = replace(SIMA, settings=(*SIMA.settings, "distill.collapse_steps=5"))
    made = GRID.make_run(flat, tmp_path / "flat", data, device="cpu", quiet=True)
    assert made.status == "collapsed at step 6"
    assert made.params > 0
    assert read_rows(tmp_path / "flat" / SIMA.folder / "results.csv", DinoResultRow)[0].status == made.status


def test_another_error_is_no_result(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        GRID.make_run(SIMA, tmp_path, str(tmp_path / "nothing"), device="cpu", quiet=True)
    assert not (tmp_path / SIMA.folder / "results.csv").exists()


def test_the_command_makes_all_kinds_of_runs(data, tmp_path, monkeypatch):
    runs = tuple(small(name) for name in ("vit_softmax", "supervised", "random"))
    monkeypatch.setattr(dino, "GRID", replace(GRID, runs=runs))
    monkeypatch.setattr(dino_report, "RUNS", runs)
    arguments = ["reproduce", "dino", "--out", str(tmp_path / "out"), "--device", "cpu", "--epochs", "2"]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        CliRunner().invoke(cli.app, [*arguments, "--data", str(tmp_path / "none")], catch_exceptions=False)
    done = CliRunner().invoke(cli.app, [*arguments, "--data", data], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    files = {p.name for p in (tmp_path / "out").iterdir() if p.is_file()}
    assert files == {"results.csv", "curves.csv", "tables.md", "dino.png"}
    results, curves = GRID.read_collected(tmp_path / "out")
    assert [(row.name, row.epochs, row.status) for row in results] == [
        ("vit_softmax", 2, "finished"),
        ("supervised", 2, "finished"),
        ("random", 0, "finished"),
    ]
    assert {point.name for point in curves} == {"vit_softmax"}
    assert [row.steps for row in results] == [6, 6, 0]
    for run in runs:
        with pytest.raises(ValueError, match=r"on the images in .*, not on those in elsewhere"):
            GRID.make_run(
                replace(run, epochs=0 if run.name == "random" else 2), tmp_path / "out", "elsewhere", device="cpu"
            )
    monkeypatch.setattr(dino, "GRID", replace(GRID, runs=runs, train=None))  # a second time nothing is trained
    again = CliRunner().invoke(cli.app, [*arguments, "--data", data], catch_exceptions=False)
    assert again.exit_code == 0, again.output
    assert GRID.read_collected(tmp_path / "out")[1] == curves


@pytest.mark.timeout(300)  # two new processes import torch, on a busy machine for a minute
def test_runs_side_by_side_have_a_process_each_and_lead_to_others():
    wanted = [0, 5]
    rows = in_processes(partial(divmod, 7), lambda: wanted, jobs=2)
    assert next(rows) == (5, (1, 2))
    wanted.append(3)  # known now that there is a result
    assert next(rows) == (3, (2, 1))
    with pytest.raises(ZeroDivisionError):  # of the first run: raised when the others are done
        next(rows)


def test_the_speed_is_that_of_training_alone():
    log = [{"step": "10", "images_per_second": "100"}, {"step": "30", "images_per_second": "50"}]
    assert training_speed(log, batch=5) == (30, 0.5 + 2.0, 100.0)
    assert math.isnan(training_speed([], 5)[2])


def test_many_images_are_decoded_by_workers_where_the_recipe_has_none():
    data = Data("", workers=0)
    assert with_workers(data, 100) == data
    assert with_workers(data, 50_000).workers > 0
    assert with_workers(replace(data, workers=3), 50_000).workers == 3


def result(name, knn=50.0, linear=60.0, status="finished", epochs=40, weights="dino"):
    facts = {
        "model": "m",
        "attention": "sima",
        "settings": "",
        "seed": 0,
        "params": 10**6,
        "k": 20,
        "temperature": 0.07,
    }
    more = {"linear_epochs": 100, "linear_lr": 0.03, "bank": 9, "images": 9, "steps": 1, "seconds": 1.0, "jobs": 1}
    last = {"images_per_second": 1.0, "device": "cpu", "torch": "2", "date": "2026-01-01"}
    found = {"knn_top1": knn, "knn_top5": knn, "linear_top1": linear, "linear_top5": linear}
    return DinoResultRow(name=name, weights=weights, epochs=epochs, status=status, **found, **facts, **more, **last)


def test_the_table_has_the_papers_numbers_and_what_became_of_a_run(tmp_path):
    rows = [
        result("sima"),
        result("xca", math.nan, math.nan, "collapsed at step 9"),
        result("supervised", weights="supervised"),
        result("random", 10.0, 20.0, epochs=0, weights="random"),
    ]
    lines = {line[0]: line[2:] for line in dino_table(rows).lines}
    assert lines["sima"] == ["40", "50.0", "60.0", "XCiT-S12/16, SimA", "71.2", "75.5"]
    assert lines["xca"] == ["40", "collapsed at step 9", "-", "XCiT-S12/16", "71.6", "75.8"]
    assert lines["random"] == ["0", "10.0", "20.0", "-", "-", "-"]
    assert dino_table(rows).markdown().count("**sima**") == 1
    curves = [DinoCurveRow("sima", 40, epoch, 10.0 * epoch, 50.0) for epoch in (1.0, 2.0)]
    curves.append(DinoCurveRow("vit_softmax", 40, 1.0, 7.0, 50.0))  # it has not come to its end
    for name, drawn in (("with.png", curves), ("without.png", [])):
        dino_report.plot(rows, drawn, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_length_stand_side_by_side_as_far_as_they_have_come():
    curves = [
        DinoCurveRow("sima", 16, 5.0, 10.52, 27.4),
        DinoCurveRow("sima", 16, 10.0, 13.08, 31.5),
        DinoCurveRow("xca", 16, 5.0, 9.32, 24.3),
        DinoCurveRow("xca", 15, 5.0, 8.46, 23.1),
    ]
    table = dino_curve_table(curves, 16)
    assert table.header == ["run", "what it is", "epoch 5", "epoch 10"]
    assert [[line[0], *line[2:]] for line in table.lines] == [["sima", "10.5", "13.1"], ["xca", "9.3", "-"]]


def test_names_are_unique():
    assert len({run.name for run in RUNS}) == len(RUNS)


def test_the_docs_list_the_grid():
    text = (Path(__file__).parents[2] / "docs" / "self-supervised.md").read_text()
    for run in RUNS:
        assert f"| `{run.name}` | " in text
        if run.paper:
            assert f"{run.paper.knn}, {run.paper.linear} ({run.paper.model.replace(', ', ' with ')})" in text
