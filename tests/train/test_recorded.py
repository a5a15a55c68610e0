"""A recorded pass does what a plain one does; where it cannot, it says why."""

import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from sima_attn._settings import with_overrides
from sima_attn.detect.task import Detection
from sima_attn.dino.recipes import digits
from sima_attn.dino.task import Dino, train_dino
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import Classification, train_classifier
from sima_attn.train.logs import read_log
from sima_attn.train.recipes import Run
from sima_attn.train.recorded import PLAIN_STEPS, RecordedPass, check_can_be_recorded
from sima_attn.train.stopping import RunInterrupted
from small_runs import small_recipe

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def short_dino(*changes):
    """One epoch of the digits, 22 steps, with stochastic depth: draws that a recording must not repeat."""
    return with_overrides(
        digits(), ("schedule.epochs=1", "schedule.warmup_epochs=0", "run.log_steps=1", "model.drop_path=0.2", *changes)
    )


@needs_cuda
@pytest.mark.parametrize("changes", [{"mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1}, {"smoothing": 0.1}], ids=str)
def test_a_recorded_classifier_is_the_plain_one(tmp_path, changes):
    """Mixtures are chosen in Python at every step, and must not be recorded with it."""
    augment = {"crop": "resized", "flip": 0.5, "erasing": 0.25, **changes}
    for name in (False, True):
        recipe = small_recipe(augment=augment, data={"cache": True}, run={"cuda_graph": name, "batch": 256}, epochs=4)
        train_classifier(recipe, tmp_path / str(name), device="cuda", quiet=True)
    plain, recorded = (read_log(tmp_path / name / "train.csv") for name in ("False", "True"))
    assert int(plain[-1]["step"]) > 2 * PLAIN_STEPS
    for a, b in zip(plain, recorded, strict=True):
        for column in ("loss", "grad_norm"):
            assert float(b[column]) == pytest.approx(float(a[column]), rel=1e-3, abs=1e-5), (a["step"], column)


@needs_cuda
def test_a_recorded_run_is_the_plain_one(tmp_path):
    for name in ("false", "true"):
        recipe = short_dino(f"run.cuda_graph={name}", "distill.teacher_temp_epochs=0", "distill.freeze_last_layer=0")
        train_dino(recipe, tmp_path / name, device="cuda", quiet=True)
    plain, recorded = (read_log(tmp_path / name / "train.csv") for name in ("false", "true"))
    assert len(plain) == len(recorded) == 22 > 2 * PLAIN_STEPS
    for a, b in zip(plain, recorded, strict=True):
        for column in ("loss", "grad_norm", "teacher_entropy", "teacher_information", "feature_variance"):
            assert float(b[column]) == pytest.approx(float(a[column]), rel=1e-3, abs=1e-5), (a["step"], column)
    first, second = (load_file(tmp_path / name / "weights.safetensors") for name in ("false", "true"))
    for name, weight in first.items():
        assert torch.allclose(second[name], weight, rtol=1e-3, atol=1e-5), name


@needs_cuda
def test_a_recorded_run_goes_on_where_it_stopped(tmp_path):
    recipe = short_dino("run.cuda_graph=true", "run.checkpoint_steps=10")
    train_dino(recipe, tmp_path / "whole", device="cuda", quiet=True)
    train_dino(recipe, tmp_path / "stopped", device="cuda", quiet=True)
    newest = max((tmp_path / "stopped" / "checkpoints").glob("step-*.pt"), key=lambda path: path.name)
    newest.unlink()  # as if it had been killed before its last checkpoint
    train_dino(recipe, tmp_path / "stopped", resume=True, device="cuda", quiet=True)
    first, second = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "stopped"))
    for name, weight in first.items():
        assert torch.allclose(second[name], weight, rtol=1e-3, atol=1e-5), name


@needs_cuda
def test_a_recorded_run_that_is_signalled_saves_its_step(tmp_path, monkeypatch):
    recipe = short_dino("run.cuda_graph=true")
    after_step, stop = Dino.after_step, PLAIN_STEPS + 4

    def after(self, made):
        after_step(self, made)
        if made == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Dino, "after_step", after)
    with pytest.raises(RunInterrupted):
        train_dino(recipe, tmp_path / "run", device="cuda", quiet=True)
    assert load_newest(tmp_path / "run" / "checkpoints")["step"] == stop
    train_dino(recipe, tmp_path / "run", resume=True, device="cuda", quiet=True)
    assert int(read_log(tmp_path / "run" / "train.csv")[-1]["step"]) == 22


@needs_cuda
def test_a_replay_sees_new_weights_and_draws_and_sets_the_gradients():
    weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
    calls = []

    def plain(batch):
        calls.append(1)
        loss = (weight * batch[0] * torch.rand(4, device="cuda")).sum()
        loss.backward()
        return {"loss": loss}

    recorded = RecordedPass(plain, [weight])
    for step in range(8):
        with torch.no_grad():
            weight.fill_(step + 1)
        weight.grad = None
        torch.manual_seed(step)
        batch = torch.full((4,), float(step), device="cuda")
        loss = recorded([batch])["loss"].item()
        torch.manual_seed(step)
        expected = batch * torch.rand(4, device="cuda")
        assert torch.allclose(weight.grad, expected)
        assert loss == pytest.approx(float(((step + 1) * expected).sum()), rel=1e-5)
    assert len(calls) == PLAIN_STEPS + 1


@pytest.mark.parametrize(
    ("changes", "fabric", "recordable", "message"),
    [
        ({}, {"device": torch.device("cpu")}, True, "needs a CUDA device"),
        ({}, {"world_size": 2}, True, "processes synchronize"),
        ({"accumulate": 2}, {}, True, "run.accumulate must be 1, got 2"),
        ({"precision": "fp16"}, {}, True, "use run.precision=bf16"),
        ({"grad_checkpointing": True}, {}, True, "run.grad_checkpointing"),
        ({}, {}, False, "this kind of training"),
    ],
)
def test_what_cannot_be_recorded_says_why(changes, fabric, recordable, message):
    usual = {"device": torch.device("cuda"), "world_size": 1}
    check_can_be_recorded(Run(), SimpleNamespace(**usual), recordable=True)
    with pytest.raises(ValueError, match=message):
        check_can_be_recorded(replace(Run(), **changes), SimpleNamespace(**usual | fabric), recordable=recordable)


def test_which_kinds_of_training_can_be_recorded():
    assert Dino.recordable
    assert Classification.recordable
    assert not Detection.recordable  # its images differ in size


def test_a_pass_that_cannot_be_recorded_says_what_to_do(monkeypatch):
    @contextmanager
    def refusing(*args, **kwargs):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    for name in ("Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", refusing)
    with pytest.raises(ValueError, match=r"not permitted when stream is capturing.*run.cuda_graph=false"):
        RecordedPass(lambda batch: {}, []).record([torch.zeros(1)])


def test_runs_on_the_cpu_refuse_it(tmp_path):
    with pytest.raises(ValueError, match="needs a CUDA device, got cpu"):
        train_dino(short_dino("run.cuda_graph=true"), tmp_path / "dino", device="cpu", quiet=True)
    with pytest.raises(ValueError, match="set it to false"):
        train_classifier(small_recipe(run={"cuda_graph": True}), tmp_path / "train", device="cpu", quiet=True)
    assert list(tmp_path.glob("*/*")) == []  # nothing that would keep a second try out
