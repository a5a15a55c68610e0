"""The training loop that all kinds of training share; a Task defines the model, the batches and the loss.

The random numbers of a step depend only on (seed, step, process). A checkpoint therefore needs no random state, and a
resumed run is bitwise equal to one that was never interrupted.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from safetensors.torch import save_file
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sima_attn._devices import resolve_device
from sima_attn._files import atomic_write
from sima_attn._settings import from_dict, to_dict
from sima_attn.data.loader import seed_everything
from sima_attn.models.compiled import compile_blocks
from sima_attn.models.sharded_files import is_sharded, read_values
from sima_attn.report.progress import RunProgress
from sima_attn.train.average import Average
from sima_attn.train.checkpoint import load_checkpoint, newest_readable, save_checkpoint
from sima_attn.train.logs import CsvLog, TensorBoard
from sima_attn.train.mesh import batch_share, leave_mesh, synchronize_batch_norm
from sima_attn.train.recipes import Optim, Run, Schedule, StepSchedule
from sima_attn.train.recorded import RecordedPass
from sima_attn.train.run import RunFolder, refuse_changes
from sima_attn.train.sharded_checkpoint import load_sharded, save_sharded, sharded_path
from sima_attn.train.sharding import gathered, local_parts, shard, whole_tensors
from sima_attn.train.stopping import RunInterrupted, StopSignals

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MIXED: dict[str, Any] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
_STEP_STREAM = 1  # separates the seeds of steps from those of samples


class Task(ABC):
    """Model, data and loss of a run: classification, DINO or detection.

    Attributes:
        model: The module to train. The loop wraps it and passes the wrapped module to `loss`.
        steps_per_epoch: Optimiser steps per epoch.
        title: Title of the learning curve.
        recordable: Whether the loss supports CUDA graphs (run.cuda_graph): everything that changes between steps is in
            the prepared batch, a sequence of tensors of fixed shapes, or in tensors that `before_step` fills.
        calls_wrapper: Whether `loss` calls the wrapped module, which averages the gradients of several processes. If it
            calls parts of `model` instead, the loop averages them.
        stage: Name of the current stage for logs and progress bar, set by `before_step`; empty in a run of one stage.
    """

    model: nn.Module
    steps_per_epoch: int
    title: str = ""
    recordable: ClassVar[bool] = False
    calls_wrapper: ClassVar[bool] = True
    stage: str = ""

    @abstractmethod
    def batches(self, start: int, stop: int) -> Iterator[Any]:
        """Batches of this process, on its device, for the steps from start to stop: `accumulate` batches per step.

        They must depend only on the arguments and the recipe: a resumed run calls this with its own start.
        """

    def prepare(self, batch: Any) -> Any:
        """Augment a batch for `loss`: everything that draws random numbers or branches in Python at each step."""
        return batch

    def draw_batch(self, batch: Any, path: Path) -> None:  # noqa: B027
        """Draw a prepared batch into a PNG file, with the labels; it must not draw random numbers.

        The loop calls it with the first batch of a run, before the pass.
        """

    @abstractmethod
    def loss(self, model: Callable[..., Any], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a prepared batch, and further numbers to log under fixed names."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the model, reduced over all processes."""

    def parameter_groups(self, weight_decay: float) -> Any:
        """Parameter groups of the optimiser: no decay for biases, norms and the model's `no_weight_decay` list."""
        excluded: Any = getattr(self.model, "no_weight_decay", tuple)
        return param_groups_weight_decay(self.model, weight_decay, no_weight_decay_list=excluded())

    def starts_stage(self, step: int) -> bool:
        """Whether a stage with another loss begins with this step, counted from 0, so that the optimiser starts anew.

        Its averages of squared gradients would be those of the old loss. Where the new gradients are a hundred times
        larger, so would be the first steps.
        """
        return False

    def before_step(self, step: int, groups: list[dict[str, Any]]) -> None:  # noqa: B027
        """Called with the parameter groups after the learning rates are set, e.g. to schedule the weight decay."""

    def after_backward(self, step: int) -> None:  # noqa: B027
        """Called when the gradients of a step are complete and unscaled, e.g. to drop some of them."""

    def after_step(self, step: int) -> None:  # noqa: B027
        """Called after each optimiser step with the number of completed steps, e.g. to update a teacher."""

    def needs_evaluation(self, step: int) -> bool:
        """Whether to evaluate after this many steps, beside run.eval_epochs, e.g. before training or after a stage."""
        return False

    def is_finished(self) -> bool:
        """Whether to end the run before its last step; asked after each evaluation, and when a run is resumed.

        The answer must follow from `state` alone, and be the same in all processes.
        """
        return False

    def state(self) -> dict[str, nn.Module]:
        """Further modules to save in checkpoints, by name: a teacher, a centre."""
        return {}

    def about(self, recipe: Any) -> dict[str, Any]:
        """Plain values to save with each checkpoint and the weights: the recipe, the classes, the number of images."""
        return {"recipe": to_dict(recipe)}

    def result(self) -> nn.Module:
        """The module to save as weights.safetensors."""
        return self.model

    def write_result(self, folder: RunFolder, about: dict[str, Any], *, first: bool) -> None:
        """Write the trained weights, with what `about` returns, into the run folder.

        All processes call it, because sharded weights are gathered from all; the first one writes.
        """
        tensors = whole_tensors(self.result(), keep=first)
        if first:
            with atomic_write(folder.weights) as temporary:
                save_file(tensors, temporary, metadata={"about": json.dumps(about)})


