"""The weights that come with the package on real photos: from a file to classes, maps and a deletion test."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sima_attn.explain import deletion_test, heatmap, load_photo_model, open_photo
from sima_attn.explain.answer import classify
from sima_attn.explain.deletion import MODES, ORDERS, DeletionRow, validation_batches
from sima_attn.explain.gallery import Gallery
from sima_attn.models.loading import DEFAULT
from sima_attn.models.pretrained import shipped_models
from sima_attn.report.rows import read_rows

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
CATS = {"tabby", "Egyptian cat", "Persian cat"}

pytestmark = pytest.mark.skipif(DEFAULT not in shipped_models(), reason="the weights are not in this copy")


@pytest.fixture(scope="module")
def subject():
    return load_photo_model()


@pytest.fixture(scope="module")
def chelsea():
    return Image.fromarray(pytest.importorskip("skimage.data").chelsea())


@pytest.fixture(scope="module")
def coffee():
    return Image.fromarray(pytest.importorskip("skimage.data").coffee())


def shared(path):
    if not (SHARED / path).exists():
        pytest.skip(f"{path} is not here")
    return SHARED / path


def test_it_is_the_default_and_its_classes_have_words(subject):
    assert (subject.name, subject.trained, subject.size) == (DEFAULT, True, 64)
    assert len(subject.classes) == 100
    assert subject.classes[0] == "n01443537"
    assert subject.class_name(0) == "goldfish"


def test_the_cat_is_a_cat(subject, chelsea):
    first, second = classify(subject, chelsea, 2).classes
    assert {first[0], second[0]} <= CATS
    assert first[1] + second[1] > 0.5


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("n01443537_goldfish", "goldfish"),
        ("n02099601_golden_retriever", "golden retriever"),
        ("n02165456_ladybug", "ladybug"),
        ("n03100240_convertible", "convertible"),
    ],
)
def test_photos_of_its_classes_are_known(subject, name, word):
    photo = open_photo(shared(f"photos/{name}.JPEG"))
    assert classify(subject, photo, 1).classes[0][0] == word


@pytest.mark.parametrize("of", ["q", "k"])
def test_maps_of_a_photo_are_maps_and_those_of_another_differ(subject, chelsea, coffee, of):
    one = heatmap(subject.model, chelsea, of=of)
    assert one.shape == (chelsea.height, chelsea.width)
    assert np.isfinite(one).all()
    assert (one.min(), one.max()) == (0, 1)
    assert one.std() > 0.05
    scores = [subject.read(photo.resize((64, 64))).layer(-1).scores(of).flatten() for photo in (chelsea, coffee)]
    assert float(torch.corrcoef(torch.stack(scores))[0, 1]) < 0.5


def test_the_map_is_of_the_photo_and_turns_with_it(subject, chelsea):
    """A model that was trained on mirrored photos marks the mirrored places."""
    square = chelsea.resize((64, 64))
    maps = [
        heatmap(subject.model, photo, of="k") for photo in (square, square.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    ]
    turned = np.corrcoef(maps[0].ravel(), maps[1][:, ::-1].ravel())[0, 1]
    as_it_is = np.corrcoef(maps[0].ravel(), maps[1].ravel())[0, 1]
    assert turned > 0.7
    assert turned > as_it_is + 0.2


def test_finer_maps_keep_the_class(subject, chelsea):
    """At twice the side token_ref keeps the attention at its scale; without it the cat is lost."""
    cats = [k for k in range(100) if subject.class_name(k) in CATS]
    fine = subject.read(chelsea, 128)
    with torch.no_grad():
        plain = subject.model(subject.prepare(chelsea, 128))
    share = [float(logits.softmax(1)[0, cats].sum()) for logits in (fine.output, plain)]
    assert share[0] > 0.5
    assert share[1] < share[0] / 2


def test_a_photo_becomes_a_picture(subject, chelsea, tmp_path):
    path = Gallery([subject]).write_one(chelsea, "chelsea", tmp_path / "heatmap.png")
    assert np.asarray(Image.open(path)).std() > 20


def test_data_of_its_classes_are_taken_by_the_deletion_test(subject):
    batches = validation_batches(subject, shared("tiny-imagenet-100"), images=4)
    rows = deletion_test(subject.model, batches, of="k", steps=2, name=subject.name)
    whole = {row.probability for row in rows if (row.mode, row.fraction) in {("deletion", 0.0), ("insertion", 1.0)}}
    assert len(whole) == 1  # the image as it is


def test_the_documentation_shows_the_committed_rows():
    rows = read_rows(ROOT / "benchmarks" / "results" / "deletion.csv", DeletionRow)
    areas = {(row.mode, row.order, row.of): row for row in rows if row.fraction == 0}
    assert {(row.model, row.images) for row in rows} == {(DEFAULT, 200)}
    page = (ROOT / "docs" / "heatmaps.md").read_text()
    shown = {
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in page.splitlines() if line[:1] == "|"
    }
    for mode in MODES:
        for order in ORDERS:
            cells = [mode, order]
            for of in ("q", "k"):
                row = areas[mode, order, of]
                over = "" if order == "random" else f"{row.over_random:+.3f} ± {row.error:.3f}"
                cells += [f"{row.area:.3f}", over]
            assert tuple(cells) in shown
    left = {
        (row.fraction, row.order): f"{row.probability:.3f}" for row in rows if (row.mode, row.of) == ("deletion", "k")
    }
    for number in (left[0.0, "random"], left[0.2, "highest first"], left[0.2, "lowest first"]):
        assert number in page
    assert f"{left[0.1, 'highest first']} against {left[0.1, 'random']} at a tenth" in page
