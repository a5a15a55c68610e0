"""The deletion test on a model whose answer is known: it counts bright patches, and its keys are its brightness."""

import numpy as np
import pytest
import torch
from small_models import deit
from torch import nn

from sima_attn.explain.deletion import FRACTIONS, MODES, ORDERS, deletion_test, validation_batches
from sima_attn.explain.figures import plot_deletion
from sima_attn.explain.subject import subject_of
from sima_attn.nn import SimAttention


class Counter(nn.Module):
    """Logits (10 x bright patches - 5, 0): class 0 while one bright patch is seen sharply.

    Keys are brightness, or darkness.
    """

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 1, 4, stride=4, bias=False)
        self.attn = SimAttention(1, 1, qkv_bias=True)
        with torch.no_grad():
            self.patch.weight.fill_(1 / 48)
            self.attn.qkv.weight.copy_(torch.tensor([[1.0], [sign], [1.0]]))
            self.attn.qkv.bias.copy_(torch.tensor([0.0, 0.0 if sign > 0 else 1.0, 0.0]))

    def forward(self, x):
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        self.attn(tokens)
        score = 10.0 * (tokens > 0.9).sum((1, 2)) - 5
        return torch.stack([score, torch.zeros_like(score)], 1)


def pictures(count=6, bright=1):
    images = torch.zeros(count, 3, 20, 20)  # 5 x 5 patches
    generator = torch.Generator().manual_seed(0)
    for picture in images:
        for place in torch.randperm(25, generator=generator)[:bright].tolist():
            row, column = divmod(place, 5)
            picture[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1.0
    return images, torch.zeros(count, dtype=torch.long)


def curves(rows):
    return {
        (mode, order): np.array([row.probability for row in rows if (row.mode, row.order) == (mode, order)])
        for mode in MODES
        for order in ORDERS
    }


YES, NO = (float(torch.tensor([score, 0.0]).softmax(0)[0]) for score in (5.0, -5.0))


def test_the_known_answer():
    rows = deletion_test(Counter(), [pictures()])
    found = curves(rows)
    seen, gone = np.full(10, YES), np.full(10, NO)
    # The one bright patch is the first to go, or the last; sharpened, it is the other way round.
    assert np.allclose(found["deletion", "highest first"], [YES, *gone], atol=1e-5)
    assert np.allclose(found["deletion", "lowest first"], [*seen, NO], atol=1e-5)
    assert np.allclose(found["insertion", "highest first"], [NO, *seen], atol=1e-5)
    assert np.allclose(found["insertion", "lowest first"], [*gone, YES], atol=1e-5)
    middle = found["deletion", "random"]
    assert (np.diff(middle) <= 1e-6).all()
    assert found["deletion", "highest first"].mean() < middle.mean() < found["deletion", "lowest first"].mean()
    assert {row.images for row in rows} == {6}
    assert len(rows) == len(MODES) * len(ORDERS) * len(FRACTIONS)
    full = next(row for row in rows if row.mode == "deletion" and row.fraction == 0)
    assert full.top1 == 100
    assert full.area == pytest.approx(np.trapezoid(found["deletion", "highest first"], FRACTIONS), abs=1e-5)


def test_insertion_starts_with_a_blur_and_not_with_nothing():
    """Brightness that a blur keeps is seen from the start."""
    images = torch.ones(2, 3, 20, 20)
    found = curves(deletion_test(Counter(), [(images, torch.zeros(2, dtype=torch.long))]))
    assert found["insertion", "random"][0] > YES - 1e-5
    assert np.isclose(found["deletion", "random"][-1], NO, atol=1e-5)


def test_a_map_that_is_wrong_fails_the_test():
    """Keys that are large where it is dark: hiding the highest first is then the slowest way."""
    found = curves(deletion_test(Counter(sign=-1.0), [pictures()]))
    assert found["deletion", "highest first"].mean() > found["deletion", "lowest first"].mean()


def test_images_and_batches_add_up_and_the_seed_decides():
    images, labels = pictures(6, bright=3)
    whole = deletion_test(Counter(), [(images, labels)], seed=3)
    assert whole == deletion_test(Counter(), [(images, labels)], seed=3)
    parts = deletion_test(Counter(), [(images[:4], labels[:4]), (images[4:], labels[4:])], seed=3)
    for order in ("highest first", "lowest first"):
        assert np.allclose(curves(whole)["deletion", order], curves(parts)["deletion", order], atol=1e-6)


def test_rows_become_a_curve(tmp_path):
    plot_deletion(deletion_test(Counter(), [pictures(2)], fractions=(0, 0.5, 1)), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_wrong_settings_are_errors():
    with pytest.raises(ValueError, match="fractions must grow from 0 to 1"):
        deletion_test(Counter(), [pictures()], fractions=(0, 0.5))
    with pytest.raises(ValueError, match="no images"):
        deletion_test(Counter(), [])


def test_any_data_set_of_training_serves():
    pytest.importorskip("sklearn")
    subject = subject_of(deit(num_classes=10))
    batches = validation_batches(subject, "digits", images=5, size=16, batch=2)
    assert [len(labels) for _, labels in batches] == [2, 2, 1]
    assert batches[0][0].shape == (2, 3, 16, 16)
    subject.model.reset_classifier(11)
    with pytest.raises(ValueError, match="has 11 classes, digits has 10"):
        validation_batches(subject, "digits", images=5)
