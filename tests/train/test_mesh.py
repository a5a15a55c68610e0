"""run.mesh: processes that share each image train as one process does, and stop and resume as others do."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import forked
from sima_attn._settings import check
from sima_attn.dino.recipes import named_dino_recipe
from sima_attn.dino.task import train_dino
from sima_attn.models.loading import load_model
from sima_attn.train.classify import Classification, train_classifier
from sima_attn.train.evaluate import evaluate
from sima_attn.train.finetune import finetune
from sima_attn.train.logs import read_log
from sima_attn.train.mesh import batch_share, check_supports_mesh, mesh_sizes, seed_dropout
from sima_attn.train.recipes import Run
from small_runs import ALL_ON, class_folders, small_recipe

XCIT = {"img_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2}
# BatchNorm, halo rows, and everything that draws random numbers but dropout, which draws as many as there are tokens.
EVERYTHING = {
    "augment": ALL_ON,
    "model": {"name": "sima_xcit_mini_p4_64", "kwargs": XCIT, "drop_path": 0.2},
}
RUN = {"ema": 0.9, "checkpoint_steps": 2, "log_steps": 1, "batch": 8}


def numbers(folder, name):
    """The columns of a log that do not measure time."""
    rows = read_log(folder / f"{name}.csv")
    columns = [column for column in rows[0] if column != "images_per_second"]
    return torch.tensor([[float(row[column]) for column in columns] for row in rows], dtype=torch.float64)


def assert_same_curves(folder, expected):
    for name in ("train", "eval"):
        torch.testing.assert_close(numbers(folder, name), numbers(expected, name), rtol=1e-4, atol=1e-5)


def test_two_processes_that_share_images_train_as_one_stop_and_resume(tmp_path):
    recipe = small_recipe(class_folders(tmp_path / "data"), **EVERYTHING, run=RUN)
    one, two, log = tmp_path / "one", tmp_path / "two", tmp_path / "log"
    train_classifier(recipe, one, device="cpu", quiet=True)
    shared = replace(recipe, run=replace(recipe.run, mesh="data=1,sequence=2"))
    for options, codes in (({"stop": (Classification, 2)}, [143, 143]), ({"resume": True}, [0, 0])):
        assert forked.train_in_group(log, 2, train_classifier, shared, two, **options) == codes, log.read_text()
    assert_same_curves(two, one)
    last = numbers(two, "eval")[-1]
    assert evaluate(load_model(two)).loss == pytest.approx(float(last[-4]), rel=1e-4)


def test_a_mesh_of_two_by_two_trains_as_two_processes(tmp_path):
    """Two processes whose BatchNorms see a half of the batch each, on the CPU."""
    recipe = small_recipe(class_folders(tmp_path / "data"), **EVERYTHING, run=RUN, epochs=1)
    two, four, log = tmp_path / "two", tmp_path / "four", tmp_path / "log"
    assert forked.train_in_group(log, 2, train_classifier, recipe, two) == [0, 0], log.read_text()
    recipe = replace(recipe, run=replace(recipe.run, mesh="data=2,sequence=2"))
    assert forked.train_in_group(log, 4, train_classifier, recipe, four) == [0] * 4, log.read_text()
    assert_same_curves(four, two)


def test_fine_tuning(tmp_path):
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=1)
    train_classifier(recipe, tmp_path / "start", device="cpu", quiet=True)
    log, out = tmp_path / "log", tmp_path / "fine"
    options = {"epochs": 1, "overrides": ["run.mesh=sequence=2"]}
    data = str(tmp_path / "data")
    codes = forked.train_in_group(log, 2, finetune, str(tmp_path / "start"), data, out, **options)
    assert codes == [0, 0], log.read_text()
    losses = [float(row["loss"]) for row in read_log(out / "eval.csv")]
    assert evaluate(load_model(out)).loss == pytest.approx(min(losses), rel=1e-4)


def test_a_model_that_cannot_be_split_is_an_error_in_every_process(tmp_path):
    recipe = small_recipe(class_folders(tmp_path / "data"), model={"attention": "softmax"}, run={"mesh": "sequence=2"})
    log = tmp_path / "log"
    assert forked.train_in_group(log, 2, train_classifier, recipe, tmp_path / "run") == [1, 1]
    assert log.read_text().count("call convert(model) for SimA attention first") >= 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mesh", ["data", "data=0", "data=2,tokens=2", "sequence=-1", "2,2", "data=2;sequence=2"])
def test_a_wrong_mesh_is_an_error_of_the_settings(mesh):
    with pytest.raises(ValueError, match=r"run.mesh has the sizes data and sequence, e.g. data=2,sequence=2"):
        check(Run(mesh=mesh))


def test_sizes():
    assert mesh_sizes(None) == (1, 1)
    assert mesh_sizes("sequence=3") == (1, 3)
    assert mesh_sizes("sequence=3, data=2") == (2, 3)
    run = Run(mesh="data=2,sequence=2")
    assert [batch_share(run, rank, 4) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [batch_share(Run(), rank, 2) for rank in range(2)] == [(0, 2), (1, 2)]


def test_processes_that_share_images_drop_other_tokens():
    drawn = []
    for rank in range(4):
        torch.manual_seed(5)
        seed_dropout(Run(mesh="data=2,sequence=2"), SimpleNamespace(global_rank=rank))
        drawn.append(torch.rand(()).item())
    torch.manual_seed(5)
    assert drawn[0] == drawn[2] == torch.rand(()).item()  # in `sima train` the two halves of a batch have other seeds
    assert drawn[1] == drawn[3] != drawn[0]


def test_the_number_of_processes(tmp_path):
    recipe = small_recipe(run={"mesh": "data=2,sequence=2"})
    with pytest.raises(ValueError, match="needs 4 processes, and there is 1: start torchrun with --nproc-per-node=4"):
        train_classifier(recipe, tmp_path / "run", device="cpu")
    with pytest.raises(ValueError, match="needs 4 processes, and there are 6"):
        batch_share(recipe.run, 0, 6)


def test_images_are_not_split_where_parameters_are_sharded():
    check(Run(mesh="data=2", strategy="fsdp"))
    with pytest.raises(ValueError, match=r"run.mesh=sequence=2 splits images .* set run.strategy=ddp"):
        check(Run(mesh="sequence=2", strategy="fsdp"))


def test_other_commands_refuse_a_mesh(tmp_path):
    for command in ("dino", "detect train", "linearize"):
        with pytest.raises(ValueError, match=f"run.mesh is for `sima train` and `sima finetune`; `sima {command}`"):
            check_supports_mesh(Run(mesh="data=1"), command)
    recipe = named_dino_recipe("digits")
    with pytest.raises(ValueError, match="`sima dino` does not support it"):
        train_dino(replace(recipe, run=replace(recipe.run, mesh="data=1")), tmp_path / "run", device="cpu")
