"""New processes, which a test may kill, stop, or start in groups as torchrun does, mostly to train.

They are forked from one clean process per pytest worker that has imported what they need: importing torch and the
package takes longer than their training.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import torch

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = ["sima_attn.train.classify", "sima_attn.dino.task", "lightning.fabric", "matplotlib.figure"]
IMPORTED += ["torch.utils.tensorboard", "sima_attn.train.strategies"]


def start(log: Path, function, *arguments, **options):
    """A process that calls the function and writes its output to the end of the log."""
    CONTEXT.set_forkserver_preload(IMPORTED)
    # An abstract socket, because the path of a socket has at most 108 characters, and TMPDIR may be longer than that.
    address = f"\0sima-attn-tests-{os.getpid()}"
    with mock.patch.object(connection, "arbitrary_address", return_value=address):
        forkserver.ensure_running()
    process = CONTEXT.Process(target=_call, args=(str(log), function, arguments, options))
    process.start()
    return process


def _call(log, function, arguments, options):
    with open(log, "ab") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    multiprocessing.set_start_method("fork", force=True)  # for data workers, as in a program of a user
    torch.set_num_threads(1)
    function(*arguments, **options)


def run(log: Path, function, *arguments, **options) -> int:
    """The exit code of such a process: minus the number of the signal that ended it."""
    return _exit_codes([start(log, function, *arguments, **options)])[0]


def _exit_codes(processes):
    try:
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()  # those that a test with a timeout does not wait for
    return [process.exitcode for process in processes]


def train_and_die(train, task, step, *arguments, **options):
    """Train until a step is made, and then die as of `kill -9`."""

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    _at_step(task, step, die)
    train(*arguments, device="cpu", quiet=True, **options)


def train_and_stop(train, task, step, *arguments, **options):
    """Train until a step is made; then the process and its data workers are sent SIGTERM, as torchrun does."""

    def stop(self):
        # From another process: data workers do what their own parent says.
        group = str(-os.getpgrp())
        subprocess.run(["kill", "-TERM", "--", group], start_new_session=True, check=True)
        time.sleep(0.2)  # for a worker that dies of it

    os.setpgid(0, 0)  # so that the signals reach no other process
    _at_step(task, step, stop)
    train(*arguments, device="cpu", quiet=True, **options)


def _at_step(task, step, act):
    after_step = task.after_step

    def after(self, made):
        after_step(self, made)
        if made == step:
            act(self)

    task.after_step = after


def train_until_killed(train, task, rank, step, *arguments, **options):
    """Train as one process of a group; the one of that rank dies as of `kill -9` when the step is made."""
    if int(os.environ["RANK"]) == rank:
        _at_step(task, step, lambda self: os.kill(os.getpid(), signal.SIGKILL))
    train(*arguments, device="cpu", **options)


def run_group(log: Path, world: int, function, *arguments, **options) -> list[int]:
    """Call the function in each of `world` processes with torchrun's variables. The exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    processes = []
    for rank in range(world):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment = {name: str(value) for name, value in {**ranks, **store}.items()}
        processes.append(start(log, _call_with, environment, function, arguments, options))
    return _exit_codes(processes)


def _call_with(environment, function, arguments, options):
    os.environ.update(environment)
    function(*arguments, **options)


def train_in_two(log: Path, train, *arguments, stop=None, **options) -> list[int]:
    """Train in two processes with torchrun's variables. The exit codes."""
    return train_in_group(log, 2, train, *arguments, stop=stop, **options)


def train_in_group(log: Path, world: int, train, *arguments, stop=None, **options) -> list[int]:
    """Train in `world` processes with torchrun's variables. The exit codes.

    `stop` is (task, step): the step after which the second process, and only that, is sent SIGTERM.
    """
    return run_group(log, world, _train_rank, stop, train, arguments, options)


def _train_rank(stop, train, arguments, options):
    if stop and os.environ["RANK"] == "1":
        _at_step(*stop, lambda self: os.kill(os.getpid(), signal.SIGTERM))
    train(*arguments, device="cpu", **options)
    names = _thread_names()
    assert not [name for name in names if "gloo" in name], names  # one left now and again aborted the process at exit


def _thread_names():
    """The names of the threads of this process."""
    names = []
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            names.append((thread / "comm").read_text())
    return names
