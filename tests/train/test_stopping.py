"""SIGINT and SIGTERM: the step is finished and saved, a message says how to resume, and the bits are the same."""

import itertools
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from shlex import quote

import pytest
import typer
from test_resume import ALL_OF_IT, WAYS, assert_same_state, logged, start_classifier, start_detector, start_dino
from typer.testing import CliRunner
from waiting_run import wait_for_signal

import forked
from sima_attn import cli
from sima_attn.data.workers import leave_signals_to_parent, termination_blocked
from sima_attn.detect import task
from sima_attn.dino import task as dino
from sima_attn.reproduce.processes import in_processes
from sima_attn.train import classify
from sima_attn.train import task as run_task
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import Classification, train_classifier
from sima_attn.train.start import resume_command
from sima_attn.train.stopping import RunInterrupted, StopSignals
from small_runs import class_folders, small_recipe

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def usual_handlers():
    """Those of a command in a terminal; the tests themselves may run where SIGINT is ignored."""
    before = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


def signal_at(monkeypatch, number, *steps):
    """Let the signal come in the middle of these steps."""
    before_step = Classification.before_step

    def before(self, step, groups):
        before_step(self, step, groups)
        if step + 1 in steps:
            send(number)

    monkeypatch.setattr(Classification, "before_step", before)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_stopped_twice_and_resumed_equals_never_stopped(tmp_path, monkeypatch, number):
    """In the middle of an epoch, of a row of the log, and at a step that is evaluated."""
    recipe = small_recipe(class_folders(tmp_path / "data"), **{**WAYS["device cache"], **ALL_OF_IT})
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_classifier(recipe, whole, device="cpu", quiet=True)
    signal_at(monkeypatch, number, 4, 6)
    for resume, step in ((False, 4), (True, 6)):
        with pytest.raises(RunInterrupted) as raised:
            train_classifier(recipe, stopped, resume=resume, device="cpu", quiet=True)
        assert raised.value.code == 128 + number
        assert load_newest(stopped / "checkpoints")["step"] == step
        assert signal.getsignal(number) is signal.default_int_handler
        assert not (stopped / "weights.safetensors").exists()
    train_classifier(recipe, stopped, resume=True, device="cpu", quiet=True)
    assert_same_state(*(load_newest(folder / "checkpoints") for folder in (whole, stopped)))
    assert (whole / "weights.safetensors").read_bytes() == (stopped / "weights.safetensors").read_bytes()
    for name in ("train", "eval"):
        assert logged(whole, name) == logged(stopped, name)


def test_when_one_process_is_signalled_all_stop_after_the_same_step(tmp_path):
    """The one that is not told how to stop is the one that writes; and resuming gives the same bits."""
    recipe, log = small_recipe(class_folders(tmp_path / "data")), tmp_path / "log"
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for out, options, codes in (
        (whole, {}, [0, 0]),
        (stopped, {"stop": (Classification, 2)}, [143, 143]),
        (stopped, {"resume": True}, [0, 0]),
    ):
        assert forked.train_in_two(log, train_classifier, recipe, out, **options) == codes, log.read_text()
    said = log.read_text()
    assert "stopped by SIGTERM after step 3 of 6" in said  # of step 2, agreed on with the numbers of step 3
    assert (
        f"resume with: torchrun --nproc-per-node=2 -m sima_attn.cli train --out {quote(str(stopped))} --resume" in said
    )
    assert_same_state(*(load_newest(folder / "checkpoints") for folder in (whole, stopped)))
    assert logged(whole, "train") == logged(stopped, "train")


