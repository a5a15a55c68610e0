"""A run from its recipe to its weights: what every kind of training shares around the loop."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from sima_attn._files import DiskFullError, atomic_write, disk_full_reason, remove_leftovers
from sima_attn.report.figures import check_can_plot
from sima_attn.report.progress import RunProgress
from sima_attn.train.checkpoint import checkpoints
from sima_attn.train.curves import plot_learning_curve
from sima_attn.train.engine import Finished, Settings, Task, fit, start_fabric
from sima_attn.train.recipe_files import sources_in, without_sources
from sima_attn.train.recorded import check_can_be_recorded
from sima_attn.train.run import RunFolder
from sima_attn.train.stopping import RunInterrupted

if TYPE_CHECKING:
    from lightning.fabric import Fabric

AnyTask = TypeVar("AnyTask", bound=Task)


def train_task(
    recipe: Any,
    out: Path | str,
    *,
    build: Callable[[Any, Fabric, RunProgress], AnyTask],
    about: Callable[[AnyTask], dict[str, Any]],
    weights: Callable[[AnyTask], nn.Module],
    title: str,
    command: str,
    resume: bool,
    device: str,
    quiet: bool,
) -> Finished:
    """Train by a checked recipe into a folder, or go on with the run in it; its last metrics come back.

    Args:
        recipe: A frozen dataclass with the groups `optim`, `schedule` and `run`.
        build: The task of a recipe, its data opened.
        about: Plain values that checkpoints and weights carry.
        weights: The module whose weights the run is for.
        command: The command of `sima` that trains it, for the user who has to resume it.
    """
    folder = RunFolder(Path(out))
    fabric = start_fabric(device, recipe.run.precision)
    first = fabric.is_global_zero
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cpu_threads(recipe.run.threads))
        progress = stack.enter_context(RunProgress(shown=first and not quiet))
        if first:
            folder.check(recipe, resume=resume)
            if resume:
                stack.enter_context(folder.locked())
            for place in (folder.path, folder.checkpoints):
                remove_leftovers(place)
        plots = _will_plot(progress)
        task = build(_resumed(recipe, folder) if resume else recipe, fabric, progress)
        if recipe.run.cuda_graph:
            check_can_be_recorded(recipe.run, fabric, recordable=task.recordable)

        def begin() -> None:  # after data and settings were checked: wrong ones leave no folder behind
            if first and not resume:
                stack.enter_context(folder.locked())
                folder.check(recipe, resume=False)  # another process may have been faster
            if first and not (resume and folder.read_recipe(type(recipe)) == recipe):
                folder.write_recipe(recipe)  # also where its images lie now
            fabric.barrier()

        facts = about(task)
        settings = Settings(recipe.optim, recipe.schedule, recipe.run)
        try:
            finished = fit(task, settings, folder, fabric, progress, resume=resume, about=facts, on_ready=begin)
            if first:
                tensors = {name: t.detach().cpu().contiguous() for name, t in weights(task).state_dict().items()}
                with atomic_write(folder.weights) as temporary:
                    save_file(tensors, temporary, metadata={"about": json.dumps(facts)})
                if plots:
                    plot_learning_curve(folder.path, folder.curve, title)
        except RunInterrupted:
            progress.say(f"resume with: {resume_command(command, folder.path, device, fabric.world_size)}")
            _end_together(fabric)
            raise
        except Exception as error:
            if (reason := disk_full_reason(error)) is None:
                raise
            raise DiskFullError(
                f"{folder.path} cannot be written to: {reason}. The last checkpoint is intact: free some space, then "
                f"resume with: {resume_command(command, folder.path, device, fabric.world_size)}"
            ) from error
        _end_together(fabric)
    return finished


def _end_together(fabric: Fabric) -> None:
    """Wait until the first process has written all files: when one process has ended, torchrun ends the others."""
    fabric.barrier()
    if fabric.world_size > 1:
        # Threads of the process group run until nothing refers to it. One that drops a tensor while Python shuts down
        # aborts the process, so the wrapped model, which is part of a reference cycle, has to be collected first.
        gc.collect()
        torch.distributed.destroy_process_group()


def resume_command(command: str, folder: Path, device: str, processes: int) -> str:
    """The command line that resumes a run in as many processes."""
    options = f"{command} --out {shlex.quote(str(folder))} --resume{f' --device {device}' * (device != 'auto')}"
    if processes == 1:
        return f"sima {options}"
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = f"--nnodes={processes // local} " * (processes > local)
    rendezvous = " (and its rendezvous options)" * (processes > local)
    return f"torchrun {nodes}--nproc-per-node={local} -m sima_attn.cli {options}{rendezvous}"


@contextlib.contextmanager
def _cpu_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _will_plot(progress: RunProgress) -> bool:
    """Whether there will be a learning curve; said before the run, which does not depend on it."""
    try:
        check_can_plot()
    except ValueError as error:
        progress.say(f"there will be no learning curve: {error}")
        return False
    return True


def _resumed(recipe: Any, folder: RunFolder) -> Any:
    """The recipe without the weights that its run started from: the checkpoints have those to resume with."""
    if checkpoints(folder.checkpoints):
        return without_sources(recipe)
    sources = sources_in(recipe)
    if sources:
        raise ValueError(
            f"the run in {folder.path} has no checkpoint yet, and {', '.join(sources)} of a recipe in a file is not "
            "used: nothing in a file may load other weights. Start a new run with another --out"
        )
    return recipe
