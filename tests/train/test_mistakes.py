"""The most confident mistakes, the accuracy of each class as a figure, and learning curves."""

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from sima_attn.cli import app
from sima_attn.data.loader import Batch
from sima_attn.train.classify import train_classifier
from sima_attn.train.curves import MOST_CURVES, metric_panels, plot_learning_curve
from sima_attn.train.mistakes import MOST, most_confident
from small_runs import class_folders, picture, small_recipe


def test_the_most_confident_mistakes_are_kept_over_all_batches():
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(90, 4), torch.randint(0, 4, (90,))
    images = torch.arange(90.0).view(90, 1, 1, 1).expand(90, 3, 2, 2)
    kept = []
    for part in torch.arange(90).split(25):
        kept = most_confident(kept, Batch(images[part], labels[part]), logits[part])
    probabilities, predicted = logits.softmax(1).max(1)
    wrong = (predicted != labels).nonzero()[:, 0]
    expected = sorted(wrong.tolist(), key=lambda i: -probabilities[i])[:MOST]
    assert [int(mistake.image[0, 0, 0]) for mistake in kept] == expected
    for mistake, i in zip(kept, expected, strict=True):
        assert (mistake.label, mistake.predicted) == (labels[i], predicted[i])
        assert mistake.probability == pytest.approx(float(probabilities[i]))


def test_right_answers_are_no_mistakes():
    batch = Batch(torch.zeros(3, 3, 2, 2), torch.tensor([0, 1, 2]))
    assert most_confident([], batch, torch.eye(3)) == []


def test_eval_draws_mistakes_and_classes_of_the_test_images(tmp_path):
    data = class_folders(tmp_path / "data")
    for k, name in enumerate(("cat", "dog", "owl")):
        (data / "test" / name).mkdir(parents=True)
        for i in range(2):
            picture(1000 + 10 * k + i).save(data / "test" / name / f"{i}.png")
    train_classifier(small_recipe(data, epochs=1), tmp_path / "run", device="cpu", quiet=True)
    files = [tmp_path / "mistakes.png", tmp_path / "classes.png"]
    command = ["eval", str(tmp_path / "run"), "--split", "test", "--device", "cpu"]
    result = CliRunner().invoke(app, [*command, "--mistakes", str(files[0]), "--figure", str(files[1])])
    assert result.exit_code == 0, result.output
    assert "test/" in result.output
    for file in files:
        assert Image.open(file).size[0] > 200
    result = CliRunner().invoke(app, [*command, "--mistakes", str(tmp_path / "mistakes.jpg")])
    assert result.exit_code != 0
    assert not (tmp_path / "mistakes.jpg").exists()


def test_panels_have_few_curves_and_one_scale():
    values = {"loss": [1.0], "top1": [40.0], "top5": [80.0], "ema_top1": [41.0], "cosine": [0.9]}
    assert metric_panels(values) == [["top1", "top5"], ["cosine"]]
    many = {f"AP{i}": [10.0 + i] for i in range(MOST_CURVES + 2)}
    assert [len(panel) for panel in metric_panels(many)] == [MOST_CURVES, 2]
    kinds = [[f"{kind}_{ap}" for ap in ("ap", "ap50", "ap75")] for kind in ("box", "mask")]
    assert metric_panels({name: [50.0] for kind in kinds for name in kind}) == kinds
    assert metric_panels({}) == []


def test_one_evaluation_is_drawn_as_a_marker(tmp_path, monkeypatch):
    """The page has marks of the curve's color inside its axes, at a whole epoch."""
    ticks, savefig = [], Figure.savefig

    def keep_ticks(self, *arguments, **options):
        savefig(self, *arguments, **options)
        ticks.append([axes.get_xticks().tolist() for axes in self.axes])

    monkeypatch.setattr(Figure, "savefig", keep_ticks)
    (tmp_path / "eval.csv").write_text("step,epoch,top1,loss\n3,1.0,40,1.5\n")
    plot_learning_curve(tmp_path, tmp_path / "curve.png", "title")
    pixels = Image.open(tmp_path / "curve.png").convert("RGB")
    crimson = sum(count for count, color in pixels.getcolors(1 << 24) if color == (220, 20, 60))
    (tmp_path / "eval.csv").write_text("step,epoch,top1\n3,1.0,40\n")
    plot_learning_curve(tmp_path, tmp_path / "none.png", "title")
    assert crimson > 20
    assert all(tick % 1 == 0 for panels in ticks for panel in panels for tick in panel)
    none = Image.open(tmp_path / "none.png").convert("RGB")
    assert not any(color == (220, 20, 60) for _, color in none.getcolors(1 << 24))


@pytest.mark.parametrize(("kept", "label"), [(2.0, "top1: kept 60"), (3.0, "top1: final 50"), (None, "top1: final 50")])
def test_the_kept_weights_are_marked(tmp_path, monkeypatch, kept, label):
    labels, savefig = [], Figure.savefig

    def keep_labels(self, *arguments, **options):
        savefig(self, *arguments, **options)
        labels.extend(text.get_text() for text in self.axes[1].get_legend().get_texts())

    monkeypatch.setattr(Figure, "savefig", keep_labels)
    rows = "".join(f"{step},{step}.0,{top1},1.5\n" for step, top1 in ((1, 40), (2, 60), (3, 50)))
    (tmp_path / "eval.csv").write_text("step,epoch,top1,loss\n" + rows)
    plot_learning_curve(tmp_path, tmp_path / "curve.png", "title", kept)
    assert labels == [label, *["kept weights"] * (kept == 2.0)]


def test_a_run_without_an_evaluation_has_no_mark(tmp_path):
    (tmp_path / "train.csv").write_text("step,epoch,loss\n1,0.5,2.0\n2,1.0,1.0\n")
    plot_learning_curve(tmp_path, tmp_path / "curve.png", "title", 1.0)
    assert (tmp_path / "curve.png").is_file()
