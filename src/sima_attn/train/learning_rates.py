"""The learning rate of each step, by the schedule of a recipe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.scheduler import create_scheduler_v2

from sima_attn.train.recipes import Schedule, StepSchedule


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
