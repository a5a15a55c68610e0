"""The page's server: what it answers, and that nothing sent to it brings it down."""

import asyncio
import io
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import timm
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import uvicorn
from fastapi.testclient import TestClient

from sima_attn.data.images import ENDINGS, open_photo
from sima_attn.explain.answer import classify
from sima_attn.explain.photo_model import photo_model
from sima_attn.nn import SimAttention
from sima_attn.serve import analysis
from sima_attn.serve.analysis import Analyzer, SoftmaxCore, softmax_twin
from sima_attn.serve.app import PAGE, create_app
from sima_attn.serve.in_browser import RUNTIME, InBrowser, browser_model
from sima_attn.serve.limits import Gate, Limits, Refusal
from sima_attn.serve.photos import count_scans, decode
from sima_attn.serve.run import serve

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
CVT = {"embed_dims": (8, 16, 24), "depths": (1, 1, 1), "num_heads": (1, 2, 3), "num_classes": 5}
LIMITS = Limits(bytes=200_000, pixels=2_000_000, queue=4, seconds=20)
CLASSES = ["ant", "bee", "cat", "dog", "elk"]


def small_subject(name="sima_deit_tiny_patch16_224", **options):
    model = timm.create_model(name, **{**VIT, **options}).eval()
    return photo_model(model, name="small", trained=False, classes=CLASSES, size=32)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    samples = tmp_path_factory.mktemp("samples")
    Image.new("RGB", (60, 40), (200, 20, 20)).save(samples / "red.png")
    subject = small_subject()
    with TestClient(create_app(subject, samples=samples, limits=LIMITS), base_url="http://127.0.0.1") as client:
        client.model = subject.model
        yield client


