"""Train in two processes as torchrun starts them, one such pair after the other; forked, so that one import serves all.

Each run has a recipe, a folder, whether to resume, and the step at which the second process is sent SIGTERM, or None.
Prints the exit status of both processes after each.
"""

import json
import os
import signal
import socket
import sys
import traceback

import torch

from sima_attn._settings import from_dict
from sima_attn.train.classify import Classification, train_classifier
from sima_attn.train.recipes import Recipe

torch.set_num_threads(1)
WORLD = 2


def train(run, rank, port):
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in {**ranks, **store}.items()})
    after_step = Classification.after_step

    def after(self, made):
        after_step(self, made)
        if made == run["stop"] and rank == WORLD - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Classification.after_step = after
    train_classifier(from_dict(Recipe, run["recipe"]), run["out"], resume=run["resume"], device="cpu")


def start(run, rank, port):
    child = os.fork()
    if child:
        return child
    try:
        train(run, rank, port)
        os._exit(0)
    except SystemExit as stopped:
        os._exit(stopped.code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


for run in json.loads(sys.argv[1]):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [start(run, rank, port) for rank in range(WORLD)]
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)
