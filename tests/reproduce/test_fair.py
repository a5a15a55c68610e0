"""The fair comparison: which runs come next, what is called level, and the command."""

import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.models.building import build_model
from sima_attn.report.rows import read_rows
from sima_attn.reproduce import fair, miniature
from sima_attn.reproduce.fair import (
    FAIR_GRID,
    METHODS,
    Outcome,
    Setting,
    best_sizes_table,
    fair_table,
    next_runs,
    plot,
    sweep_table,
    verdict,
)
from sima_attn.reproduce.miniature import ResultRow, SizeRow, miniature_recipe
from sima_attn.train.stopping import RunInterrupted
from small_runs import class_folders

SOFTMAX, SIMA, SIMA_RELU = METHODS[:3]
SMALL = (
    "data.size=16",
    "run.batch=8",
    "run.precision=fp32",
    "augment.padding=2",
    *(f"model.kwargs.{name}" for name in ("img_size=16", "depth=1", "embed_dim=16", "num_heads=2")),
)


def row(name, top1, seed=0, epochs=60):
    facts = {"model": "m", "attention": "a", "options": "", "heads": 3, "params": 1, "top5": 0.0, "ema_top1": math.nan}
    facts |= {"status": "finished", "steps": 1, "seconds": 1.0, "images_per_second": 1.0}
    return ResultRow(
        name=name, top1=top1, seed=seed, epochs=epochs, **facts, device="cpu", torch="2", date="2026-01-01"
    )


def make(runs, top1):
    """Rows of runs; `top1` maps names to accuracies."""
    return [row(run.name, top1.get(run.name, 10.0), run.seed, run.epochs) for run in runs]


def folders(runs):
    return [run.folder for run in runs]


@pytest.fixture
def two_methods(monkeypatch):
    monkeypatch.setattr(fair, "METHODS", (SOFTMAX, SIMA, SIMA_RELU))


def test_every_method_has_the_same_sweep_and_its_runs_can_be_made():
    assert {len(method.sweep()) for method in METHODS if method is not SIMA_RELU} == {4}
    assert set(SIMA_RELU.sweep()) < set(SIMA.sweep())
    assert {method.baseline for method in METHODS} <= {method.name for method in METHODS}
    assert len({run.name for run in FAIR_GRID.runs}) == len(FAIR_GRID.runs) == 11 * 8
    for run in FAIR_GRID.runs:
        recipe = miniature_recipe(run, "d", on_gpu=False)
        assert f"{recipe.optim.lr:.0e}" == run.name.rpartition("_")[2].replace("e-", "e-0")
        model = build_model(replace(recipe.model, kwargs={**recipe.model.kwargs, "depth": 1}), 10)
        activations = {type(module).__name__ for module in model.modules()} & {"GELU", "ReLU"}
        assert activations == ({"ReLU"} if "_relu_" in run.name else {"GELU"})


def test_the_table_grows_from_sweep_to_seeds(two_methods):
    top1 = {"vit_softmax_gelu_1e-3": 50.0, "vit_sima_gelu_2e-3": 52.0, "vit_sima_relu_1e-3": 51.0}
    sweep = next_runs([], epochs=60)
    assert folders(sweep) == [
        f"vit_{attention}_{activation}_{lr}-60epochs-seed0"
        for attention in ("softmax", "sima")
        for activation in ("gelu", "relu")
        for lr in ("1e-3", "2e-3")
    ]
    rows = make(sweep, top1)
    assert folders(next_runs(rows[1:], epochs=60)) == [  # one run of softmax is missing, the others go on
        "vit_softmax_gelu_1e-3-60epochs-seed0",
        "vit_sima_gelu_4e-3-60epochs-seed0",  # the best of SimA is at 2e-3
        "vit_sima_relu_5e-4-60epochs-seed0",  # that with ReLU at 1e-3
    ]
    rows += make(next_runs(rows, epochs=60), top1)
    assert folders(next_runs(rows, epochs=60)) == [
        f"vit_{name}-60epochs-seed{seed}"
        for name in ("softmax_gelu_1e-3", "sima_gelu_2e-3", "sima_relu_1e-3")
        for seed in (1, 2)
    ]
    rows += make(next_runs(rows, epochs=60), top1)
    assert next_runs(rows, epochs=60) == []
    assert len(rows) == 8 + 3 + 3 * 2
    assert folders(next_runs(rows, epochs=60, seeds=[2, 1, 0, 3])) == [
        f"vit_{name}-60epochs-seed3" for name in ("softmax_gelu_1e-3", "sima_gelu_2e-3", "sima_relu_1e-3")
    ]
    assert len(next_runs(rows, epochs=30)) == 8  # another schedule
    assert folders(next_runs([], epochs=60, only=["softmax"])) == folders(sweep)[:4]
    with pytest.raises(ValueError, match=r"unknown method 'sofmax'.*did you mean 'softmax'"):
        next_runs([], epochs=60, only=["sofmax"])
    assert [line[2:6] for line in fair_table(rows).lines] == [
        ["5", "gelu, 1e-3", "50.0 ± 0.0", "3"],
        ["6", "gelu, 2e-3", "52.0 ± 0.0", "3"],  # with the one beyond of SimA with ReLU
        ["3", "relu, 1e-3", "51.0 ± 0.0", "3"],
    ]


