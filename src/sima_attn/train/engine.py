"""The training loop that all kinds of training share; a task (task.py) has the model, the batches and the loss.

The random numbers of a step depend only on (seed, step, process). A checkpoint therefore needs no random state, and a
resumed run is bitwise equal to one that was never interrupted.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from sima_attn._settings import from_dict
from sima_attn.data.loader import seed_everything
from sima_attn.models.compiled import compile_blocks
from sima_attn.models.sharded_files import is_sharded, read_values
from sima_attn.report.progress import RunProgress
from sima_attn.train.average import Average
from sima_attn.train.checkpoint import load_checkpoint, newest_readable, save_checkpoint
from sima_attn.train.learning_rates import learning_rates
from sima_attn.train.logs import CsvLog, TensorBoard
from sima_attn.train.mesh import batch_share, leave_mesh, synchronize_batch_norm
from sima_attn.train.non_finite import NonFiniteError, first_non_finite, is_finite
from sima_attn.train.recipes import Optim, Run, Schedule, StepSchedule
from sima_attn.train.recorded import RecordedPass
from sima_attn.train.run import RunFolder, refuse_changes
from sima_attn.train.sharded_checkpoint import load_sharded, save_sharded, sharded_path
from sima_attn.train.sharding import gathered, local_parts, shard
from sima_attn.train.stopping import RunInterrupted, StopSignals
from sima_attn.train.task import RunSummary, Task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_STEP_STREAM = 1  # separates the seeds of steps from those of samples


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
        self.make_pass = self.new_pass()
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
        """Make one optimizer step."""
        self.set_rates(self.step)
        if self.task.starts_stage(self.step):
            self.optimizer.optimizer.state.clear()
            self.make_pass = self.new_pass()
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

    def new_pass(self) -> Callable[[Any], dict[str, Tensor]]:
        """Forward and backward pass of a prepared batch; with run.cuda_graph it is recorded anew."""
        return RecordedPass(self.plain_pass, self.task.model.parameters()) if self.run.cuda_graph else self.plain_pass

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
        """Means as Python numbers; the only synchronization with the device per step."""
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
                if not is_finite(loss):
                    culprit = where
                    break
        message = f"the loss of step {self.step + 1} is not finite: {culprit}. {self.advice()}"
        raise NonFiniteError(message, self.step + 1)

    def stop_at_non_finite_gradient(self) -> None:
        """Name the first parameter whose gradient is not finite."""
        gradients = {name: p.grad for name, p in self.task.model.named_parameters() if p.grad is not None}
        bad: Any = torch.tensor([not is_finite(part) for part in local_parts(gradients.values())], dtype=torch.float32)
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
