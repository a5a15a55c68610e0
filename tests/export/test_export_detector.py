"""`sima export` of a detector: the file finds the objects that torch finds, on any image of its size."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.detect import pyramid
from sima_attn.detect.rcnn import build_rcnn
from sima_attn.export import detector as exporting
from sima_attn.export.detector import export_detector, same_objects, to_input

pytest.importorskip("onnxruntime")
SIZE = 64


@pytest.fixture(scope="module", autouse=True)
def narrow_pyramid():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyramid, "CHANNELS", 32)
        yield


def photos():
    """Of different shapes and contents."""
    draw = np.random.default_rng(0)
    noise = Image.fromarray(draw.integers(0, 256, (50, 80, 3), dtype=np.uint8))
    return [noise, noise.rotate(90, expand=True), Image.new("RGB", (SIZE, SIZE), (200, 30, 30))]


def small_detector(name="sima_xcit_nano_12_p16_224", **options):
    torch.manual_seed(0)
    small = (
        {"depth": 1} if "cvt" not in name else {"embed_dims": (8, 16, 24), "depths": (1,) * 3, "num_heads": (1,) * 3}
    )
    sizes = {"side": SIZE, "longest": 2 * SIZE, "detections": 6, "proposals": 12, "score_threshold": 0.0}
    return build_rcnn(name, 2, **{**sizes, **small, **options}).eval()


@pytest.mark.parametrize(
    ("name", "masks"),
    [("sima_xcit_nano_12_p16_224", True), ("sima_deit_tiny_patch16_224", False), ("sima_cvt_13", False)],
)
def test_the_file_agrees_with_torch(tmp_path, name, masks):
    """Two of the images are not the example that was recorded. DeiT's position embeddings are resized before."""
    import onnx

    path = tmp_path / "detector.onnx"
    report = export_detector(
        small_detector(name, masks=masks), path, size=SIZE, classes=["a", "b"], images=photos(), name="small"
    )
    assert report.objects > 0
    assert report.images == 3
    assert report.outputs == ("boxes", "labels", "scores", "masks")[: 3 + masks]
    assert set(report.parity) == {"boxes", "scores", "masks"} - ({"masks"} if not masks else set())
    assert "parity with torch on" in report.lines()[-1]
    facts = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(facts["sima_attn.labels"]) == ["a", "b"]


def test_without_objects_the_file_returns_empty_outputs_and_the_report_says_so(tmp_path):
    import onnxruntime

    path = tmp_path / "detector.onnx"
    report = export_detector(
        small_detector(score_threshold=0.99), path, size=SIZE, classes=["a", "b"], images=photos(), name="x"
    )
    assert "no object on 3 images" in report.lines()[-1]
    session = onnxruntime.InferenceSession(path)
    outputs = session.run(None, {"image": to_input(photos()[0], SIZE).numpy()})
    assert [len(output) for output in outputs] == [0] * 4


def test_a_file_that_differs_is_not_written(tmp_path, monkeypatch):
    detector = small_detector(masks=False)
    monkeypatch.setattr(exporting, "LARGEST", {"boxes": -1.0, "scores": 1.0})
    with pytest.raises(ValueError, match="the boxes of the exported detector differ from torch"):
        export_detector(detector, tmp_path / "x.onnx", size=SIZE, classes=["a", "b"], images=photos(), name="x")
    assert not list(tmp_path.iterdir())


def test_objects_are_matched_in_any_order_and_missing_ones_are_an_error():
    boxes = torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]])
    expected = {"boxes": boxes, "labels": torch.tensor([1, 2]), "scores": torch.tensor([0.9, 0.8])}
    swapped = {name: value.flip(0) for name, value in expected.items()}
    assert same_objects(expected, swapped) == [(0, 1), (1, 0)]
    for other in ({name: value[:1] for name, value in expected.items()}, {**expected, "labels": torch.tensor([2, 2])}):
        with pytest.raises(ValueError, match="finds other objects than torch"):
            same_objects(expected, other)


def test_a_photo_is_fitted_at_the_top_left():
    image = to_input(Image.new("RGB", (100, 50), (255, 0, 0)), SIZE)
    assert image.shape == (3, SIZE, SIZE)
    assert image[0, :32].min() == 1
    assert image[:, 32:].max() == 0


def test_wrong_sizes_and_names_are_errors(tmp_path):
    for path, size, message in (("x.onnx", 100, "multiple of 32, got 100"), ("x.pb", 64, "must end in .onnx")):
        with pytest.raises(ValueError, match=message):
            export_detector(small_detector(), tmp_path / path, size=size, classes=[], images=[], name="x")


def test_options_of_classifiers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sima_attn.models.loading.is_detector", lambda what: True)
    out = ["--out", str(tmp_path / "x.onnx")]
    result = CliRunner().invoke(cli.app, ["export", "runs/x", *out, "--dynamic", "batch", "--preprocess"])
    assert "takes --size and --data only, got --dynamic, --preprocess" in str(result.exception)
