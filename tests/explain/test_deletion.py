"""The deletion test on a model whose answer is known: it counts bright patches, and its keys are its brightness."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import deit
from torch import nn

from sima_attn.explain.deletion import MODES, ORDERS, STEPS, deletion_test, validation_batches
from sima_attn.explain.figures import plot_deletion
from sima_attn.explain.photo_model import photo_model
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


def curves(rows, of="k"):
    return {
        (mode, order): np.array([row.probability for row in rows if (row.of, row.mode, row.order) == (of, mode, order)])
        for mode in MODES
        for order in ORDERS
    }


YES, NO = (float(torch.tensor([score, 0.0]).softmax(0)[0]) for score in (5.0, -5.0))


def test_the_known_answer():
    rows = deletion_test(Counter(), [pictures()], of="k")
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
    fractions = [i / STEPS for i in range(STEPS + 1)]
    assert len(rows) == len(MODES) * len(ORDERS) * len(fractions)
    assert [row.fraction for row in rows[: len(fractions)]] == fractions
    full = next(row for row in rows if row.mode == "deletion" and row.fraction == 0)
    assert full.top1 == 100
    assert full.area == pytest.approx(np.trapezoid(found["deletion", "highest first"], fractions), abs=1e-5)


def test_what_is_over_random_has_the_error_of_its_mean():
    """One image at a time gives the areas whose mean the rows of all of them state."""
    images, labels = pictures(6, bright=3)
    batches = [(images[i : i + 1], labels[i : i + 1]) for i in range(6)]
    together = area_rows(deletion_test(Counter(), batches, of="k"))
    alone = [area_rows(deletion_test(Counter(), [batch], of="k")) for batch in batches]
    assert all(np.isnan(rows["deletion", "random"].error) for rows in alone)  # one image has no spread
    key = ("deletion", "highest first")
    assert together[key].area == pytest.approx(np.mean([rows[key].area for rows in alone]), abs=1e-5)
    assert together[key].over_random == pytest.approx(
        together[key].area - together["deletion", "random"].area, abs=2e-6
    )
    assert together[key].over_random < -2 * together[key].error < 0
    for mode in MODES:
        assert together[mode, "random"].over_random == together[mode, "random"].error == 0


def area_rows(rows):
    return {(row.mode, row.order): row for row in rows if row.fraction == 0}


def test_several_maps_share_the_random_order_and_agree_with_each_alone():
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    batch, model = (images, torch.arange(3)), deit().eval()
    calls = []
    together = deletion_test(model, [batch], layers=None, steps=3, on_map=calls.append)
    assert calls == [3] * 6  # three layers, q and k
    assert {row.layer for row in together} == {0, 1, 2}
    random = [
        [row.probability for row in together if (row.layer, row.of, row.order) == (n, of, "random")]
        for n in range(3)
        for of in "qk"
    ]
    assert all(curve == random[0] for curve in random)
    alone = deletion_test(model, [batch], of="k", layers=[-1], steps=3)
    assert alone == [row for row in together if (row.layer, row.of) == (2, "k")]


def test_insertion_starts_with_a_blur_and_not_with_nothing():
    """Brightness that a blur keeps is seen from the start."""
    images = torch.ones(2, 3, 20, 20)
    found = curves(deletion_test(Counter(), [(images, torch.zeros(2, dtype=torch.long))], of="k"))
    assert found["insertion", "random"][0] > YES - 1e-5
    assert np.isclose(found["deletion", "random"][-1], NO, atol=1e-5)


def test_a_map_that_is_wrong_fails_the_test():
    """Keys that are large where it is dark: hiding the highest first is then the slowest way."""
    found = curves(deletion_test(Counter(sign=-1.0), [pictures()], of="k"))
    assert found["deletion", "highest first"].mean() > found["deletion", "lowest first"].mean()


def test_images_and_batches_add_up_and_the_seed_decides():
    images, labels = pictures(6, bright=3)
    whole = deletion_test(Counter(), [(images, labels)], seed=3)
    assert whole == deletion_test(Counter(), [(images, labels)], seed=3)
    parts = deletion_test(Counter(), [(images[:4], labels[:4]), (images[4:], labels[4:])], seed=3)
    for order in ("highest first", "lowest first"):
        assert np.allclose(curves(whole)["deletion", order], curves(parts)["deletion", order], atol=1e-6)


def test_rows_become_a_curve_or_areas_by_layer(tmp_path):
    plot_deletion(deletion_test(Counter(), [pictures(2)], steps=2), tmp_path / "curve.png")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plot_deletion(deletion_test(deit(), [(images, torch.arange(2))], layers=None, steps=2), tmp_path / "layers.png")
    for name in ("curve.png", "layers.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_a_broken_image_is_named_and_left_out(tmp_path):
    for name in ("0", "1"):
        (tmp_path / "val" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (16, 16)).save(tmp_path / "val" / name / f"{i}.png")
    (tmp_path / "val" / "0" / "1.png").write_text("no image")
    subject, said = photo_model(deit(num_classes=2)), []
    batches = validation_batches(subject, tmp_path, images=4, batch=1, say=said.append)
    assert [labels.tolist() for _, labels in batches] == [[0], [1], [1]]
    assert "broken image, skipped (1 so far)" in said[0]
    (tmp_path / "val" / "0" / "0.png").write_text("no image")
    with pytest.raises(ValueError, match=r"none of the 1 images chosen from .* can be read"):
        validation_batches(subject, tmp_path, images=1)


def test_any_data_set_of_training_serves():
    pytest.importorskip("sklearn")
    subject = photo_model(deit(num_classes=10))
    batches = validation_batches(subject, "digits", images=5, size=16, batch=2)
    assert [len(labels) for _, labels in batches] == [2, 2, 1]
    assert batches[0][0].shape == (2, 3, 16, 16)
    named = photo_model(subject.model, classes=[f"{d}" for d in range(10)])
    assert len(validation_batches(replace(named, words={"0": "nought"}), "digits", images=2, size=16)) == 1
    with pytest.raises(ValueError, match="are not the 10 classes of digits"):
        validation_batches(replace(named, classes=[*"abcdefghij"]), "digits", images=2, size=16)
    subject.model.reset_classifier(11)
    with pytest.raises(ValueError, match=r"the 11 classes of .* are not the 10 classes of digits"):
        validation_batches(subject, "digits", images=5)
