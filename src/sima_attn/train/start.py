"""A run from its recipe to its weights: what every kind of training shares around the loop."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import nn

from sima_attn._files import written_whole
from sima_attn.bench.figures import check_can_plot
from sima_attn.train.checkpoint import remove_half_written
from sima_attn.train.curves import plot_learning_curve
from sima_attn.train.engine import Finished, Settings, Task, fit, start_fabric
from sima_attn.train.progress import RunProgress
from sima_attn.train.recorded import check_can_be_recorded
from sima_attn.train.run import RunFolder

AnyTask = TypeVar("AnyTask", bound=Task)


def train_task(
    recipe: Any,
    out: Path | str,
    *,
    build: Callable[[Fabric, RunProgress], AnyTask],
    about: Callable[[AnyTask], dict[str, Any]],
    weights: Callable[[AnyTask], nn.Module],
    title: str,
    resume: bool,
    device: str,
    quiet: bool,
) -> Finished:
    """Train by a checked recipe into a folder, or go on with the run in it; its last metrics come back.

    Args:
        recipe: A frozen dataclass with the groups `optim`, `schedule` and `run`.
        build: The task, its data opened.
        about: Plain values that checkpoints and weights carry.
        weights: The module whose weights the run is for.
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
                remove_half_written(folder.checkpoints)
        plots = _will_plot(progress)
        task = build(fabric, progress)
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
        finished = fit(task, settings, folder, fabric, progress, about=facts, on_ready=begin)
        if first:
            tensors = {name: t.detach().cpu().contiguous() for name, t in weights(task).state_dict().items()}
            with written_whole(folder.weights) as temporary:
                save_file(tensors, temporary, metadata={"about": json.dumps(facts)})
            if plots:
                plot_learning_curve(folder.path, folder.curve, title)
        fabric.barrier()
    if fabric.world_size > 1:
        # Its threads must end before the process does: one that still runs then aborts it, now and again.
        torch.distributed.destroy_process_group()
    return finished


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