def test_a_signal_in_the_last_step_or_an_evaluation_stops_the_run_too(tmp_path, monkeypatch):
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=2)
    evaluate, evaluations = Classification.evaluate, itertools.count(1)

    def evaluate_and_send(self, model):
        metrics = evaluate(self, model)
        if next(evaluations) in (1, 2):
            send(signal.SIGTERM)
        return metrics

    monkeypatch.setattr(Classification, "evaluate", evaluate_and_send)
    for resume, step in ((False, 3), (True, 6)):
        with pytest.raises(RunInterrupted):
            train_classifier(recipe, tmp_path / "run", resume=resume, device="cpu", quiet=True)
        assert load_newest(tmp_path / "run" / "checkpoints")["step"] == step
    finished = train_classifier(recipe, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert (tmp_path / "run" / "weights.safetensors").is_file()
    assert finished.metrics["top1"] >= 0
    assert next(evaluations) == 3  # none was made again


def test_the_command_says_how_to_resume_and_that_command_does(tmp_path, monkeypatch):
    data = class_folders(tmp_path / "data")
    out = tmp_path / "a run"
    settings = ["data.size=16", "data.cache=false", "run.batch=8", "schedule.epochs=1", "schedule.warmup_epochs=0"]
    options = ["--data", str(data), "--out", str(out), "--device", "cpu"]
    signal_at(monkeypatch, signal.SIGTERM, 2)
    runner = CliRunner()
    stopped = runner.invoke(cli.app, ["train", *options, *(f"--set={setting}" for setting in settings)])
    assert stopped.exit_code == 143, stopped.output
    first, second = [line for line in stopped.stderr.splitlines() if line][-2:]
    assert first == "stopped by SIGTERM after step 2 of 3; the step is saved"
    command = second.removeprefix("resume with: ")
    assert command == f"sima train --out '{out}' --resume --device cpu"
    resumed = runner.invoke(cli.app, shlex.split(command)[1:])
    assert resumed.exit_code == 0, resumed.output
    assert "after 3 steps" in resumed.stdout


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_before_the_first_step_leaves_nothing_and_says_so(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(Classification, "__init__", lambda *arguments: send(number))
    with pytest.raises(RunInterrupted) as raised:
        train_classifier(small_recipe(), tmp_path / "run", device="cpu")
    assert raised.value.code == 128 + number
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines[-2:] == [f"stopped by {number.name}; there is nothing to save", "start again with the same command"]
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(number) is signal.default_int_handler


def test_a_signal_after_the_last_step_says_how_to_resume(tmp_path, monkeypatch, capsys):
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(run_task, "save_file", lambda *arguments, **options: send(signal.SIGTERM))
        with pytest.raises(RunInterrupted):
            train_classifier(recipe, tmp_path / "run", device="cpu")
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    resume_line = f"resume with: sima train --out {quote(str(tmp_path / 'run'))} --resume --device cpu"
    assert lines[-2:] == ["stopped by SIGTERM; there is nothing to save", resume_line]
    train_classifier(recipe, tmp_path / "run", resume=True, device="cpu", quiet=True)
    assert (tmp_path / "run" / "weights.safetensors").is_file()


@pytest.mark.parametrize("start", [start_classifier, start_dino, start_detector])
def test_every_kind_of_run_names_its_own_command(tmp_path, monkeypatch, start):
    given = []
    module = {start_classifier: classify, start_dino: dino, start_detector: task}[start]
    monkeypatch.setattr(module, "train_task", lambda recipe, *arguments, **options: given.append(recipe))
    start(tmp_path / "run")
    words = given[0].command.split()
    assert words == {start_classifier: ["train"], start_dino: ["dino"], start_detector: ["detect", "train"]}[start]
    known = typer.main.get_command(cli.app)
    for word in words:
        known = known.commands[word]
    assert {"--out", "--resume", "--device"} <= {name for option in known.params for name in option.opts}


def test_the_command_of_several_processes_starts_as_many(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    options = f"-m sima_attn.cli dino --out {quote(str(tmp_path))} --resume"
    assert resume_command("dino", tmp_path, "auto", 4) == f"torchrun --nproc-per-node=4 {options}"
    several = resume_command("dino", tmp_path, "auto", 8)
    assert several == f"torchrun --nnodes=2 --nproc-per-node=4 {options} (and its rendezvous options)"


def test_one_signal_sent_twice_at_once_is_one_and_handlers_come_back():
    calls = []
    with StopSignals(lambda: calls.append("first")) as signals:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert signals.received == signal.SIGTERM
    assert calls == ["first"]
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


@pytest.mark.parametrize("second", SIGNALS, ids=lambda number: number.name)
def test_a_second_signal_ends_the_process_at_once(second):
    script = (
        "import os, signal\n"
        "from sima_attn.train import stopping\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "stopping.SAME_SIGNAL = 0\n"
        "with stopping.StopSignals(lambda: None):\n"
        f"    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), {int(second)})\n"
        "print('never printed')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -second, done.stderr
    assert done.stdout == ""


def test_an_ignored_signal_stays_ignored():
    """As in a background job of a script, which Ctrl-C must not reach."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals(lambda: None) as signals:
        send(signal.SIGINT)
        assert signals.received is None


def test_a_run_in_another_thread_leaves_the_handlers_alone(tmp_path):
    errors = []
    recipe = small_recipe(class_folders(tmp_path / "data"), epochs=1)

    def train():
        try:
            train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert not errors
    assert (tmp_path / "run" / "weights.safetensors").is_file()


def worker(ready):
    leave_signals_to_parent()
    ready.set()
    time.sleep(60)


def test_a_worker_outlives_the_signals_of_others_and_ends_when_its_parent_says_so():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=worker, args=(ready,), daemon=True)
    with termination_blocked():
        process.start()
    assert ready.wait(60)
    for name in ("INT", "TERM"):
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)  # a process that is not its parent
    process.join(0.3)
    assert process.is_alive()
    process.terminate()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.timeout(300)  # a new process imports torch
def test_a_grid_passes_a_signal_on_and_starts_no_more_runs(tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    main = threading.get_ident()

    def send_when_started():
        while not (folders[0] / "started").exists():
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send_when_started)
    sender.start()
    with pytest.raises(RunInterrupted) as raised:
        list(in_processes(wait_for_signal, lambda: folders, jobs=1))
    sender.join()
    assert raised.value.code == 130
    assert sorted(path.name for path in folders[0].iterdir()) == ["SIGTERM", "started"]
    assert not list(folders[1].iterdir())


def test_a_stopped_grid_says_how_to_go_on(tmp_path, monkeypatch):
    data = class_folders(tmp_path / "data")

    def stop(*arguments, **options):
        raise RunInterrupted(143)

    monkeypatch.setattr("sima_attn.reproduce.miniature.train_classifier", stop)
    options = ["--data", str(data), "--out", str(tmp_path / "grid"), "--only", "sima", "--device", "cpu"]
    stopped = CliRunner().invoke(cli.app, ["reproduce", "miniature", *options])
    assert stopped.exit_code == 143
    assert stopped.stdout.splitlines()[-1] == "Run the same command again to resume the grid."
