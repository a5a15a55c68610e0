"""A folder of `save_pretrained`, softmax or converted, in every command that takes a model."""

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from sima_attn import convert
from sima_attn.cli import app
from sima_attn.explain.photo_model import load_photo_model
from sima_attn.export.runtimes import open_model
from sima_attn.serve import analysis
from sima_attn.serve.limits import Limits
from transformers_models import HONORED, build, build_clip, image, outputs

pytest.importorskip("transformers")

CLASSIFIERS = ["vit_classifier", "vit_classifier_sima"]
BACKBONES = ["dinov2", "clip_sima", "siglip", "siglip_sima", "CLIP"]
every_folder = pytest.mark.parametrize("name", [*CLASSIFIERS, *BACKBONES])


def model_named(name):
    model = build_clip(name) if name == "CLIP" else build(HONORED, name.removesuffix("_sima"))
    if name.startswith("vit"):
        model.config.id2label = {0: "cat", 1: "dog"}
    if name.endswith("_sima"):
        convert(model)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    for name in (*CLASSIFIERS, *BACKBONES):
        model_named(name).save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for split, count in (("train", 18), ("val", 4)):
        for k, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 120, (40, 56, 3), dtype=np.uint8)
                pixels[..., k] += 100
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


def sima(*words):
    """The output of a command; its error is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@every_folder
def test_a_folder_is_audited_and_drawn(name, folders, photos, tmp_path):
    shown = sima("audit", folders / name)
    assert ("no exp() in attention" in shown) == name.endswith("_sima")
    photo = photos / "val" / "cat" / "0.png"
    sima("heatmap", photo, "--model", folders / name, "--out", tmp_path)
    sima("explain", "effect", photo, "--patch", "1,1", "--model", folders / name, "--out", tmp_path / "effect.png")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".png", ".png"]


@every_folder
def test_a_folder_is_exported_and_quantized(name, folders, photos, tmp_path):
    file = tmp_path / "model.onnx"
    shown = sima("export", folders / name, "--out", file, "--dynamic", "batch")
    session = open_model(file)
    found = [torch.from_numpy(one) for one in session.outputs(image().numpy())]
    assert "parity with torch" in shown
    if name in CLASSIFIERS:
        assert "output logits batchx2" in shown
        expected = [outputs(model_named(name), pixel_values=image())]
    else:
        assert "output features batchx32, tokens batchx" in shown
        with torch.no_grad():
            whole = model_named(name)
            out = getattr(whole, "vision_model", whole)(pixel_values=image())
        expected = [out.pooler_output, out.last_hidden_state]
    assert session.metadata["output"] == ("logits" if name in CLASSIFIERS else "features")
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    table = sima("quantize", file, "--data", photos, "--calibrate", "32")
    assert ("cosine" in table) == (name in BACKBONES)


@every_folder
def test_a_folder_is_probed(name, folders, photos, tmp_path):
    assert "k-NN of" in sima("knn", folders / name, "--data", photos, "-k", "3", "--cache", tmp_path)
    for features, channels in (("layers", 64 if name.startswith("siglip") else 96), ("output", 32)):
        options = ["--features", features, "--epochs", "1", "--cache", tmp_path]
        assert f"linear on {channels} channels" in sima("linear", folders / name, "--data", photos, *options)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_classifies(name, folders, photos):
    shown = sima("classify", photos / "val" / "cat" / "0.png", "--model", folders / name)
    assert "cat" in shown
    assert "dog" in shown
    assert "confusion matrix" in sima("eval", folders / name, "--data", photos)


@pytest.mark.parametrize("name", ["dinov2", "CLIP"])
def test_features_are_not_taken_for_classes(name, folders, photos):
    with pytest.raises(ValueError, match=f"{name} gives features: .* give a folder of them with --data"):
        sima("classify", photos / "val" / "cat" / "0.png", "--model", folders / name)
    message = f"{name} gives features and has no classes: classify its features with `sima knn`"
    with pytest.raises(ValueError, match=message):
        sima("eval", folders / name, "--data", photos)
    with pytest.raises(ValueError, match=message):
        sima("explain", "deletion", "--data", photos, "--model", folders / name)


@every_folder
def test_the_page_shows_a_folder(name, folders, photos, monkeypatch):
    monkeypatch.setattr(analysis, "TIMED_SECONDS", 0.0)
    analyzer = analysis.Analyzer(load_photo_model(folders / name), Limits())
    photo = Image.open(photos / "val" / "cat" / "0.png")
    answer = analyzer.analyze(analyzer.prepare(photo))
    assert sorted(guess.name for guess in answer.guesses) == (["cat", "dog"] if name in CLASSIFIERS else [])
    assert len(answer.layers) == 2
    assert analyzer.effect(photo, 0, 1, 1).negative_share <= 1.0
    assert analyzer.times(photo, 32).softmax_ms > 0


def test_the_softmax_twin_of_a_converted_model_is_the_softmax_model():
    twin = analysis.softmax_twin(model_named("vit_classifier_sima"))
    with torch.no_grad():
        assert torch.allclose(twin(image()).logits, model_named("vit_classifier")(image()).logits, atol=1e-5)
