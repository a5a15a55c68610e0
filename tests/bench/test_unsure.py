"""benchmarks/unsure.py: what its thresholds accept, which one it chooses, and where it writes it."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from sima_attn.models import pretrained
from sima_attn.models.loading import DEFAULT, load_model
from sima_attn.models.pretrained import read_card, shipped_models, weights_file
from sima_attn.report.rows import read_rows
from unsure import SCORES, UnsureRow, best, logits_of, measure, store, unsure_table

pytestmark = pytest.mark.skipif(DEFAULT not in shipped_models(), reason="the weights are not in this copy")


@pytest.fixture(scope="module")
def loaded():
    return load_model()


def logits(count, strength, seed):
    """Logits of `count` images whose class k % 10 stands out."""
    noise = torch.randn(count, 10, generator=torch.Generator().manual_seed(seed))
    return noise + strength * torch.eye(10)[torch.arange(count) % 10]


def test_thresholds_separate_what_can_be_separated(loaded):
    known, labels = logits(400, 12.0, 0), torch.arange(400) % 10
    rows = measure(loaded, known, labels, logits(300, 0.0, 1), logits(200, 12.0, 2))
    assert {row.score for row in rows} == set(SCORES)
    for score in SCORES:
        chosen = best(rows, score)
        assert chosen.auroc > 0.99
        assert chosen.known >= 90
        assert chosen.others <= 2
        assert chosen.more > 85  # as surely of a class as the known ones
        assert chosen.top1 > 99
    assert 0.5 < best(rows, "probability").threshold < 1
    assert len(unsure_table(rows).lines) == len(SCORES)


def test_nothing_is_gained_where_nothing_can_be_separated(loaded):
    known = logits(400, 0.0, 0)
    rows = measure(loaded, known, torch.arange(400) % 10, known, known)
    for row in rows:
        assert row.known == row.others == row.more
        assert row.auroc == pytest.approx(0.5, abs=0.01)


def test_logits_are_those_of_the_model(loaded):
    photo = Image.linear_gradient("L").convert("RGB")
    both = logits_of(loaded, 2, lambda i: photo.rotate(90 * i), "photos")
    assert both.shape == (2, 100)
    assert not torch.equal(both[0], both[1])


def test_the_threshold_goes_into_the_card_and_the_weights_stay(tmp_path, monkeypatch, loaded):
    before = load_model().model.state_dict()
    copy = tmp_path / weights_file(DEFAULT).name
    copy.write_bytes(weights_file(DEFAULT).read_bytes())
    monkeypatch.setattr(pretrained, "WEIGHTS", tmp_path)
    store(DEFAULT, 0.25)
    assert read_card(copy).unsure_below == 0.25
    again = load_model()
    assert again.unsure_below == 0.25
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.model.state_dict().items())


def test_the_stored_threshold_is_the_measured_one():
    rows = read_rows(Path(__file__).parents[2] / "benchmarks/results/unsure.csv", UnsureRow)
    assert read_card(weights_file(DEFAULT)).unsure_below == round(best(rows, "probability").threshold, 2)
    assert load_model(DEFAULT, pretrained=False).unsure_below is None
