"""run.strategy=fsdp: the numbers of one process, checkpoints of several, resumed by another number of them."""

import json
import os
import signal
from shlex import quote

import pytest
import torch
from test_resume import assert_same_state, logged
from typer.testing import CliRunner

import forked
from sima_attn import cli
from sima_attn._settings import check, with_overrides
from sima_attn.detect.recipes import named_recipe as named_detect_recipe
from sima_attn.distill.recipes import LinearizeRecipe, Stages, Transfer
from sima_attn.models.loading import load_model
from sima_attn.models.sharded_files import STATE
from sima_attn.train import sharded_checkpoint
from sima_attn.train.checkpoint import checkpoints, load_newest
from sima_attn.train.classify import Classification, train_classifier
from sima_attn.train.finetune_recipe import Finetune, FinetuneRecipe
from sima_attn.train.logs import read_log
from sima_attn.train.run import RunFolder
from sima_attn.train.sharded_checkpoint import sharded_path
from small_runs import class_folders, small_recipe


@pytest.fixture
def data(tmp_path):
    """Three val images per class: two processes evaluate 5 and 4 of them, in different numbers of batches."""
    return class_folders(tmp_path / "data", per_class=(8, 3))


def sharded(data, **run):
    """A recipe without draws that depend on the process, so that any number of processes gives the same numbers."""
    return small_recipe(data, run={"strategy": "fsdp", "batch": 12, "log_steps": 1, **run}, epochs=3)


def losses(folder):
    return [float(row["loss"]) for row in read_log(folder / "train.csv")]


def assert_close(a, b):
    """The weights of two checkpoints, and their averages."""
    for part in ("model", "ema"):
        assert a[part].keys() == b[part].keys()
        for name, weight in b[part].items():
            assert torch.allclose(a[part][name], weight, atol=1e-5), name


def test_two_processes_give_the_numbers_of_one(data, tmp_path):
    """With all that touches gradients and weights: parts, recomputed blocks, clipping, an average."""
    recipe = sharded(data, accumulate=2, grad_checkpointing=True, ema=0.8)
    recipe = with_overrides(recipe, ["optim.clip=0.5"])
    log = tmp_path / "log"
    assert forked.train_in_two(log, train_classifier, recipe, tmp_path / "two") == [0, 0], log.read_text()
    plain = with_overrides(recipe, ["run.strategy=ddp"])
    finished = train_classifier(plain, tmp_path / "one", device="cpu", quiet=True)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, two = (load_newest(tmp_path / name / "checkpoints") for name in ("one", "two"))
    assert_close(two, one)
    assert two["metrics"] == pytest.approx(finished.metrics, rel=1e-4)
    written, average = load_model(tmp_path / "two"), load_model(tmp_path / "two", branch="ema")
    for loaded, part in ((written, "model"), (average, "ema")):
        assert_same_state(dict(loaded.model.state_dict()), two[part])


def test_killed_and_resumed_by_fewer_processes(data, tmp_path):
    """Saved by three, resumed by two, which are killed as well, and then by one, without a process group."""
    recipe, log, out = sharded(data, checkpoint_steps=2, ema=0.8), tmp_path / "log", tmp_path / "run"
    killed = (forked.train_until_killed, train_classifier, Classification, 1)
    assert -signal.SIGKILL in forked.run_group(log, 3, *killed, 3, recipe, out)
    assert load_newest(out / "checkpoints")["step"] == 2
    assert -signal.SIGKILL in forked.run_group(log, 2, *killed, 5, recipe, out, resume=True)
    unfinished = load_newest(out / "checkpoints")
    assert unfinished["step"] == 4
    assert not (out / "weights.safetensors").exists()
    assert_same_state(dict(load_model(out).model.state_dict()), unfinished["model"])
    said = log.read_text()
    assert "has lost another process of the run, which has died or has not answered for 10 minutes" in said
    assert f"resume with: torchrun --nproc-per-node=2 -m sima_attn.cli train --out {quote(str(out))} --resume" in said
    train_classifier(recipe, out, resume=True, device="cpu", quiet=True)
    train_classifier(recipe, tmp_path / "whole", device="cpu", quiet=True)
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert_close(*(load_newest(folder / "checkpoints") for folder in (out, tmp_path / "whole")))


