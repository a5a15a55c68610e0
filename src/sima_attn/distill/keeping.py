"""Attentions of the teacher that stay in the student: which ones, and how they are put there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from sima_attn.distill.recipes import Transfer

Metrics = dict[str, float]


class Kept(NamedTuple):
    """The attention that is kept next, "" for none, and the metrics of the student that keeps it and all before it."""

    path: str
    metrics: Metrics


def rank_blocks(
    errors: Mapping[str, float],
    measure: Callable[[Sequence[str]], Metrics],
    *,
    most: int,
    candidates: int,
    is_enough: Callable[[Sequence[Kept]], bool] = lambda ranked: False,
) -> list[Kept]:
    """The order in which to keep attentions, and what each one gains: K = 0 first, then one more each time.

    The candidates are the attentions with the largest errors among those left. Each is tried, and the one with the
    largest cosine of the final tokens is kept: an error in one block says little about its effect on the output.
    `measure` is called at most 1 + candidates * most times.

    Args:
        errors: Attention -> its error.
        measure: Metrics of the student that keeps these attentions.
        most: Largest number of attentions to keep.
        is_enough: Whether to stop with these.
    """
    ranked = [Kept("", measure([]))]
    while len(ranked) <= min(most, len(errors)) and not is_enough(ranked):
        kept = [each.path for each in ranked[1:]]
        left = sorted(errors.keys() - set(kept), key=lambda path: (-errors[path], path))
        tried = [Kept(path, measure([*kept, path])) for path in left[:candidates]]
        ranked.append(max(tried, key=lambda each: each.metrics["cosine"]))
    return ranked


def relative_quality(metrics: Metrics) -> tuple[str, float]:
    """What a budget limits: accuracy relative to the teacher's where there are labels, otherwise the cosine."""
    if "top1" in metrics:
        return "accuracy relative to the teacher's", metrics["top1"] / max(metrics["teacher_top1"], 1e-9)
    return "cosine of the final tokens", metrics["cosine"]


def choose_blocks(
    errors: Mapping[str, float],
    measure: Callable[[Sequence[str]], Metrics],
    transfer: Transfer,
    *,
    most: int,
    shown: int,
) -> tuple[list[Kept], int]:
    """The ranking, and how many of its attentions to keep: as many as `transfer` says, or as few as reach the budget.

    Args:
        errors, measure, most: See `rank_blocks`.
        shown: Number of attentions to rank at least, for the report.
    """

    def reaches_budget(kept: Kept) -> bool:
        return transfer.budget is not None and relative_quality(kept.metrics)[1] >= transfer.budget

    ranking = rank_blocks(
        errors,
        measure,
        most=most,
        candidates=transfer.candidates,
        is_enough=lambda ranked: len(ranked) > shown and any(map(reaches_budget, ranked)),
    )
    count = transfer.keep
    if count is None:
        count = next((K for K, kept in enumerate(ranking) if reaches_budget(kept)), None)
    if count is None:
        what, reached = relative_quality(ranking[-1].metrics)
        raise ValueError(
            f"the budget of {transfer.budget} was not reached: with {len(ranking) - 1} of {len(errors)} "
            f"attentions kept, the {what} is {reached:.4f}; choose a lower --budget, a fixed --keep or more --steps"
        )
    return ranking, count


@contextmanager
def kept_for_now(student: nn.Module, teacher: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """A context in which the student has the teacher's attentions at these paths."""
    before = {path: student.get_submodule(path) for path in paths}
    try:
        for path in paths:
            student.set_submodule(path, teacher.get_submodule(path))
        yield
    finally:
        for path, module in before.items():
            student.set_submodule(path, module)


@torch.no_grad()
def keep_blocks(student: nn.Module, teacher: nn.Module, paths: Sequence[str]) -> None:
    """Put copies of the teacher's attentions into the student for good.

    Parameters of the same name and shape remain the same objects, with the teacher's values: the optimizer refers to
    them. Others, such as the temperature of XCA, do not learn.
    """
    for path in paths:
        old, new = student.get_submodule(path), copy.deepcopy(teacher.get_submodule(path))
        trained = dict(old.named_parameters())
        for name, parameter in list(new.named_parameters()):
            if name in trained and trained[name].shape == parameter.shape:
                owner, _, leaf = name.rpartition(".")
                trained[name].copy_(parameter)
                new.get_submodule(owner)._parameters[leaf] = trained[name]
        student.set_submodule(path, new.train(old.training))
