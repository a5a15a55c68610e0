"""The page of a detector: the server finds the objects and draws them."""

import base64
import io

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.detect.predict import detect
from sima_attn.serve.app import create_app
from small_detectors import CLASSES, small_detector


@pytest.fixture(scope="module", params=[True, False], ids=["masks", "boxes"])
def detector(request):
    return small_detector(masks=request.param)


@pytest.fixture(scope="module")
def client(detector):
    with TestClient(create_app(detector), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="module")
def photo():
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_the_answer_has_the_objects_of_the_detector_and_a_picture_of_them(client, detector, photo):
    answer = client.post("/api/detect?threshold=0", content=png(photo)).json()
    expected = detect(detector.model, photo, 0.0)
    assert len(answer["objects"]) == len(expected.boxes) > 0
    assert [found["score"] for found in answer["objects"]] == pytest.approx(expected.scores.tolist(), abs=1e-4)
    assert np.allclose([found["box"] for found in answer["objects"]], expected.boxes, atol=0.1)
    assert {found["name"] for found in answer["objects"]} <= set(CLASSES)
    picture = Image.open(io.BytesIO(base64.b64decode(answer["picture"])))
    assert picture.format == "JPEG"
    assert picture.size == photo.size == (answer["width"], answer["height"])


def test_a_threshold_above_all_scores_leaves_no_object(client, photo):
    assert client.post("/api/detect?threshold=1", content=png(photo)).json()["objects"] == []


def test_wrong_requests_are_refused(client, photo):
    assert client.post("/api/detect?threshold=2", content=png(photo)).status_code == 422
    assert client.post("/api/detect", content=b"no image").status_code == 415
    assert client.post("/api/detect", content=b"").status_code == 400
    assert client.post("/api/analyze", content=png(photo)).status_code == 404


def test_the_page_and_its_parts_are_there_and_say_what_the_model_is(client, detector):
    assert "SimA detector" in client.get("/").text
    for part in ("detect.js", "parts.js", "page.css", "icon.svg"):
        assert client.get(f"/{part}").status_code == 200
    facts = client.get("/api/model").json()
    assert facts["kind"] == ("Mask R-CNN" if detector.model.has_masks else "Faster R-CNN")
    assert facts["classes"] == CLASSES
    assert client.get("/healthz").json()["status"] == "ok"


def test_a_detector_does_not_run_in_the_browser(monkeypatch, tmp_path):
    monkeypatch.setattr("sima_attn.models.loading.is_detector", lambda what: True)
    result = CliRunner().invoke(cli.app, ["serve", "--model", "runs/x", "--onnx", str(tmp_path / "x.onnx")])
    assert "is a detector, which does not run in the browser: omit --onnx" in str(result.exception)
