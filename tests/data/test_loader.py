"""Order and augmentation are functions of (seed, step); broken images are reported and replaced."""

import random
import tempfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributed

import forked
from sima_attn.data.cache import Cache, augmented
from sima_attn.data.loader import (
    BrokenImages,
    Share,
    batch_indices,
    epoch_order,
    evaluation_batches,
    most_broken,
    training_batches,
    training_transform,
)
from sima_attn.data.settings import Augment
from sima_attn.data.splits import open_data
from sima_attn.models.loading import load_model
from sima_attn.train.classify import train_classifier
from sima_attn.train.evaluate import evaluate
from sima_attn.train.logs import read_log
from small_runs import ALL_ON, class_folders, small_recipe

CPU = torch.device("cpu")


def test_an_epoch_has_every_sample_once_and_another_order_each_time(any_format):
    source = open_data(any_format)
    first, second = epoch_order(source, 0, 0), epoch_order(source, 0, 1)
    assert sorted(first) == sorted(second) == list(range(len(source)))
    assert first.tolist() != second.tolist()
    assert first.tolist() == epoch_order(source, 0, 0).tolist()
    assert first.tolist() != epoch_order(source, 1, 0).tolist()


def test_repeats_come_in_a_row_and_keep_the_length(folders):
    order = epoch_order(open_data(folders), 0, 0, repeats=3)
    assert len(order) == 24
    assert len(set(order)) == 8
    assert (order.reshape(8, 3) == order.reshape(8, 3)[:, :1]).all()


def test_processes_and_parts_together_take_what_one_would(folders):
    source = open_data(folders)

    def steps(share):
        flat = [indices for *_, indices in batch_indices(source, share, 0, start=1, stop=7)]
        return [set(np.concatenate(flat[i : i + share.accumulate])) for i in range(0, len(flat), share.accumulate)]

    whole = steps(Share(8))
    assert len(whole) == 6
    assert steps(Share(8, accumulate=4)) == whole
    parts = [steps(Share(8, rank, world=2, accumulate=2)) for rank in (0, 1)]
    assert [a | b for a, b in zip(*parts, strict=True)] == whole
    assert all(not a & b for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_a_step_on_are_those_of_the_whole_run(folders, workers):
    """Random augmentation and all: what a run that goes on sees, whatever the number of workers."""
    source, recipe = open_data(folders), small_recipe(augment=ALL_ON)

    def batches(start, workers):
        settings = small_recipe(augment=ALL_ON, data={"workers": workers}).data
        options = {"start": start, "stop": 5, "device": CPU, "broken": BrokenImages(source)}
        return list(training_batches(source, Share(8), settings, recipe.augment, 0, **options))

    whole = batches(0, 0)
    assert len(whole) == 5
    for (images, labels), (x, y) in zip(whole[3:], batches(3, workers), strict=True):
        assert torch.equal(images, x)
        assert torch.equal(labels, y)
    assert not torch.equal(whole[0].images, whole[3].images)


@pytest.mark.timeout(30)  # what used to happen is that nothing did
def test_workers_run_where_the_temporary_folder_has_a_long_path(folders, tmp_path, monkeypatch):
    long = tmp_path / ("long" * 40)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    source, data = open_data(folders, "val"), small_recipe(data={"workers": 1}).data
    batches = evaluation_batches(source, data, 5, device=CPU, broken=BrokenImages(source))
    assert sum(len(labels) for _, labels in batches) == 12
    assert tempfile.gettempdir() == str(long)  # of this process


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "rand-m0"])
def test_posterize_keeps_a_bit_whatever_the_noise(policy):
    """timm asks for 0 bits at either end of the magnitudes, Pillow takes 1 to 8."""
    step = training_transform(small_recipe().data, Augment(randaugment=policy)).transforms[1].transforms[0]
    ops = [op for op in step.ops if op.name.startswith("Posterize")]
    assert ops
    random.seed(0)
    gray = Image.linear_gradient("L").resize((16, 16))
    kept = {len(set(op(gray).tobytes())) for op in ops for _ in range(3000)}
    assert 2 in kept  # shades: one bit of them
    assert min(kept) == 2


@pytest.mark.parametrize("crop_ratio", [1.0, 0.875, 0.5])
@pytest.mark.parametrize("size", [12, 20])  # 20 / 0.875 = 22.9: timm rounds the shorter side down
def test_the_cache_holds_what_evaluation_reads(folders, size, crop_ratio):
    source = open_data(folders, "val")
    data = small_recipe(data={"size": size, "crop_ratio": crop_ratio}).data
    cache = Cache(source, data, CPU, broken=BrokenImages(source))
    cached = torch.cat([x for x, _ in cache.evaluation_batches(5)])
    read = torch.cat([x for x, _ in evaluation_batches(source, data, 5, device=CPU, broken=BrokenImages(source))])
    assert len(read) == 12
    assert torch.allclose(cached, read, atol=1e-5)


def test_a_larger_cache_keeps_what_a_crop_enlarges(tmp_path):
    """A fine checkerboard is gray at the size of the model, and its crops from a larger cache are not."""
    pixels = np.kron(np.indices((16, 16)).sum(0) % 2, np.ones((2, 2))) * 255
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(pixels.astype(np.uint8)).convert("RGB").save(tmp_path / split / "a" / "0.png")
    source, augment = open_data(tmp_path), Augment(scale=(0.25, 0.25), flip=0.0)
    spread = {}
    for side in (8, 32):
        data = small_recipe(data={"size": 8, "crop_ratio": 1.0, "cache": True, "cache_size": side}).data
        cache = Cache(source, data, CPU, side=data.cache_size, broken=BrokenImages(source))
        (batch,) = cache.batches(Share(1), 0, start=0, stop=1)
        crop, whole = augmented(batch, data, augment).images, next(cache.evaluation_batches(1)).images
        assert crop.shape == whole.shape == (1, 3, 8, 8)
        assert whole.std() < 0.2
        spread[side] = crop.std().item()
    assert spread[32] > 4 * spread[8]