def elastic_job(train, recipe, out):
    """What `torchrun --max-restarts=1 --nproc-per-node=2` runs, with processes that are forked from this one."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        run_id="none",  # as without --rdzv-id
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        monitor_interval=0.05,
    )
    elastic_launch(config, killed_once)(train, recipe, out)


def killed_once(train, recipe, out):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    forked.train_until_killed(train, Classification, 1 if first else None, 3, recipe, out)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_job_that_torchrun_restarts_continues_its_run_and_loses_no_row(data, tmp_path, strategy):
    recipe = small_recipe(
        data, run={"strategy": strategy, "checkpoint_steps": 2, "log_steps": 3}, augment={"mixup": 0.8}
    )
    log, out, whole = tmp_path / "log", tmp_path / "run", tmp_path / "whole"
    assert forked.run(log, elastic_job, train_classifier, recipe, out) == 0, log.read_text()
    said = log.read_text()
    assert f"torchrun has restarted this job (1): the run in {out} is resumed" in said
    assert "resuming at step 2 of 6" in said
    assert forked.train_in_two(log, train_classifier, recipe, whole) == [0, 0], log.read_text()
    for name in ("train", "eval"):
        assert logged(out, name) == logged(whole, name)
    assert_same_state(*(load_newest(folder / "checkpoints") for folder in (out, whole)))


def test_a_run_that_was_there_before_the_job_is_not_continued(data, tmp_path, monkeypatch):
    recipe = sharded(data)
    train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another job")
    with pytest.raises(ValueError, match="already holds a run"):
        train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)


def test_one_process_alone_writes_the_same_folders_and_resumes_from_them(data, tmp_path, monkeypatch):
    recipe, folder = sharded(data, checkpoint_steps=2, ema=0.8), RunFolder(tmp_path / "run")
    save = sharded_checkpoint._Writer.finish

    def fail_at_step_4(self, metadata, results):
        if self.final.name.endswith("4"):
            raise OSError("no space left")
        save(self, metadata, results)

    with monkeypatch.context() as patch:
        patch.setattr(sharded_checkpoint._Writer, "finish", fail_at_step_4)
        with pytest.raises(OSError, match="no space left"):
            train_classifier(recipe, folder.path, device="cpu", quiet=True)
    assert {path.name for path in folder.checkpoints.iterdir()} == {
        "step-00000000",
        "step-00000002",
        ".sima-tmp-step-00000004",
    }
    assert load_newest(folder.checkpoints)["step"] == 2
    train_classifier(recipe, folder.path, resume=True, device="cpu", quiet=True)
    train_classifier(recipe, tmp_path / "whole", device="cpu", quiet=True)
    assert {path.name for path in folder.checkpoints.iterdir()} == {"step-00000004", "step-00000006"}
    assert_same_state(*(load_newest(run / "checkpoints") for run in (folder.path, tmp_path / "whole")))
    assert logged(folder.path, "train") == logged(tmp_path / "whole", "train")


UNEQUAL_BLOCKS = ["model.kwargs.depth=3", "model.drop_path=0.2", "model.constant_drop_path=false", "run.compile=true"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optim.lr=1e30"], "of step 2 is not finite"),  # both processes look for the module, one without the other
        (UNEQUAL_BLOCKS, "compiles single blocks, and those of this model differ"),
    ],
    ids=["not finite", "compiled"],
)
def test_a_run_that_cannot_go_on_ends_in_all_processes_and_says_why(data, tmp_path, settings, message):
    log = tmp_path / "log"
    recipe = with_overrides(sharded(data), settings)
    assert forked.train_in_two(log, train_classifier, recipe, tmp_path / "run") == [1, 1]
    assert log.read_text().count(message) == 2


def test_a_signal_stops_all_processes_after_the_same_step(data, tmp_path):
    recipe, log, out = sharded(data), tmp_path / "log", tmp_path / "run"
    assert forked.train_in_two(log, train_classifier, recipe, out, stop=(Classification, 2)) == [143, 143]
    assert "stopped by SIGTERM after step 3 of 6" in log.read_text()
    assert load_newest(out / "checkpoints")["step"] == 3


def test_the_command_says_that_one_process_shards_nothing(data, tmp_path):
    settings = ["data.size=16", "data.cache=false", "schedule.epochs=1", "schedule.warmup_epochs=0"]
    command = ["train", "--strategy", "fsdp", "--data", str(data), "--out", str(tmp_path / "run"), "--device", "cpu"]
    done = CliRunner().invoke(cli.app, [*command, *(f"--set={setting}" for setting in settings)])
    assert done.exit_code == 0, done.output
    assert "there is one process, so run.strategy=fsdp shards nothing; start several with torchrun" in done.stderr
    assert [path.is_dir() for path in checkpoints(tmp_path / "run" / "checkpoints")] == [True, True]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    place = tmp_path_factory.mktemp("sharded")
    recipe = sharded(class_folders(place / "data"), checkpoint_steps=2)
    train_classifier(recipe, place / "run", device="cpu", quiet=True)
    return place / "run"


@pytest.mark.parametrize("damage", ["a flipped bit", "cut off", "a missing file", "no state", "a file elsewhere"])
def test_a_damaged_folder_is_named_and_the_one_before_taken(two_checkpoints, tmp_path, damage):
    folder = tmp_path / "checkpoints"
    for path in checkpoints(two_checkpoints / "checkpoints"):
        (folder / path.name).mkdir(parents=True)
        for file in path.iterdir():
            (folder / path.name / file.name).write_bytes(file.read_bytes())
    newest = checkpoints(folder)[0]
    (part,) = newest.glob("*.safetensors")
    content = bytearray(part.read_bytes())
    if damage == "a flipped bit":
        content[-100] ^= 1
        part.write_bytes(content)
    elif damage == "cut off":
        part.write_bytes(content[:-100])
    elif damage == "a missing file":
        part.unlink()
    elif damage == "no state":
        (newest / STATE).unlink()
    else:
        (newest / STATE).write_text(json.dumps({"files": ["../step-00000004/state.json"]}))
    said = []
    assert load_newest(folder, said.append)["step"] == 4
    assert len(said) == 1
    assert newest.name in said[0]
    assert "using the previous one" in said[0]


def test_a_checkpoint_folder_is_loaded_by_its_path(two_checkpoints):
    newest = checkpoints(two_checkpoints / "checkpoints")[0]
    assert newest == sharded_path(two_checkpoints / "checkpoints", 6)
    loaded = load_model(newest)
    assert loaded.classes == ["cat", "dog", "owl"]
    assert_same_state(dict(loaded.model.state_dict()), dict(load_model(two_checkpoints).model.state_dict()))
    with pytest.raises(ValueError, match=r"holds no ema weights; set run\.ema to keep them"):
        load_model(newest, branch="ema")


def test_there_is_no_pickle_in_a_checkpoint(two_checkpoints):
    for path in checkpoints(two_checkpoints / "checkpoints"):
        names = {file.name for file in path.iterdir()}
        assert {name.rsplit(".", 1)[1] for name in names} == {"json", "safetensors", "crc32"}


def test_a_run_of_one_strategy_is_not_resumed_with_the_other(two_checkpoints):
    recipe = with_overrides(RunFolder(two_checkpoints).read_recipe(), ["run.strategy=ddp"])
    with pytest.raises(ValueError, match=r"has a different recipe: run\.strategy: fsdp -> ddp"):
        train_classifier(recipe, two_checkpoints, resume=True, device="cpu", quiet=True)


def test_other_kinds_of_runs_refuse_it_before_anything_is_written(data):
    recipe = dict(vars(sharded(data)))
    del recipe["teacher"]
    for other in (
        FinetuneRecipe(**recipe, finetune=Finetune("a model")),
        LinearizeRecipe(**{**recipe, "schedule": Stages()}, transfer=Transfer()),
        with_overrides(named_detect_recipe("coco_mini"), ["run.strategy=fsdp"]),
    ):
        with pytest.raises(ValueError, match=r"in each process: run\.strategy must be ddp, got fsdp"):
            check(other)
