"""Train each of the given runs; for each of its deaths in a child that dies, as of `kill -9`, once that step is made.

The children are forked, so that the imports are paid for once. At each of its stops it and its data workers are sent
SIGTERM, as torchrun does. Prints the step of the newest checkpoint after each.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sima_attn._settings import from_dict
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import Classification, train_classifier
from sima_attn.train.recipes import Recipe
from sima_attn.train.stopping import RunInterrupted

torch.set_num_threads(1)


def train(run, resume):
    train_classifier(from_dict(Recipe, run["recipe"]), run["out"], resume=resume, device="cpu", quiet=True)


def train_and_die(run, step, resume):
    def after_step(self, made):
        if made == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Classification.after_step = after_step
    train(run, resume)
    os._exit(0)


def train_and_stop(run, step, resume):
    after_step = Classification.after_step

    def after(self, made):
        after_step(self, made)
        if made == step:
            # From another process: data workers do what their own parent says.
            group = str(-os.getpgrp())
            subprocess.run(["kill", "-TERM", "--", group], start_new_session=True, check=True)
            time.sleep(0.2)  # for a worker that dies of it

    Classification.after_step = after
    with pytest.raises(RunInterrupted):
        train(run, resume)
    Classification.after_step = after_step
    print(load_newest(Path(run["out"]) / "checkpoints")["step"], flush=True)


if os.getpgrp() != os.getpid():
    os.setpgid(0, 0)  # so that the signals reach no other process
for run in json.loads(sys.argv[1]):
    for i, step in enumerate(run["deaths"]):
        child = os.fork()
        if not child:
            train_and_die(run, step, resume=i > 0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the run was to be killed at step {step}, it ended with {status}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        print(load_newest(Path(run["out"]) / "checkpoints")["step"], flush=True)
    for i, step in enumerate(run.get("stops", [])):
        train_and_stop(run, step, resume=i > 0)
    train(run, resume=bool(run["deaths"] or run.get("stops")))