def test_runs_that_diverge_are_not_made_again_and_are_told(two_methods):
    rows = [row(SOFTMAX.run(setting).name, math.nan) for setting in SOFTMAX.sweep()]
    rows += [row(SIMA.run(setting).name, 40.0) for setting in SIMA.sweep()]
    asked = next_runs(rows, epochs=60)
    assert not [run for run in asked if "softmax" in run.name]
    best = Setting("gelu", "1e-3")
    rows += [row(SIMA.run(best).name, math.nan, seed=1), row(SIMA.run(best).name, 42.0, seed=2)]
    line = fair_table(rows).lines[0]
    assert line[0] == "ViT, SimA"
    assert line[4:] == ["41.0 ± 1.4", "2, 1 diverged", "no run of it"]


def test_level_is_a_difference_below_two_standard_errors():
    def outcome(*top1):
        return Outcome(Setting("gelu", "1e-3"), 4, list(top1), 0)

    low, high = outcome(50.0, 51.0, 52.0), outcome(51.0, 52.0, 53.0)  # each has a standard error of 1 / sqrt(3)
    assert verdict(high, low) == "level (+1.0)"
    assert verdict(outcome(49.99, 50.99, 51.99), low) == "level (+0.0)"  # not -0.0
    assert verdict(outcome(52.0, 53.0, 54.0), low) == "+2.0"
    assert verdict(low, outcome(52.0, 53.0, 54.0)) == "-2.0"
    assert verdict(outcome(53.0), low) == "+2.0, one seed"


def test_every_setting_that_was_tried_is_in_the_table_of_the_sweep(two_methods):
    rows = [row("vit_sima_relu_2e-3", 40.0), row("vit_sima_relu_2e-3", 44.0, seed=1), row("vit_sima_relu_4e-3", 41.0)]
    table = sweep_table(rows)
    rates = ("5e-4", "1e-3", "2e-3", "4e-3")
    assert table.header[2:] == [f"{activation}, {lr}" for activation in ("gelu", "relu") for lr in rates]
    numbers = ["-"] * 6 + ["40.0", "41.0"]
    assert table.lines == [["ViT, SimA", "60", *numbers], ["ViT, SimA without any exp()", "60", *numbers]]


def test_other_sizes_are_shown_of_the_best_settings_alone(two_methods):
    rows = [row("vit_sima_gelu_1e-3", 40.0), row("vit_sima_gelu_2e-3", 39.0), row("vit_sima_gelu_2e-3", 60.0, epochs=9)]
    sizes = [SizeRow(each.name, 0, each.epochs, 48, False, each.top1 / 2, 0.0) for each in rows]
    assert best_sizes_table(rows, sizes).lines == [
        ["vit_sima_gelu_1e-3", "60", "no", "20.0"],
        ["vit_sima_gelu_2e-3", "9", "no", "30.0"],
    ]


def test_the_figure_is_drawn_from_part_of_the_runs(tmp_path):
    rows = [row("vit_sima_gelu_1e-3", 40.0), row("vit_sima_gelu_1e-3", 41.0, seed=1), row("vit_sima_gelu_2e-3", 39.0)]
    plot(rows, [], [], tmp_path / "fair.png")
    assert (tmp_path / "fair.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_makes_all_stages_and_resumes(tmp_path, monkeypatch):
    data = str(class_folders(tmp_path / "data", (8, 4), tuple("abcdef")))

    def small_recipe(run, data, on_gpu):
        return miniature_recipe(replace(run, settings=(*run.settings, *SMALL)), data, on_gpu)

    monkeypatch.setattr(fair, "METHODS", tuple(replace(method, activations=("relu",)) for method in (SOFTMAX, SIMA)))
    monkeypatch.setattr(fair, "FAIR_GRID", replace(FAIR_GRID, recipe=small_recipe))
    monkeypatch.setattr(miniature, "OTHER_SIZES", (16,))
    command = ["reproduce", "fair", "--data", data, "--out", str(tmp_path / "out"), "--device", "cpu"]
    command += ["--epochs", "2", "--seed", "0", "--seed", "1"]
    train = miniature.train_classifier

    def interrupted_in_the_second_run(recipe, *args, **options):
        if recipe.name == "vit_softmax_relu_2e-3":
            raise RunInterrupted(143)
        return train(recipe, *args, **options)

    monkeypatch.setattr(miniature, "train_classifier", interrupted_in_the_second_run)
    stopped = CliRunner().invoke(cli.app, command)
    assert stopped.exit_code == 143, stopped.output
    assert len(read_rows(tmp_path / "out" / "results.csv", ResultRow)) == 1
    assert "| 2 | 1 | relu, 1e-3 |" in (tmp_path / "out" / "tables.md").read_text()
    monkeypatch.setattr(miniature, "train_classifier", train)

    done = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "run 1 of 3: vit_softmax_relu_2e-3-2epochs-seed0" in done.output
    assert (tmp_path / "out" / "tables.md").read_text().startswith("| method | epochs | settings tried |")
    made = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert sum(name.endswith("seed1") for name in made) == 2  # of each method its best setting
    monkeypatch.setattr(miniature, "train_classifier", None)
    again = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert again.exit_code == 0, again.output
    assert "run 1" not in again.output
