"""A run from its recipe to its weights: the steps before and after the loop that all kinds of training share."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import torch

from sima_attn._errors import first_line
from sima_attn._files import DiskFullError, disk_full_reason, remove_leftovers
from sima_attn._install import install_command
from sima_attn._settings import check
from sima_attn.data.loader import possible_batch
from sima_attn.report.progress import RunProgress
from sima_attn.train.checkpoint import checkpoints
from sima_attn.train.curves import plot_learning_curve
from sima_attn.train.elastic import LostProcessError, continues_run, is_lost_process, mark_job, restarts
from sima_attn.train.engine import TrainingLoop
from sima_attn.train.fabric import start_fabric
from sima_attn.train.mesh import batch_share, check_supports_mesh
from sima_attn.train.recipe_files import sources_in, without_sources
from sima_attn.train.recorded import check_can_be_recorded
from sima_attn.train.run import RunFolder
from sima_attn.train.sharded_checkpoint import remove_unfinished
from sima_attn.train.stopping import RunInterrupted, StopSignals
from sima_attn.train.task import RunSummary, Task

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def train_task(
    recipe: Any,
    out: Path | str,
    *,
    build: Callable[[Any, Fabric, RunProgress], Task],
    resume: bool,
    device: str,
    quiet: bool,
    notes: Sequence[str] = (),
) -> RunSummary:
    """Train by a recipe into a folder, or resume the run in it.

    Args:
        recipe: A frozen dataclass with the groups `optim`, `schedule` and `run`, and its `sima` command.
        build: Opens the data of a recipe and returns the task.
        notes: Lines to print first.
    """
    check(recipe)
    check_supports_mesh(recipe.run, recipe.command)
    folder = RunFolder(Path(out))
    run = recipe.run
    matmul_precision = torch.get_float32_matmul_precision()
    fabric = start_fabric(device, run.precision, run.strategy, run.timeout_minutes)
    first = fabric.is_global_zero
    restarted = fabric.broadcast(first and not resume and continues_run(folder.path))
    resume = resume or restarted
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, matmul_precision)  # a run in bf16 or fp16 sets TF32
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(run.threads or torch.get_num_threads())
        progress = stack.enter_context(RunProgress(shown=first and not quiet))
        for note in notes:
            progress.say(note)
        if restarted:
            progress.say(f"torchrun has restarted this job ({restarts()}): the run in {folder.path} is resumed")
        if run.strategy == "fsdp" and fabric.world_size == 1:
            progress.say("there is one process, so run.strategy=fsdp shards nothing; start several with torchrun")
        resume_line = f"resume with: {resume_command(recipe.command, folder.path, device, fabric.world_size)}"
        stack.enter_context(_tells_how_to_resume(folder, fabric, progress, resume_line))
        if first:
            folder.check(recipe, resume=resume)
            if resume:
                stack.enter_context(folder.locked())
            for place in (folder.path, folder.checkpoints):
                remove_leftovers(place)
            if resume:
                remove_unfinished(folder.checkpoints)
        plots = find_spec("matplotlib") is not None
        if not plots:
            progress.say(f"no learning curve will be plotted: it needs matplotlib, {install_command('plots')}")

        def begin() -> None:  # called after data and settings are checked, so that wrong ones leave no folder behind
            if first and not resume:
                stack.enter_context(folder.locked())
                folder.check(recipe, resume=False)  # another process may have started a run since the first check
            if first and not (resume and folder.read_recipe(type(recipe)) == recipe):
                folder.write_recipe(recipe)  # data.path may have changed
            if first:
                mark_job(folder.path)
            fabric.barrier()

        def train() -> RunSummary:  # what it holds is dropped before the process group ends
            by_hand = resume and not restarted  # a restarted job has the recipe of its start, from the command line
            task = build(_without_initial_weights(recipe, folder) if by_hand else recipe, fabric, progress)
            if run.cuda_graph:
                check_can_be_recorded(run, fabric, recordable=task.recordable)
            loop = TrainingLoop(task, recipe, folder, fabric, progress)
            summary = loop.train(resume=resume, on_ready=begin)
            task.write_result(folder, task.about(recipe), first=first)
            if first and plots:
                plot_learning_curve(folder.path, folder.curve, task.title, task.kept_epoch)
            return summary

        summary = train()
        _end_together(fabric)
    return summary


def with_possible_batch(recipe: Any, images: int, *, even: bool = False) -> tuple[Any, list[str]]:
    """The recipe with a batch that is not larger than the data, and what to print if it was.

    Args:
        even: Whether the images of a pass are mixed in pairs.
    """
    run = recipe.run
    _, shares = batch_share(run, 0, int(os.environ.get("WORLD_SIZE", "1")))
    parts = shares * run.accumulate * (2 if even else 1)
    batch = possible_batch(run.batch, images, parts)
    if batch == run.batch:
        return recipe, []
    note = f"there are {images} train images, so the batch is {batch} instead of {run.batch}"
    return replace(recipe, run=replace(run, batch=batch)), [note]


@contextlib.contextmanager
def _tells_how_to_resume(folder: RunFolder, fabric: Fabric, progress: RunProgress, resume_line: str) -> Iterator[None]:
    """Print how to resume a run that is stopped by a signal or a full disk.

    The loop handles signals during its steps. Before and after them there is nothing to save, and a signal stops the
    run at once.
    """

    def stop() -> None:
        raise RunInterrupted(128 + signals.received)  # type: ignore[operator]

    signals = StopSignals(stop)
    try:
        # A process that waits for others does not get to its handler: with several, the default action stays.
        with signals if fabric.world_size == 1 else contextlib.nullcontext():
            yield
    except RunInterrupted as interruption:
        if signals.received is not None:
            progress.say(f"stopped by {signals.received.name}; there is nothing to save")
        progress.say(resume_line if folder.recipe_file.exists() else "start again with the same command")
        clear_frames(interruption.__traceback__)
        _end_together(fabric)
        raise
    except Exception as error:
        if is_lost_process(error):
            minutes = f"{fabric.strategy._timeout.total_seconds() / 60:g}"  # type: ignore[attr-defined]
            raise LostProcessError(
                f"process {fabric.global_rank} has lost another process of the run, which has died or has not answered "
                f"for {minutes} minutes (run.timeout_minutes): {first_line(error)}. The last checkpoint is intact: "
                f"{resume_line}"
            ) from error
        if (reason := disk_full_reason(error)) is None:
            raise
        raise DiskFullError(
            f"cannot write to {folder.path}: {reason}. The last checkpoint is intact: free some space, then "
            f"{resume_line}"
        ) from error


def _end_together(fabric: Fabric) -> None:
    """Wait until the first process has written all files: torchrun ends the others when one process ends."""
    fabric.barrier()
    if fabric.world_size > 1:
        # Threads of the process group run until nothing refers to it. One that drops a tensor while Python shuts down
        # aborts the process, so the wrapped model, which is part of a reference cycle, has to be collected first.
        fabric.strategy.release_group()  # type: ignore[attr-defined]
        gc.collect()
        torch.distributed.destroy_process_group()


def resume_command(command: str, folder: Path, device: str, processes: int) -> str:
    """The command line that resumes a run with the same number of processes."""
    options = f"{command} --out {shlex.quote(str(folder))} --resume{f' --device {device}' * (device != 'auto')}"
    if processes == 1:
        return f"sima {options}"
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = f"--nnodes={processes // local} " * (processes > local)
    rendezvous = " (and its rendezvous options)" * (processes > local)
    return f"torchrun {nodes}--nproc-per-node={local} -m sima_attn.cli {options}{rendezvous}"


def _without_initial_weights(recipe: Any, folder: RunFolder) -> Any:
    """The recipe without the sources of initial weights: a resumed run loads those of its checkpoint."""
    if checkpoints(folder.checkpoints):
        return without_sources(recipe)
    sources = sources_in(recipe)
    if sources:
        raise ValueError(
            f"the run in {folder.path} has no checkpoint yet, and {', '.join(sources)} is not used from a recipe file, "
            "which must not load other weights; start a new run with another --out"
        )
    return recipe