class NonFiniteError(ValueError):
    """A loss or gradient that is not finite; `step` counts from 1."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class RunSummary(NamedTuple):
    """Metrics of the last evaluation, the averaged model, steps of the run, seconds of this process.

    There is an averaged model with run.ema; of a sharded run it is only in the checkpoints.
    """

    metrics: dict[str, float]
    ema: nn.Module | None
    steps: int
    seconds: float


def start_fabric(device: str, precision: str, strategy: str = "ddp", timeout_minutes: float = 10.0) -> Fabric:
    """Launch Fabric on "auto", "cpu" or "cuda"; under torchrun, as one of its processes, with a strategy of `Run`."""
    # Imported here so that evaluation and prediction work without lightning.
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import MixedPrecision, Precision

    from sima_attn.train.strategies import strategy_of

    class Autocast(MixedPrecision):
        def forward_context(self) -> Any:
            # The cache would keep the converted weights of all blocks, and so more than what sharding saves.
            return torch.autocast(device, dtype=self._desired_input_dtype, cache_enabled=strategy != "fsdp")

        def convert_input(self, data: Any) -> Any:  # Fabric would round inputs, too, even the coordinates of boxes
            return data

    device = resolve_device(device)
    if precision == "fp16" and device == "cpu":
        raise ValueError("fp16 training needs a GPU; use --precision bf16 or fp32 on the CPU")
    if device == "cuda" and precision in MIXED:
        torch.set_float32_matmul_precision("high")  # TF32 is enough for what autocast keeps in float32
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(
        accelerator=device,
        devices=local,
        num_nodes=max(1, world // local),
        strategy=strategy_of(strategy, timeout_minutes) if world > 1 else "auto",
        plugins=Autocast(MIXED[precision], device) if precision in MIXED else Precision(),
    )
    fabric.launch()
    return fabric


def learning_rates(
    optimizer: torch.optim.Optimizer, schedule: Schedule | StepSchedule, lr: float, steps_per_epoch: int
) -> Callable[[int], None]:
    """A function that sets the learning rates for a step, counted from 0.

    timm's MultiStepLRScheduler is not used: it applies a milestone one step early, ignores milestones within the
    warm-up, and its warm-up differs from this one in the last bit of the learning rate.
    """
    if not isinstance(schedule, Schedule):
        rates = [group["lr"] for group in optimizer.param_groups]

        def set_rates(step: int) -> None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule.factor(step, steps_per_epoch)

        return set_rates
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=schedule.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=min(schedule.warmup_lr, lr),
        min_lr=min(schedule.min_lr, lr),
        cooldown_epochs=schedule.cooldown_epochs,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    return scheduler.step_update


class TrainingLoop:
    """Trains a task by a recipe, and writes logs and checkpoints to the folder of the run.

    Args:
        recipe: A frozen dataclass with the groups `optim`, `schedule` and `run`.
    """

    def __init__(self, task: Task, recipe: Any, folder: RunFolder, fabric: Fabric, progress: RunProgress) -> None:
        self.task, self.recipe, self.folder, self.fabric, self.progress = task, recipe, folder, fabric, progress
        self.optim: Optim = recipe.optim
        self.schedule: Schedule | StepSchedule = recipe.schedule
        self.run: Run = recipe.run
        self.total = self.schedule.all_epochs * task.steps_per_epoch
        self.sharded = self.run.strategy == "fsdp" and fabric.world_size > 1
        if self.run.grad_checkpointing:
            task.model.set_grad_checkpointing(True)  # type: ignore[operator]
        if fabric.world_size > 1 and fabric.device.type == "cuda":
            task.model = synchronize_batch_norm(task.model, fabric)
        module = self.place_model()
        lr = self.optim.lr_at(self.run.batch)
        # Not with fp16, where gradients must be unscaled before clipping.
        fused = self.optim.name == "adamw" and fabric.device.type == "cuda" and self.run.precision != "fp16"
        options: dict[str, Any] = {"fused": True} if fused else {}
        optimizer = create_optimizer_v2(
            task.parameter_groups(self.optim.weight_decay),
            opt=self.optim.name,
            lr=lr,
            weight_decay=self.optim.weight_decay,
            betas=self.optim.betas,
            eps=self.optim.eps,
            **options,
        )
        self.set_rates = learning_rates(optimizer, self.schedule, lr, task.steps_per_epoch)
        self.model, self.optimizer = fabric.setup(module, optimizer, move_to_device=False)
        self.make_pass: Callable[[Any], dict[str, Tensor]] = self.plain_pass
        if self.run.cuda_graph:
            self.make_pass = RecordedPass(self.plain_pass, task.model.parameters())
        self.signals = StopSignals(progress.show_stopping)
        self.stop_agreed = False  # whether any process had received a signal in the last step
        self.step = 0
        self.sums: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    def place_model(self) -> Any:
        """Put the modules on the device, sharded with run.strategy=fsdp, and return the compiled model if asked for."""
        model, kept, run = self.task.model, self.task.state().values(), self.run
        if not self.sharded:  # sharding moves them block by block, so that no device has to hold a whole one
            for module in (model, *kept):
                module.to(self.fabric.device)
        self.ema = Average(model, run.ema, warmup=run.ema_warmup) if run.ema else None
        compiled: Any = compile_blocks(model) if run.compile else model
        if self.sharded:
            if not self.task.calls_wrapper:
                raise ValueError(
                    f"{type(self.task).__name__} calls parts of its model: run.strategy must be ddp, got fsdp"
                )
            if compiled is not model:
                raise ValueError(
                    "run.compile=true with run.strategy=fsdp compiles single blocks, and those of this model differ; "
                    "set run.compile=false or, if drop path grows from block to block, model.constant_drop_path=true"
                )
            mesh: Any = self.fabric.strategy.mesh  # type: ignore[attr-defined]
            for module in (model, *([self.ema.module] if self.ema else []), *kept):
                shard(module, mesh)
        if self.ema:
            self.ema.track(model)
        return compiled

    def modules(self) -> dict[str, nn.Module]:
        """What a checkpoint holds: the model, its average, and the further modules of the task."""
        average = {"ema": self.ema.module} if self.ema else {}
        further = {f"task/{name}": module for name, module in self.task.state().items()}
        return {"model": self.task.model, **average, **further}

    def values(self) -> dict[str, Any]:
        """The plain values of a checkpoint."""
        return {
            "step": self.step,
            "precision": self.fabric._precision.state_dict(),  # the loss scale of fp16
            "sums": self.sums,
            "metrics": self.metrics,
            "about": self.task.about(self.recipe),
        }

    def load(self, path: Path) -> None:
        """Load a checkpoint; raise if its recipe or data differ from those of this run."""
        sharded = is_sharded(path)
        state = read_values(path) if sharded else load_checkpoint(path)
        about, ours = state["about"], self.task.about(self.recipe)
        saved = from_dict(type(self.recipe), about["recipe"] if "recipe" in about else about["detector"])
        refuse_changes(f"the checkpoint in {self.folder.checkpoints}", saved, self.recipe)
        for name in ("classes", "category_ids", "images"):
            if name in about and about[name] != ours[name]:
                before, now = about[name], ours[name]
                change = f"{len(before)} to {len(now)}" if isinstance(before, list) else f"{before} to {now}"
                raise ValueError(
                    f"the data are not those of the run in {self.folder.path}: their {name} have changed ({change}); "
                    "give the data of the run with --data, or start a new run with another --out"
                )
        self.step = state["step"]
        if sharded:
            load_sharded(path, self.modules(), self.optimizer.optimizer)
        else:
            self.task.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.ema:
                self.ema.module.load_state_dict(state["ema"])
            for name, module in self.task.state().items():
                module.load_state_dict(state["task"][name])
        if state["precision"]:
            self.fabric._precision.load_state_dict(state["precision"])
        self.sums, self.metrics = state["sums"], state["metrics"]

    def save(self) -> None:
        """Write a checkpoint: of a sharded run all processes, otherwise the first one."""
        if self.run.strategy == "fsdp":
            self.share_statistics()
            path = sharded_path(self.folder.checkpoints, self.step)
            save_sharded(path, self.modules(), self.optimizer.optimizer, self.values())
        elif self.fabric.is_global_zero:
            state = {
                "model": self.task.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "ema": self.ema.module.state_dict() if self.ema else None,
                "task": {name: module.state_dict() for name, module in self.task.state().items()},
            }
            save_checkpoint(self.folder.checkpoints, self.step, {**self.values(), **state})
        self.saved_at = time.monotonic()

    def train(self, *, resume: bool, on_ready: Callable[[], None]) -> RunSummary:
        """Train to the end, or until a signal stops the run.

        Args:
            resume: Start from the newest checkpoint in the folder, if there is one.
            on_ready: Called before the first file is written, when everything is built and the checkpoint is loaded.
        """
        newest = newest_readable(self.folder.checkpoints, self.progress.say) if resume else None
        if newest is not None:
            self.load(newest)
            self.progress.say(f"resuming at step {self.step} of {self.total}")
        self.fabric.barrier()
        on_ready()
        first = self.fabric.is_global_zero
        self.logs = {name: CsvLog(self.folder.path / f"{name}.csv", self.step) for name in ("train", "eval") if first}
        self.board = TensorBoard(self.folder.path / "tensorboard", self.step) if first else None
        self.started = self.saved_at = self.logged_at = time.monotonic()
        self.timed_from = self.step
        self.progress.start(self.step, self.total)
        self.model.train()
        try:
            with self.signals:
                if newest is None:
                    if self.task.needs_evaluation(0):
                        self.evaluate()
                    self.save()  # a run that fails in its first steps has a checkpoint, too
                self.make_steps()
        finally:
            del self.model  # DDP's wrapper holds the process group, which must be destroyed before the process exits
            leave_mesh(self.task.model, *([self.ema.module] if self.ema else []), *self.task.state().values())
            if self.board is not None:
                self.board.close()
        average = self.ema.module if self.ema and not self.sharded else None
        return RunSummary(self.metrics, average, self.step, time.monotonic() - self.started)

    def make_steps(self) -> None:
        """Make the remaining steps, with evaluations and checkpoints; a signal stops the run after the current step."""
        batches = iter(self.task.batches(self.step, self.total))
        while self.step < self.total and not self.task.is_finished():
            self.one_step(batches)
            every = self.run.eval_epochs * self.task.steps_per_epoch
            if self.step % every == 0 or self.step == self.total or self.task.needs_evaluation(self.step):
                self.evaluate()
            stop = self.stop_signal()
            self.save_if_due(stop is not None)
            if stop is not None:
                self.progress.say(f"stopped by {stop.name} after step {self.step} of {self.total}; the step is saved")
                raise RunInterrupted(128 + stop)

    def stop_signal(self) -> signal.Signals | None:
        """The signal that stops the run after this step, in all processes or in none."""
        if self.fabric.world_size == 1:
            return self.signals.received
        return (self.signals.received or signal.SIGTERM) if self.stop_agreed else None

    def one_step(self, batches: Iterator[Any]) -> None:
        """Make one optimiser step."""
        self.set_rates(self.step)
        if self.task.starts_stage(self.step):
            self.optimizer.optimizer.state.clear()
        self.task.before_step(self.step, self.optimizer.param_groups)
        parts = self.run.accumulate
        mine = [next(batches) for _ in range(parts)]
        sums: dict[str, Tensor] = {}
        for part, batch in enumerate(mine):
            self.seed(part)
            prepared = self.task.prepare(batch)
            if self.step == part == 0 and self.fabric.is_global_zero:
                self.task.draw_batch(prepared, self.folder.batch_picture)
            with self.fabric.no_backward_sync(self.model, enabled=part + 1 < parts):
                numbers = self.make_pass(prepared)
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0) + value.detach().float() / parts
        if self.fabric.world_size > 1 and not self.task.calls_wrapper:
            self.average_gradients()
        norm = self.fabric.clip_gradients(
            self.model, self.optimizer, max_norm=self.optim.clip or math.inf, error_if_nonfinite=False
        )
        sums["grad_norm"] = norm.detach().float()  # type: ignore[union-attr]
        means = self.mean_over_processes(sums)
        # Checked before the weights change, so that the forward pass can be repeated to find the module.
        if not math.isfinite(means["loss"]):
            self.stop_at_non_finite_loss(mine)
        if self.run.precision != "fp16" and not math.isfinite(means["grad_norm"]):
            self.stop_at_non_finite_gradient()  # fp16's loss scaler skips such steps, which it causes by design
        self.task.after_backward(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.ema:
            self.ema.follow(self.step)
        self.task.after_step(self.step)
        self.log(means)

    def plain_pass(self, batch: Any) -> dict[str, Tensor]:
        """Forward and backward pass of a prepared batch: accumulate gradients, return the loss and numbers to log."""
        loss, numbers = self.task.loss(self.model, batch)
        self.fabric.backward(loss / self.run.accumulate)
        return {"loss": loss, **numbers}

    def average_gradients(self) -> None:
        """Average the gradients of all processes, in which the same parameters have one."""
        gradients = [p.grad for p in self.task.model.parameters() if p.grad is not None]
        flat: Any = self.fabric.all_reduce(torch.cat([g.flatten() for g in gradients]), reduce_op="mean")
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def seed(self, part: int) -> None:
        """Seed the random numbers of a pass by the step, the accumulation part and the share of the batch."""
        share, _ = batch_share(self.run, self.fabric.global_rank, self.fabric.world_size)
        seed_everything(self.run.seed, _STEP_STREAM, self.step, part, share)

    def mean_over_processes(self, numbers: dict[str, Tensor]) -> dict[str, float]:
        """Means as Python numbers; the only synchronisation with the device per step."""
        values = torch.stack([value.reshape(()) for value in numbers.values()])
        if self.fabric.world_size == 1:
            return dict(zip(numbers, values.tolist(), strict=True))
        # Received signals are reduced along with the numbers, so that all processes stop after the same step.
        received = values.new_full((1,), float(self.signals.received is not None))
        reduced: Any = self.fabric.all_reduce(torch.cat([values, received]), reduce_op="mean")
        *means, stop = reduced.tolist()
        self.stop_agreed = stop > 0
        return dict(zip(numbers, means, strict=True))

    def log(self, means: dict[str, float]) -> None:
        """Add the numbers of a step to the current row of the log, and write the row when it is complete."""
        for name, value in means.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if self.step % self.run.log_steps and self.step != self.total:
            return
        steps = (self.step - 1) % self.run.log_steps + 1
        now = time.monotonic()
        # In a resumed run the sums cover all steps of the row, the time only those since it was resumed.
        rate = (self.step - self.timed_from) * self.run.batch / max(now - self.logged_at, 1e-9)
        epoch = self.step / self.task.steps_per_epoch
        row = {
            **self.position(),
            **{name: total / steps for name, total in self.sums.items()},
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "images_per_second": round(rate, 1),
        }
        self.write_log("train", row)
        self.progress.step(self.step, epoch, row["loss"], rate, self.task.stage)
        self.sums, self.logged_at, self.timed_from = {}, now, self.step

    def position(self) -> dict[str, Any]:
        """The first columns of a row of the logs."""
        stage = {"stage": self.task.stage} if self.task.stage else {}
        return {"step": self.step, "epoch": round(self.step / self.task.steps_per_epoch, 4), **stage}

    def write_log(self, name: str, row: dict[str, Any]) -> None:
        """Add a row to a log and to TensorBoard, in the first process only."""
        if self.fabric.is_global_zero:
            self.logs[name].add(row)
            self.board.add(row, name)  # type: ignore[union-attr]

    def share_statistics(self) -> None:
        """Copy the running statistics of the first process, which are saved, to the others."""
        if self.fabric.world_size == 1:
            return
        average = [self.ema.module] if self.ema else []
        for module in (self.task.model, *average, *self.task.state().values()):
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    torch.distributed.broadcast(buffer, 0)

    def evaluate(self) -> None:
        """Evaluate the model, and its average with run.ema, and log the metrics."""
        before = time.monotonic()
        self.share_statistics()
        with torch.compiler.set_stance("force_eager"):  # compiling does not pay for a few batches
            with gathered(self.task.model, *self.task.state().values()):
                metrics = self.task.evaluate(self.task.model)
            if self.ema:
                with gathered(self.ema.module):
                    average = self.task.evaluate(self.ema.module)
                metrics |= {f"ema_{name}": value for name, value in average.items()}
        self.model.train()
        self.metrics = metrics
        self.write_log("eval", {**self.position(), **metrics})
        self.progress.evaluated(self.step / self.task.steps_per_epoch, metrics, self.task.stage)
        self.logged_at += time.monotonic() - before  # throughput is measured without evaluation

    def save_if_due(self, stopping: bool) -> None:
        """Write a checkpoint at the intervals of the recipe, when the run stops, and after the last step."""
        by_steps = self.run.checkpoint_steps and self.step % self.run.checkpoint_steps == 0
        by_time = time.monotonic() - self.saved_at > 60 * self.run.checkpoint_minutes
        if by_steps or by_time or stopping or self.step == self.total or self.task.is_finished():
            self.save()

    def stop_at_non_finite_loss(self, batches: list[Any]) -> None:
        """Repeat the forward passes without compilation to name the first module with a non-finite output."""
        culprit = "it is finite in this process, so it comes from another one"
        model = self.task.model
        with gathered(model, *self.task.state().values()):
            for part, batch in enumerate(batches):
                self.seed(part)
                prepared = self.task.prepare(batch)
                with torch.no_grad(), self.fabric.autocast(), torch.compiler.set_stance("force_eager"):
                    loss, where = first_non_finite(model, partial(self.task.loss, model, prepared))
                if not _finite(loss):
                    culprit = where
                    break
        message = f"the loss of step {self.step + 1} is not finite: {culprit}. {self.advice()}"
        raise NonFiniteError(message, self.step + 1)

    def stop_at_non_finite_gradient(self) -> None:
        """Name the first parameter whose gradient is not finite."""
        gradients = {name: p.grad for name, p in self.task.model.named_parameters() if p.grad is not None}
        bad: Any = torch.tensor([not _finite(part) for part in local_parts(gradients.values())], dtype=torch.float32)
        # A process may hold a finite part of a gradient that is not finite.
        bad = self.fabric.all_reduce(bad.to(self.fabric.device), reduce_op="sum")
        names = [name for name, count in zip(gradients, bad.tolist(), strict=True) if count]
        raise NonFiniteError(
            f"the gradient of step {self.step + 1} is not finite, but its loss is: {names[0] if names else 'its norm'} "
            f"and {max(0, len(names) - 1)} other parameters. {self.advice()}",
            self.step + 1,
        )

    def advice(self) -> str:
        """What to do about numbers that are not finite."""
        return (
            f"Earlier checkpoints are in {self.folder.checkpoints}; try a lower optim.lr, optim.clip or "
            "run.precision=fp32"
        )


def first_non_finite(model: nn.Module, forward: Callable[[], Any]) -> tuple[Any, str]:
    """The result of `forward`, and a description of the first module whose output is not finite."""
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not _finite(output):
            given = "" if _finite(inputs) else ", whose input was already not finite"
            found.append(f"first in the output of {names[module] or 'the model'} ({type(module).__name__}){given}")

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        out = forward()
    finally:
        for hook in hooks:
            hook.remove()
    return out, found[0] if found else "all modules have finite outputs; the cause is the loss function or its targets"


def _finite(value: Any) -> bool:
    """Whether all floating-point tensors in nested lists, tuples and dictionaries are finite."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
