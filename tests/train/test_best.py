"""The best weights of a run."""

import io
import math

import pytest
import torch
from torch import nn

from sima_attn.train.best import Best


def network(value):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def test_the_highest_score_is_kept_with_its_metrics_and_step():
    best = Best(network(0))
    for step, score in enumerate((1.0, 3.0, 2.0, 3.0), 1):
        best.offer(network(step), {"top1": score}, (score,), step)
    assert (best.network.weight.item(), best.metrics, best.step, best.waited) == (2, {"top1": 3.0}, 2, 2)


def test_equal_first_numbers_are_decided_by_the_next():
    best = Best(network(0))
    best.offer(network(1), {}, (50.0, -0.4), 1)
    best.offer(network(2), {}, (50.0, -0.3), 2)
    best.offer(network(3), {}, (49.0, -0.1), 3)
    assert best.step == 2


def test_a_score_that_is_not_a_number_is_never_the_best():
    best = Best(network(0))
    best.offer(network(1), {}, (math.nan,), 1)
    best.offer(network(2), {}, (-5.0,), 2)
    best.offer(network(3), {}, (math.nan,), 3)
    assert (best.step, best.waited) == (2, 1)


def test_the_copy_does_not_learn_and_does_not_follow_the_model():
    model = network(1)
    best = Best(model)
    best.offer(model, {}, (1.0,), 1)
    nn.init.constant_(model.weight, 7)
    assert best.network.weight.item() == 1
    assert not best.network.weight.requires_grad


def test_a_checkpoint_holds_everything():
    best = Best(network(0))
    best.offer(network(4), {"top1": 1 / 3}, (1 / 3, -2.0), 6)
    best.offer(network(5), {"top1": 0.0}, (0.0, -2.0), 7)
    file = io.BytesIO()
    torch.save(best.state_dict(), file)
    file.seek(0)
    again = Best(network(0))
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.get_extra_state() == best.get_extra_state()
    assert again.network.weight.item() == pytest.approx(4)