def photo(size=(60, 40), kind="PNG", mode="RGB", **options):
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def bomb(side=60_000):
    """A PNG of 68 bytes that says it has 3.6 thousand million pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def many_scans(count, side=32):
    """A progressive JPEG, its last scan repeated until there are so many."""
    whole = photo((side, side), "JPEG", progressive=True)
    last, end = whole.rfind(b"\xff\xda"), whole.rfind(b"\xff\xd9")
    repeats = count - whole.count(b"\xff\xda")
    return whole[:last] + whole[last:end] * (repeats + 1) + whole[end:]


def test_a_photo_is_classified_and_every_layer_drawn(client):
    answer = client.post("/api/analyze", content=photo()).json()
    assert (answer["height"], answer["width"]) == (24, 40)
    assert sorted(g["name"] for g in answer["guesses"]) == CLASSES
    probabilities = [g["probability"] for g in answer["guesses"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1, abs=1e-3)
    assert [layer["path"] for layer in answer["layers"]] == [f"blocks.{i}.attn" for i in range(3)]
    for layer in answer["layers"]:
        for part in ("q", "k"):
            values = [value for row in layer[part] for value in row]
            assert (len(layer[part]), len(layer[part][0])) == (3, 5)
            assert (min(values), max(values)) == (0, 1)


def test_one_patch(client):
    answer = client.post("/api/effect?layer=2&row=1&column=4", content=photo()).json()
    values = [value for row in answer["values"] for value in row]
    assert max(map(abs, values)) == 1
    assert answer["negative_share"] == pytest.approx(sum(v < 0 for v in values) / 15, abs=1e-3)
    outside = client.post("/api/effect?layer=2&row=3&column=0", content=photo())
    assert outside.status_code == 422
    assert "from (0, 0) to (2, 4)" in outside.json()["detail"]
    assert client.post("/api/effect?layer=9&row=0&column=0", content=photo()).status_code == 422


def test_times_and_facts(client, monkeypatch):
    monkeypatch.setattr(analysis, "TIMED_SECONDS", 0.0)
    answer = client.post("/api/times?size=128", content=photo()).json()
    assert answer["sima_ms"] > 0
    assert answer["softmax_ms"] > 0
    assert 200 <= answer["tokens"] <= 300
    refused = client.post("/api/times?size=100", content=photo())
    assert refused.status_code == 422
    assert "32, 64, 96, 128, 192, 224, 256, 384, got 100" in refused.json()["detail"]
    facts = client.get("/api/model").json()
    assert (facts["name"], facts["trained"], facts["layers"], facts["classes"]) == ("small", False, 3, CLASSES)
    assert facts["unsure_below"] is None
    assert facts["exps_in_attention"] == 0
    assert facts["exps_elsewhere"] > 0
    assert facts["params"] == sum(p.numel() for p in small_subject().model.parameters())


@pytest.mark.parametrize("name", ["sima_deit_tiny_patch16_224", "sima_cvt_13"])
def test_the_twin_has_softmax_everywhere_and_the_model_keeps_sima(name):
    options = VIT if "deit" in name else CVT
    model = timm.create_model(name, **options, attention_options={"token_ref": 4.0}).eval()
    count = sum(isinstance(module, SimAttention) for module in model.modules())
    twin = softmax_twin(model)
    assert sum(isinstance(module, SoftmaxCore) for module in twin.modules()) == count > 0
    assert sum(isinstance(module, SimAttention) for module in model.modules()) == count
    same = timm.create_model(name, **options, attention="softmax").eval()
    same.load_state_dict(model.state_dict())
    image = photo_model(model, size=32).prepare(Image.linear_gradient("L").convert("RGB"))
    if "deit" in name:  # CvT scales q by its width, which the twin, made for timing, leaves out
        assert (twin(image) - same(image)).abs().max() < 1e-5


def test_the_twin_keeps_a_local_branch():
    model = timm.create_model("sima_deit_tiny_patch16_224", **VIT, attention="sima_local").eval()
    same = timm.create_model("sima_deit_tiny_patch16_224", **VIT, attention="softmax").eval()
    same.load_state_dict(model.state_dict(), strict=False)
    image = photo_model(model, size=32).prepare(Image.linear_gradient("L").convert("RGB"))
    assert (softmax_twin(model)(image) - same(image)).abs().max() < 1e-5  # the filters are zero
    for block in model.blocks:
        block.attn.local.weight.data.fill_(1.0)
    assert (softmax_twin(model)(image) - same(image)).abs().max() > 1e-3


def test_the_twin_keeps_the_rotation():
    model, same = (
        timm.create_model("sima_deit_tiny_patch16_224", **VIT, attention=name).eval()
        for name in ("sima_rope", "softmax_rope")
    )
    same.load_state_dict(model.state_dict())
    image = photo_model(model, size=32).prepare(Image.linear_gradient("L").convert("RGB"))
    assert (softmax_twin(model)(image) - same(image)).abs().max() < 1e-5


def test_a_softmax_model_is_timed_against_its_conversion(monkeypatch):
    monkeypatch.setattr(analysis, "TIMED_SECONDS", 0.0)
    analyzer = Analyzer(small_subject("vit_tiny_patch16_224"), LIMITS)
    assert analyzer.sizes == [32]  # the model takes no other
    assert analyzer.times(Image.new("RGB", (40, 40)), 32).sima_ms > 0


def test_a_model_with_other_attentions_is_not_timed():
    """Only the class attention of this one could be converted: both columns would be times of XCA."""
    model = timm.create_model("sima_xcit_nano_12_p16_224", depth=1, attention="xca")
    with pytest.raises(Refusal, match="XCA cannot be converted to SimA, so there is nothing to compare"):
        Analyzer(photo_model(model, size=32, name="XCA"), LIMITS).times(Image.new("RGB", (40, 40)), 32)


def test_a_model_without_attention_is_refused_before_the_server_starts():
    subject = photo_model(timm.create_model("resnet18", num_classes=5), size=32)
    with pytest.raises(ValueError, match="no self-attention of this ResNet can be read"):
        create_app(subject)


HOSTILE = {
    "nothing": (b"", 400),
    "text": (b"hello, I am a photo", 415),
    "a script": (b"<svg onload=alert(1)>", 415),
    "half a PNG": (photo((300, 300))[:200], 422),
    "a broken JPEG": (photo((300, 300), "JPEG")[:300] + b"\xff" * 50, 422),
    "a header alone": (b"\x89PNG\r\n\x1a\n", 415),
    "a bomb": (bomb(), 413),
    "a smaller bomb": (bomb(2_000), 413),
    "too many bytes": (b"\0" * 200_001, 413),
    "too many scans": (many_scans(LIMITS.scans + 1), 413),
    "a format left out": (photo(kind="ICO"), 415),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_and_the_server_lives_on(client, name):
    data, status = HOSTILE[name]
    refused = client.post("/api/analyze", content=data)
    assert refused.status_code == status, refused.text
    detail = refused.json()["detail"]
    assert len(detail) > 10
    assert "Traceback" not in detail
    assert "/" not in detail.replace("'", "")
    assert client.get("/healthz").json() == {"status": "ok", "inside": 0}


def test_bytes_are_counted_where_no_length_is_given(client):
    def drip():
        for _ in range(300):
            yield b"\0" * 1000

    assert client.post("/api/analyze", content=drip()).status_code == 413


KINDS = [
    ("L", "PNG", (9, 9)),
    ("RGBA", "PNG", (50, 20)),
    ("P", "GIF", (20, 50)),
    ("1", "BMP", (8, 8)),
    ("CMYK", "JPEG", (64, 64)),
    ("RGB", "WEBP", (1, 1)),
    ("RGB", "PNG", (1900, 19)),
    ("RGB", "TIFF", (30, 20)),
    ("RGB", "AVIF", (30, 20)),
]


@pytest.mark.parametrize(("mode", "kind", "size"), KINDS)
def test_every_kind_of_photo_is_read(client, mode, kind, size):
    assert client.post("/api/analyze", content=photo(size, kind, mode)).status_code == 200


def turned(kind="JPEG", **options):
    """A photo of a turned phone."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return photo((600, 400), kind, exif=exif, **options)