def break_images(folders, count, split="train"):
    files = sorted((folders / split).rglob("*.png"))[:count]
    for path in files:
        path.write_bytes(path.read_bytes()[:40])
    return files


@pytest.mark.parametrize("cached", [False, True])
def test_a_broken_image_is_named_once_and_another_takes_its_place(tmp_path, cached):
    folders = class_folders(tmp_path / "many", per_class=(101, 1), classes=("a", "b"))
    (path,) = break_images(folders, 1)
    source, said = open_data(folders), []
    broken = BrokenImages(source, said.append)
    settings = small_recipe().data
    if cached:
        batches = list(Cache(source, settings, CPU, broken=broken).batches(Share(50), 0, start=0, stop=8))
    else:
        options = {"start": 0, "stop": 8, "device": CPU, "broken": broken}
        batches = list(training_batches(source, Share(50), settings, Augment(crop="none"), 0, **options))
    assert all(len(labels) == 50 for _, labels in batches)
    assert len(said) == 1
    assert f"{path}: it is not an image, or its beginning is damaged" in said[0]


def test_evaluation_leaves_a_broken_image_out(tmp_path):
    folders = class_folders(tmp_path / "many", per_class=(1, 101), classes=("a",))
    break_images(folders, 1, "val")
    source = open_data(folders, "val")
    data, said = small_recipe().data, []
    read = evaluation_batches(source, data, 50, device=CPU, broken=BrokenImages(source, said.append))
    assert sum(len(labels) for _, labels in read) == 100
    cache = Cache(source, data, CPU, broken=BrokenImages(source, said.append))
    assert sum(len(labels) for _, labels in cache.evaluation_batches(50)) == 100


def test_a_data_set_without_a_readable_image_is_an_error(folders):
    """Each image is tried once, and the loop over replacements ends."""
    break_images(folders, 24)
    source, data = open_data(folders), small_recipe().data
    batches = training_batches(
        source, Share(8), data, Augment(), 0, start=0, stop=1, device=CPU, broken=BrokenImages(source)
    )
    with pytest.raises(ValueError, match=r"24 images in a row cannot be read, the first ones: .*\.png"):
        next(batches)


def test_too_many_broken_images_are_an_error(folders):
    break_images(folders, 6)
    source = open_data(folders)
    with pytest.raises(ValueError, match=r"6 of 24 .* more than the 5 that are skipped.*; remove or repair"):
        Cache(source, small_recipe().data, CPU, broken=BrokenImages(source, lambda line: None))
    assert [most_broken(images) for images in (1, 2, 7, 10, 499, 600, 12_345)] == [0, 1, 3, 5, 5, 6, 123]


def test_two_processes_name_broken_images_and_evaluate_what_is_saved(tmp_path):
    """gloo. The second process finds the images, and shows nothing itself; its BatchNorm has seen others."""
    folders = class_folders(tmp_path / "many", per_class=(52, 51), classes=("a", "b"))
    train, val = open_data(folders), open_data(folders, "val")
    _, _, second = next(batch_indices(train, Share(52, 1, 2), 0, start=0, stop=1))
    paths = [train.files[second[5]], val.files[1]]  # val images go to the processes in turn
    for path in paths:
        path.write_bytes(b"broken")
    xcit = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = {"name": "sima_xcit_nano_12_p16_224", "kwargs": xcit}
    recipe = small_recipe(folders, epochs=1, model=model, run={"batch": 52, "ema": 0.5})
    log = tmp_path / "log"
    assert forked.train_in_two(log, train_classifier, recipe, tmp_path / "run") == [0, 0], log.read_text()
    said = [line for line in log.read_text().splitlines() if line.startswith("broken image")]
    assert [line.split(": ")[1] for line in said] == [str(path) for path in paths], log.read_text()
    logged = read_log(tmp_path / "run" / "eval.csv")[-1]
    for ema, name in ((False, "loss"), (True, "ema_loss")):
        alone = evaluate(load_model(tmp_path / "run", branch="ema" if ema else None), say=said.append)
        assert float(logged[name]) == pytest.approx(alone.loss, rel=2e-6)


def test_the_broken_images_of_all_processes_count_together(tmp_path, monkeypatch):
    """One of 3 images is within what is skipped, the two together are not."""
    source = open_data(class_folders(tmp_path / "many", per_class=(3, 1), classes=("a",)))
    said = []
    broken = BrokenImages(source, said.append)
    broken.add([0])
    broken.gather()  # alone

    def gather(parts, mine):
        parts[:] = [mine, theirs]

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather_object", gather)
    theirs = [0]
    broken.gather()
    assert len(said) == 1
    theirs = [2]
    with pytest.raises(ValueError, match=r"2 of 3 images cannot be read, more than the 1 that are skipped"):
        broken.gather()
    assert [line.split(": ")[1] for line in said] == [source.name(0), source.name(2)]


def test_a_batch_that_does_not_fit_is_an_error(folders):
    with pytest.raises(ValueError, match=r"make it a multiple of 6"):
        Share(8, world=3, accumulate=2)
    with pytest.raises(ValueError, match=r"24 training images, fewer than run\.batch=32"):
        next(batch_indices(open_data(folders), Share(32), 0, start=0, stop=1))
