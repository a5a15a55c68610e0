"""The server asked at random: by its own description of its interface, and with photos that were damaged on the way."""

import io
from functools import partial

import pytest
import timm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from PIL import Image

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("schemathesis")

import schemathesis
from fastapi.testclient import TestClient
from schemathesis.checks import positive_data_acceptance

from sima_attn.explain.photo_model import photo_model
from sima_attn.serve import analysis
from sima_attn.serve.app import create_app
from sima_attn.serve.limits import Limits
from sima_attn.serve.photos import FORMATS

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
BOUNDED = settings(max_examples=30, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def make_app(tmp_path_factory):
    samples = tmp_path_factory.mktemp("samples")
    Image.new("RGB", (60, 40), (200, 20, 20)).save(samples / "red.png")
    model = timm.create_model("sima_deit_tiny_patch16_224", **VIT).eval()
    subject = photo_model(model, name="small", trained=False, size=32)
    limits = Limits(bytes=200_000, pixels=2_000_000, tokens=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "TIMED_SECONDS", 0.0)
        yield partial(create_app, subject, samples=samples, limits=limits, hosts=None)


@pytest.fixture(scope="module")
def client(make_app):
    with TestClient(make_app()) as client:
        yield client


@pytest.fixture(scope="module")
def interface(make_app):
    # An app of its own: schemathesis starts it and shuts it down, after which it answers nobody.
    return schemathesis.openapi.from_asgi("/openapi.json", make_app())


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_every_answer_is_as_described_and_none_is_a_5xx(interface, mode):
    """Requests that fit the description, and requests that do not; schemathesis's own checks."""
    asked = set()
    for operation in interface.get_all_operations():

        @BOUNDED
        @given(case=operation.ok().as_strategy(generation_mode=mode))
        def ask(case):
            asked.add(f"{case.method} {case.path}")
            # No description says which patches a photo will have: a 422 for a patch outside is right.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        try:
            ask()
        except Unsatisfiable:
            assert mode is schemathesis.GenerationMode.NEGATIVE  # without parameters there is nothing to get wrong
    assert {"POST /api/analyze", "POST /api/effect", "POST /api/times", "GET /api/samples/{name}"} <= asked


def whole(kind):
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((48, 40)).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
@BOUNDED
@given(data=st.data())
def test_a_damaged_photo_is_read_or_refused(client, kind, data):
    photo = bytearray(whole(kind))
    for _ in range(data.draw(st.integers(1, 8))):
        photo[data.draw(st.integers(0, min(len(photo), 400) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(1, len(photo)))
    answer = client.post("/api/analyze", content=bytes(photo[:end]))
    assert answer.status_code in (200, 413, 415, 422)
    assert answer.status_code == 200 or answer.json()["detail"]