SAME = {
    "large": lambda: photo((1500, 1200), "JPEG", progressive=True),
    "strip": lambda: photo((1900, 19)),
    "transparent": lambda: photo((50, 20), mode="LA"),
    "turned": turned,
    "tall TIFF": lambda: photo((40, 300), "TIFF"),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_page_answers_what_the_command_answers(client, kind, tmp_path):
    (tmp_path / "photo").write_bytes(SAME[kind]())
    subject = small_subject()
    subject.model.load_state_dict(client.model.state_dict())
    expected = classify(subject, open_photo(tmp_path / "photo"))
    for query in ("", "?size=64"):  # the size is that of the maps
        answer = client.post(f"/api/analyze{query}", content=SAME[kind]()).json()
        assert [guess["name"] for guess in answer["guesses"]] == [name for name, _ in expected.classes]
        seen = [guess["probability"] for guess in answer["guesses"]]
        assert seen == pytest.approx([probability for _, probability in expected.classes], abs=1e-5)


def test_the_page_is_unsure_where_the_command_is():
    for below, unsure in ((None, False), (0.0, False), (0.999, True)):
        client = TestClient(create_app(replace(small_subject(), unsure_below=below), hosts=None))
        assert client.post("/api/analyze", content=photo()).json()["unsure"] is unsure
        assert client.get("/api/model").json()["unsure_below"] == below


def test_a_photo_that_a_browser_cannot_show_comes_back_as_jpeg(client):
    answer = client.post("/api/picture", content=photo((1900, 190), "TIFF", compression="tiff_lzw"))
    assert answer.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(answer.content)).size == (1024, 102)
    assert client.post("/api/picture", content=b"no photo").status_code == 415


def test_a_photo_is_turned_the_way_up_that_the_camera_noted():
    assert decode(turned(), LIMITS).size == (400, 600)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_transparent_photo_is_what_the_commands_and_training_read(mode, tmp_path):
    image = Image.linear_gradient("L").convert("RGBA")
    image.putalpha(Image.linear_gradient("L").rotate(90))
    path = tmp_path / "photo.png"
    image.convert(mode).save(path)
    assert decode(path.read_bytes(), LIMITS).tobytes() == open_photo(path).tobytes()


@pytest.mark.parametrize("query", "size=0 size=-1 size=99999 size=abc size=33 size=1e9 size=32.0 size=3_2".split())
def test_settings_out_of_range_are_422(client, query):
    refused = client.post(f"/api/analyze?{query}", content=photo())
    assert refused.status_code == 422
    assert "size" in refused.json()["detail"]


