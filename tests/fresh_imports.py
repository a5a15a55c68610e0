"""Programs that import packages in an order of their own, in processes forked from one that has imported torch."""

import json
import subprocess
import sys

FORK = """
import json, os, sys, traceback
import torch, torchvision  # what all of them need, and what takes the time

for program in json.loads(sys.argv.pop(1)):
    child = os.fork()
    if not child:
        try:
            exec(program, {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, program
"""


def run_fresh(programs, *arguments) -> list[str]:
    """The lines that the programs print, one after the other."""
    command = [sys.executable, "-c", FORK, json.dumps(programs), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
