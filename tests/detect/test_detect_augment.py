"""Augmentation of detection images: image, boxes and masks stay together."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from sima_attn.detect.augment import Augment

KEEP = Augment(flip=0.0, crop=0.0, sides=(40, 40), longest=60)  # the size of the sample


def sample():
    """A box of ones in the image, its mask and its box."""
    image = torch.zeros(3, 40, 60, dtype=torch.uint8)
    image[:, 10:30, 20:50] = 200
    target = {"boxes": torch.tensor([[20.0, 10, 50, 30]]), "labels": torch.tensor([1]), "masks": (image[:1] > 0).byte()}
    return image, target


def extent(pixels):
    rows, columns = np.nonzero(pixels.numpy())
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def assert_box_fits(image, target, slack=0.0):
    (box,) = target["boxes"].tolist()
    assert box == pytest.approx(extent(image[0] > 100), abs=slack)
    assert box == pytest.approx(extent(target["masks"][0]), abs=slack)


def test_the_assertion_fails_for_a_box_that_does_not_fit():
    image, target = sample()
    assert_box_fits(image, target)
    with pytest.raises(AssertionError):
        assert_box_fits(image, {**target, "boxes": target["boxes"] + 1})
    with pytest.raises(AssertionError):
        assert_box_fits(image.flip(2), target)


@pytest.mark.parametrize(
    ("changes", "box"),
    [
        ({}, [20, 10, 50, 30]),
        ({"flip": 1.0}, [10, 10, 40, 30]),
        ({"sides": (80, 80), "longest": 120}, [40, 20, 100, 60]),
        ({"sides": (80, 80), "longest": 90}, [30, 15, 75, 45]),
    ],
)
def test_image_box_and_mask_move_together(changes, box):
    image, target = replace(KEEP, **changes)(*sample())
    assert_box_fits(image, target)
    assert target["boxes"].tolist() == [box]
    assert type(image) is type(target["boxes"]) is type(target["masks"]) is torch.Tensor


def test_sizes_are_those_of_the_recipe_and_the_longer_side_has_a_limit():
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        image, target = Augment(crop=0.0, sides=(64, 128), longest=150)(*sample())
        assert_box_fits(image, target, slack=1.0)
        seen.add(tuple(image.shape[1:]))
    assert seen == {(64, 96), (96, 144), (100, 150)}


def test_crops_cut_objects_at_the_border_and_drop_those_outside():
    """Masks stay sharp: 200 is the only value beside 0, also where a crop is resized."""
    augment = Augment(flip=0.0, crop=1.0, crop_sides=(40, 40), crop_size=(12, 40), sides=(64, 64), longest=10_000)
    image, target = sample()
    counts = set()
    for seed in range(60):
        torch.manual_seed(seed)
        cropped, found = augment(image, {**target, "masks": image[:1]})
        assert min(cropped.shape[1:]) == 64
        assert max(cropped.shape[1:]) <= 64 * 40 / 12 + 1
        assert len(found["boxes"]) == len(found["labels"]) == len(found["masks"])
        assert set(found["masks"].unique().tolist()) <= {0, 200}
        counts.add(len(found["labels"]))
        if len(found["labels"]):
            assert_box_fits(cropped, found, slack=4.0)
    assert counts == {0, 1}


def test_an_image_without_objects_is_augmented():
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "masks": torch.zeros(0, 40, 60).byte()}
    for crop in (0.0, 1.0):
        _, target = Augment(crop=crop, crop_sides=(40, 40), crop_size=(20, 20), sides=(64, 64))(sample()[0], empty)
        assert target["boxes"].shape == (0, 4)
        assert target["masks"].shape[0] == 0
        assert target["masks"].shape[1] == 64


def test_a_very_long_image_stays_small_before_it_is_cropped(monkeypatch):
    made, resize = [], F.resize

    def watched(x, size, **options):
        made.append(max(size))
        return resize(x, size, **options)

    monkeypatch.setattr(F, "resize", watched)
    target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "masks": torch.zeros(0, 5, 500)}
    Augment(crop=1.0, sides=(32, 32), longest=64, crop_sides=(20, 20), crop_size=(8, 20))(
        torch.zeros(3, 5, 500).byte(), target
    )
    assert made[0] == 200  # ten times the side, not a hundred times
