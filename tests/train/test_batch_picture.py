"""batch.png: the first batch as the model gets it, without any effect on the run."""

import numpy as np
import pytest
import torch
from PIL import Image

from sima_attn.data.cache import denormalize, normalize
from sima_attn.data.loader import Batch
from sima_attn.data.settings import Data
from sima_attn.data.splits import open_data
from sima_attn.report.drawing import MARGIN
from sima_attn.train.batch_picture import CELL, COLUMNS, draw_labeled, label_captions, to_pictures
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import Classification, create_mixup, mixed, train_classifier
from small_runs import ALL_ON, class_folders, small_recipe

NAMES = ["cat", "dog", "owl"]


@pytest.fixture
def data(tmp_path):
    return class_folders(tmp_path / "data")


@pytest.mark.parametrize("cache", [False, True], ids=["workers", "device cache"])
def test_a_run_with_the_picture_has_the_weights_of_one_without(data, tmp_path, monkeypatch, cache):
    """Mixup and drop path draw random numbers before and after it."""
    augment = {**ALL_ON, "randaugment": None}
    recipe = small_recipe(data, augment=augment, data={"cache": cache}, model={"drop_path": 0.2}, epochs=1)
    train_classifier(recipe, tmp_path / "with", device="cpu", quiet=True)
    assert (tmp_path / "with" / "batch.png").is_file()
    monkeypatch.setattr(Classification, "draw_batch", lambda *arguments: None)
    train_classifier(recipe, tmp_path / "without", device="cpu", quiet=True)
    assert not (tmp_path / "without" / "batch.png").exists()
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]


def test_it_is_drawn_once_at_the_first_step(data, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Classification, "draw_batch", lambda self, batch, path: drawn.append((batch, path)))
    recipe = small_recipe(data, run={"accumulate": 2, "checkpoint_steps": 1}, epochs=1)
    train_classifier(recipe, tmp_path / "run", device="cpu", quiet=True)
    (newest,) = (path for path in (tmp_path / "run" / "checkpoints").iterdir() if "3" in path.name)
    newest.unlink()
    assert load_newest(tmp_path / "run" / "checkpoints")["step"] == 2
    train_classifier(recipe, tmp_path / "run", resume=True, device="cpu", quiet=True)
    ((batch, path),) = drawn
    assert path == tmp_path / "run" / "batch.png"
    assert batch.images.shape == (4, 3, 16, 16)


def test_pictures_show_the_pixels_of_normalized_images():
    data = Data("", size=8)
    pixels = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    images = normalize(pixels.float() / 255, data)
    for picture, wanted in zip(to_pictures(images, data), pixels, strict=True):
        assert np.array_equal(np.asarray(picture), wanted.permute(1, 2, 0).numpy())
    assert denormalize(images * 100, data).min() == 0  # random erasing leaves the range
    assert denormalize(images * 100, data).max() == 1


def test_a_caption_has_the_class_or_the_shares_that_were_mixed():
    labels = torch.tensor([0, 2, 1, 0])
    assert label_captions(labels, NAMES, 0.1) == ["cat", "owl", "dog", "cat"]
    soft = torch.tensor([[0.7, 0.3, 0.0], [0.25, 0.0, 0.75], [0.0, 1.0, 0.0], [0.999, 0.001, 0.0]])
    for smoothing in (0.0, 0.1):
        smoothed = soft * (1 - smoothing) + smoothing / 3
        assert label_captions(smoothed, NAMES, smoothing) == [
            "cat 70%\ndog 30%",
            "owl 75%\ncat 25%",
            "dog 100%",
            "cat 100%",
        ]
    assert label_captions(torch.ones(1, 1), ["cat"], 0.0) == ["cat 100%"]


def test_shares_are_those_that_mixup_draws():
    recipe = small_recipe(augment={"mixup": 0.8, "smoothing": 0.1})
    np.random.seed(0)
    _, soft = mixed(Batch(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])), create_mixup(recipe.augment, 3, 2))
    part = round(100 * float((soft[0, 0] - 0.1 / 3) / 0.9))
    expected = sorted([(part, "cat"), (100 - part, "dog")], reverse=True)
    assert label_captions(soft, NAMES, 0.1)[0] == "\n".join(f"{name} {share}%" for share, name in expected)


def test_the_sheet_has_the_images_in_order_and_the_words_of_the_classes(data, tmp_path, monkeypatch):
    """Images of one color each, more than fit."""
    (data / "classes.txt").write_text("cat\ttabby, house cat\ndog\towl\nowl\n")
    settings = Data(str(data), size=8)
    levels = torch.arange(40).view(40, 1, 1, 1).expand(40, 3, 8, 8) * 6 / 255
    captions = []
    monkeypatch.setattr(
        "sima_attn.train.batch_picture.label_captions",
        lambda labels, names, smoothing: captions.append(names) or [names[k] for k in labels.tolist()],
    )
    batch = Batch(normalize(levels, settings), torch.zeros(40, dtype=torch.long))
    draw_labeled(tmp_path / "batch.png", batch, open_data(data), settings)
    assert captions == [["tabby", "owl", "owl"]]
    page = np.asarray(Image.open(tmp_path / "batch.png").convert("L")).astype(int)
    middle = MARGIN + CELL // 2
    row = next(y for y in range(len(page)) if page[y, middle] == 0)  # the first image is black
    shades = [
        page[row + CELL // 2, middle + column * (page.shape[1] - 2 * MARGIN - CELL) // (COLUMNS - 1)]
        for column in range(COLUMNS)
    ]
    assert shades == [6 * index for index in range(COLUMNS)]


def test_unlabeled_images_have_no_caption(tmp_path):
    for index in range(3):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / f"{index}.png")
    (tmp_path / "train").mkdir()
    for file in tmp_path.glob("*.png"):
        file.rename(tmp_path / "train" / file.name)
    source = open_data(tmp_path, labeled=False)
    batch = Batch(torch.zeros(3, 3, 8, 8), torch.zeros(3, dtype=torch.long))
    draw_labeled(tmp_path / "batch.png", batch, source, Data(str(tmp_path), size=8))
    assert Image.open(tmp_path / "batch.png").size[0] > 3 * CELL
