"""Augmentation of whole batches."""

import torch

from sima_attn.data.augment import crop_and_flip, erase, jitter_colors
from sima_attn.data.settings import Augment


def test_a_shift_moves_whole_pixels_and_nothing_else():
    images = torch.rand(64, 3, 9, 9)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    shifts = set()
    for image, around, out in zip(
        images, padded, crop_and_flip(images, Augment(crop="padded", padding=2, flip=0.0), 9), strict=True
    ):
        found = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.allclose(around[:, y : y + 9, x : x + 9], out, atol=1e-4)
        ]
        assert len(found) == 1
        shifts |= set(found)
        assert image.shape == out.shape
    assert len(shifts) > 15


def test_a_certain_flip_is_the_mirror_image_and_no_crop_is_the_image():
    images = torch.rand(4, 3, 8, 8)
    assert torch.allclose(crop_and_flip(images, Augment(crop="none", flip=1.0), 8), images.flip(3), atol=1e-5)
    assert torch.equal(crop_and_flip(images, Augment(crop="none", flip=0.0), 8), images)
    whole = Augment(crop="resized", scale=(1.0, 1.0), flip=0.0)
    assert torch.allclose(crop_and_flip(torch.ones(4, 3, 8, 8), whole, 8), torch.ones(4, 3, 8, 8), atol=1e-5)


def test_a_random_crop_of_a_ramp_stays_within_it():
    ramp = torch.linspace(0, 1, 16).expand(32, 3, 16, 16).contiguous()
    out = crop_and_flip(ramp, Augment(crop="resized", scale=(0.1, 0.5), flip=0.0), 16)
    spread = out[:, 0, 8, -2] - out[:, 0, 8, 1]
    assert (spread > 0).all()
    assert (spread < 0.95).all()
    assert spread.std() > 0.01


def test_erasing_fills_one_box_an_image_with_noise():
    images = torch.full((200, 3, 16, 16), 7.0)
    changed = (erase(images, 1.0) != 7).all(1)  # [B, S, S]
    share = changed.float().mean((1, 2))
    assert share.min() > 0
    assert 0.1 < share.mean() < 0.3
    boxes = changed.any(2).sum(1) * changed.any(1).sum(1)
    assert torch.equal(boxes, changed.sum((1, 2)))
    assert torch.equal(erase(images, 0.0), images)


def test_jitter_leaves_the_range_and_no_strength_the_image():
    images = torch.rand(16, 3, 8, 8)
    out = jitter_colors(images, 0.4, 0.4, 0.4)
    assert (out >= 0).all()
    assert (out <= 1).all()
    assert not torch.allclose(out, images)
    assert torch.allclose(jitter_colors(images, 0.0, 0.0, 0.0), images, atol=1e-6)