def test_every_answer_has_the_headers_and_the_page_needs_nothing_from_elsewhere(client):
    for path, method in [("/", "GET"), ("/page.js", "GET"), ("/nowhere", "GET"), ("/api/analyze", "GET")]:
        response = client.request(method, path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
    pages = {path: client.get(path).text for path in PAGE}
    drawn = {path: page.replace("http://www.w3.org/2000/svg", "") for path, page in pages.items()}  # a name, no address
    assert not [path for path, page in drawn.items() if re.search(r"https?:|//\w+\.|url\(|@import", page)]
    for path, script in (("/", "/page.js"), ("/browser", "/browser.js")):
        assert "style=" not in pages[path]
        assert pages[path].count("<script") == 1
        ids = set(re.findall(r'\$\("([\w-]+)"\)', pages[script] + pages["/parts.js"]))
        assert [one for one in ids if f'id="{one}"' not in pages[path]] == []
    assert client.get("/docs").status_code == 404
    assert client.get("/api/analyze").status_code == 405


def test_compiled_code_may_run_on_the_page_that_needs_it_alone(client):
    allowed = {path: "wasm-unsafe-eval" in client.get(path).headers["content-security-policy"] for path in PAGE}
    assert [path for path, may in allowed.items() if may] == ["/browser"]


def test_a_model_in_the_browser_is_there_or_how_to_get_it(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    import onnx

    from sima_attn.export.onnx import export_onnx

    monkeypatch.chdir(tmp_path)  # where there is no .tools/web
    subject = small_subject()
    file, web = tmp_path / "small.onnx", tmp_path / "web"
    export_onnx(subject.model, file, input_size=32, labels=CLASSES, name="small")

    def ask(in_browser, path="/api/browser"):
        return TestClient(create_app(subject, hosts=None, in_browser=in_browser)).get(path)

    for missing, how in ((InBrowser(), "sima export MODEL"), (InBrowser(file), "make browser")):
        answer = ask(missing)
        assert answer.status_code == 404
        assert how in answer.json()["detail"]
    web.mkdir()
    with pytest.raises(FileNotFoundError, match=r"web has no ort\.wasm.* and no ort-wasm.*: give the folder `dist`"):
        InBrowser(file, web)
    for name in RUNTIME:
        (web / name).write_bytes(b"of the runtime")
    found = InBrowser(file, web)
    assert not found.reason_it_does_not_run
    answer = ask(found).json()
    assert (answer["name"], answer["preprocessing"]["size"], answer["precision"], answer["classes"]) == (
        "small",
        32,
        "float32",
        CLASSES,
    )
    assert (answer["bytes"], answer["prepares_itself"]) == (file.stat().st_size, False)
    assert ask(found, "/browser/model.onnx").content == file.read_bytes()
    assert ask(found, "/browser/ort-wasm-simd-threaded.wasm").headers["content-type"] == "application/wasm"
    assert ask(found, "/browser/other.wasm").status_code == 404

    (tmp_path / "text.onnx").write_text("no graph")
    with pytest.raises(ValueError, match=r"cannot load .*text\.onnx"):
        InBrowser(tmp_path / "text.onnx", web)
    graph = onnx.load(file)
    del graph.metadata_props[:]
    onnx.save(graph, tmp_path / "bare.onnx")
    with pytest.raises(ValueError, match=r"bare\.onnx does not say how its images are prepared"):
        InBrowser(tmp_path / "bare.onnx", web)
    graph.metadata_props.add(key="sima_attn.task", value="detection")
    onnx.save(graph, tmp_path / "detector.onnx")
    with pytest.raises(ValueError, match=r"detector\.onnx is a detector, which does not run in the browser"):
        InBrowser(tmp_path / "detector.onnx", web)


def test_what_runs_in_the_browser_is_printed_at_the_start(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    from sima_attn.export.onnx import export_onnx

    monkeypatch.chdir(tmp_path)  # where there is no .tools/web
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)
    subject, web = small_subject(), tmp_path / "web"
    export_onnx(subject.model, tmp_path / "small.onnx", input_size=32, labels=CLASSES, name="small")
    web.mkdir()
    for name in RUNTIME:
        (web / name).write_bytes(b"of the runtime")
    options = {"host": "127.0.0.1", "port": 0, "samples": None, "limits": Limits()}
    serve(subject, **options)
    serve(subject, **options, onnx=Path("small.onnx"))
    serve(subject, **options, onnx=Path("small.onnx"), onnxruntime_web=web)
    address, again, missing, third, page = capsys.readouterr().out.splitlines()
    assert all(line.endswith("(Ctrl-C to stop)") for line in (address, again, third))
    assert "make browser" in missing
    assert page == f"{third.split()[0]}/browser  runs small.onnx in the browser"


@pytest.fixture(scope="module")
def small_onnx(tmp_path_factory):
    """Metadata -> an ONNX file of three classes that takes images of 32 px, written by whomever."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper

    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["means"]),
        helper.make_node("Flatten", ["means"], ["logits"]),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 32, 32])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "small", [images], [logits])
    path = tmp_path_factory.mktemp("onnx") / "small.onnx"

    def write(**metadata):
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        helper.set_model_props(proto, {f"sima_attn.{key}": value for key, value in (HONEST | metadata).items()})
        onnx.save(proto, path)
        return path

    return write


PREPARED = {"size": 32, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "crop_ratio": 0.9, "interpolation": "bicubic"}
HONEST = {"preprocessing": json.dumps(PREPARED), "labels": json.dumps(CLASSES[:3]), "model": "small"}


def prepared(**changed):
    return {"preprocessing": json.dumps(PREPARED | changed)}


FOREIGN = {
    "no JSON": ({"preprocessing": "{"}, "this is not the pre-processing of an exported model"),
    "too deep": ({"preprocessing": "[" * 100_000}, "this is not the pre-processing of an exported model"),
    "a list": ({"preprocessing": "[1, 2]"}, "this is not the pre-processing"),
    "unknown settings": (prepared(url="http://127.0.0.1:9"), "this is not the pre-processing"),
    "a huge image": (prepared(size=10**9), "size must be a whole number from 1 to 8192 pixels, got 1000000000"),
    "a negative size": (prepared(size=-1), "size must be a whole number"),
    "a size in words": (prepared(size="32"), "size must be a whole number"),
    "a huge resize": (prepared(crop_ratio=1e-9), "size / crop_ratio must be at most 8192 pixels"),
    "a ratio in words": (prepared(crop_ratio="1"), "crop_ratio must lie in"),
    "two means": (prepared(mean=[0.5, 0.5]), "mean must be three numbers"),
    "a mean in words": (prepared(mean="abc"), "mean must be three numbers"),
    "not a number": (prepared(std=[float("nan")] * 3), "std must be three numbers"),
    "no deviation": (prepared(std=[0.2, 0.2, 0]), "std must be above 0"),
    "another filter": (prepared(interpolation="../x"), "interpolation must be bicubic or bilinear"),
    "labels in a table": ({"labels": '{"a": 1}'}, "labels of an ONNX file must be a list of names"),
    "half a threshold": ({"unsure_below": "half"}, "unsure_below of an ONNX file must be a probability"),
    "labels in numbers": ({"labels": "[1, 2, 3]"}, "labels of an ONNX file must be a list of names"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_the_metadata_of_a_model_for_the_browser_are_checked(small_onnx, name):
    metadata, message = FOREIGN[name]
    with pytest.raises(ValueError, match=message):
        browser_model(small_onnx(**metadata))


def test_honest_metadata_of_a_model_for_the_browser_are_shown(small_onnx):
    model = browser_model(small_onnx(model="m" * 1000, precision="int8"))
    assert (model.preprocessing.size, model.preprocessing.crop_ratio) == (32, 0.9)
    assert (model.precision, model.classes) == ("int8", CLASSES[:3])
    assert model.name == "m" * 200


def test_samples_are_offered_by_name_alone(client):
    assert client.get("/api/samples").json() == ["red"]
    small = client.get("/api/samples/red?side=30")
    assert small.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(small.content)).size == (30, 20)
    for name in ("none", "..%2F..%2Fetc%2Fpasswd", "red.png", "%00"):
        assert client.get(f"/api/samples/{name}").status_code == 404


def test_samples_of_every_ending_are_read_and_none_hides_another(tmp_path):
    names = [f"red{ending}" for ending in ENDINGS]
    for name in names:
        Image.new("RGB", (60, 40), (200, 20, 20)).save(tmp_path / name)
    client = TestClient(create_app(small_subject(), samples=tmp_path, limits=LIMITS, hosts=None))
    assert client.get("/api/samples").json() == sorted(names)
    assert {client.get(f"/api/samples/{name}").status_code for name in names} == {200}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]", "[::1]:8000"])
def test_its_own_names_are_answered_and_pages_of_it_may_post(client, host):
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert client.get("/", headers={"host": host}).status_code == 200
    assert client.post("/api/analyze", content=photo(), headers=headers).status_code == 200


MALFORMED = "|:8000|127.0.0.1:|127.0.0.1:x|127.0.0.1:80:80|127.0.0.1:70000|a@127.0.0.1|127.0.0.1@b|127.0.0.1/a|::1|[::1"
MALFORMED += "|127.0.0.1 b|127.0.0.1,b|127.0.0.1?b|127.0.0.1#b|127.0.0.1\\b|http://127.0.0.1|[127.0.0.1]b"
OTHER = ("evil.example", "127.0.0.1.evil.example", "localhost.", "127.0.0.10", "[::2]", "[127.0.0.1].evil")


@pytest.mark.parametrize("host", [*MALFORMED.split("|"), *OTHER])
def test_malformed_and_other_hosts_are_refused(client, host):
    assert client.get("/", headers={"host": host}).status_code == 400


def test_a_malformed_host_is_refused_where_any_is_allowed():
    client = TestClient(create_app(small_subject(), hosts=None))
    assert client.get("/", headers={"host": "any.example:8000"}).status_code == 200
    assert client.get("/", headers={"host": "any.example:x"}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "http://127.0.0.1.evil.example"},
        {"origin": "file://127.0.0.1"},
        {"origin": "http://127.0.0.1", "sec-fetch-site": "cross-site"},
        {"origin": "http://evil.example", "sec-fetch-site": "same-origin"},
    ],
    ids=lambda headers: " ".join(headers.values()),
)
def test_a_photo_from_another_site_is_refused(client, headers):
    refused = client.post("/api/analyze", content=photo(), headers=headers)
    assert refused.status_code == 403
    assert client.get("/", headers=headers).status_code == 200  # a link from there may lead here


@settings(max_examples=200)
@given(st.lists(st.sampled_from([b"\xff", b"\xff\xda", b"\xff\xd9", b"\xff\xff", b"\0\4ab", b"\0", b"\x01", b"\xd8"])))
def test_scans_are_counted_in_any_bytes(parts):
    data = b"".join(parts)
    assert 0 <= count_scans(data, 3) <= min(4, data.count(b"\xff\xda"))


def test_scans_are_those_of_the_photo_alone():
    assert count_scans(photo(kind="JPEG"), 1000) == 1
    for count in (10, LIMITS.scans, 1000):
        assert count_scans(many_scans(count), 1000) == count
    assert count_scans(many_scans(1000), 7) == 8  # it does not look further
    thumbnail = Image.Exif()
    thumbnail[0x010E] = photo(kind="JPEG").decode("latin-1")  # scans in a segment, as of a thumbnail
    assert count_scans(photo(kind="JPEG", exif=thumbnail, comment=b"\xff\xda" * 300), 1000) == 1
    assert count_scans(photo(kind="JPEG") + b"\xff\xda" * 300, 1000) == 1  # a film behind the photo


def test_a_photo_of_as_many_scans_as_allowed_is_read(client):
    assert client.post("/api/analyze", content=many_scans(LIMITS.scans)).status_code == 200


def test_an_error_of_ours_is_a_500_without_its_text(client, monkeypatch):
    def fail(*_):
        raise RuntimeError("secret /etc/path")

    monkeypatch.setattr(Analyzer, "analyze", fail)
    answer = client.post("/api/analyze", content=photo())
    assert answer.status_code == 500
    assert answer.json() == {"detail": "internal error; see the log of the server"}
    assert client.get("/healthz").json()["inside"] == 0


def test_too_many_are_told_to_come_back_and_the_slow_are_out_of_time():
    gate = Gate(Limits(queue=1, seconds=0.2))
    release = threading.Event()

    async def ask(work):
        with gate.admit():
            return await gate.run(work)

    async def scene():
        slow = [asyncio.create_task(ask(release.wait)) for _ in range(2)]  # one runs, one waits
        await asyncio.sleep(0.02)
        with pytest.raises(Refusal, match="busy: 2 requests are ahead") as busy:
            await ask(lambda: None)
        assert busy.value.status == 429
        for task in slow:
            with pytest.raises(Refusal, match=r"longer than 0\.2 seconds") as late:
                await task
            assert late.value.status == 504
        release.set()
        assert await ask(lambda: "again") == "again"
        assert gate.inside == 0

    try:
        asyncio.run(scene())
    finally:
        release.set()
        gate.close()


def test_openapi_names_every_refusal(client):
    schema = client.get("/openapi.json").json()
    for path in ("/api/analyze", "/api/effect", "/api/times"):
        operation = schema["paths"][path]["post"]
        assert "requestBody" in operation
        assert {"200", "400", "413", "415", "422", "429", "504"} <= set(operation["responses"])


def test_what_is_in_the_way_of_listening_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "1.2.3.4.5", "192.0.2.1"):
            with pytest.raises(ValueError, match=f"cannot listen on {host}:{port}: .*; choose another --port"):
                serve(small_subject(), host=host, port=port, samples=None, limits=LIMITS)


def test_it_listens_answers_and_stops_when_told():
    """The command itself, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sima_attn.cli", "serve", "--model", "sima_deit_tiny_patch16_224", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{address}/healthz", timeout=30) as answer:
            assert answer.status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert "no trained weights" in errors
    assert "Traceback" not in errors
