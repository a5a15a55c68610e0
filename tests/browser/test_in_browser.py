"""A model that Chromium runs by itself, against ONNX Runtime in Python on the same file and photo."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from driving import NARROW, WIDE, complaints, give, set_window, shown, until
from selenium.webdriver.common.by import By
from typer.testing import CliRunner

from serving import serving
from sima_attn import cli
from sima_attn.data.images import read_image
from sima_attn.data.loader import evaluation_transform
from sima_attn.explain.photo_model import load_photo_model, photo_model
from sima_attn.export.onnx import export_onnx
from sima_attn.export.quantize import quantize_onnx
from sima_attn.export.runtimes import open_model
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.serve.app import create_app
from sima_attn.serve.in_browser import RUNTIME, USUAL_RUNTIME, InBrowser

NAME = "sima_xcit_mini_p4_64_relu"
WEB = Path(__file__).parents[2] / USUAL_RUNTIME
# As large as the model wants it; and three that must be resized and cut: wide, tall, small.
PHOTOS = {(64, 64): (255, 0, 0), (300, 170): (0, 255, 0), (75, 210): (0, 0, 255), (40, 33): (255, 255, 0)}
needs_runtime = pytest.mark.skipif(
    not all((WEB / name).is_file() for name in RUNTIME),
    reason="there is no onnxruntime-web in .tools/web: `make browser` puts it there",
)


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    model = timm.create_model(NAME, depth=2).eval()
    with torch.no_grad():  # random weights say the same of every photo: these have a favorite for each
        model.head.weight *= 40
        model.head.bias -= model(torch.randn(16, 3, 1, 1).expand(-1, -1, 64, 64)).mean(0)
    return photo_model(model, name=NAME, trained=False)


@pytest.fixture(scope="module")
def files(subject, tmp_path_factory):
    """Name -> ONNX file: float32, int8, and float32 that prepares a photo itself."""
    folder = tmp_path_factory.mktemp("onnx")
    labels = [f"label {k}" for k in range(subject.model.num_classes)]
    common = {"input_size": 64, "labels": labels, "name": NAME}
    cropped = Preprocessing(64, (0.48, 0.45, 0.4), (0.28, 0.27, 0.28), crop_ratio=0.875)
    export_onnx(subject.model, folder / "float32.onnx", prepare=cropped, **common)
    export_onnx(subject.model, folder / "inside.onnx", preprocessing=True, **common)
    rng = np.random.default_rng(0)
    quantize_onnx(
        folder / "float32.onnx",
        folder / "int8.onnx",
        [rng.normal(size=(3, 64, 64)).astype(np.float32) for _ in range(32)],
        reduce_range=True,  # no processor saturates
    )
    return {path.stem: path for path in folder.iterdir()}


def noisy(size, color):
    """A PNG of one color, with noise in which every pixel counts."""
    width, height = size
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3))
    pixels = 0.7 * np.array(color) + 0.3 * noise
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def expected(path, data):
    """The five best labels and their probabilities, by ONNX Runtime in Python."""
    session = open_model(path)
    image = read_image(io.BytesIO(data))
    if session.metadata["preprocessing_inside"] == "true":
        given = np.asarray(image)
    else:
        given = evaluation_transform(Preprocessing.from_json(session.metadata["preprocessing"]))(image)[None].numpy()
    probabilities = torch.from_numpy(session(given)[0]).softmax(0)  # [K]
    best = probabilities.topk(5)
    return [f"label {k}" for k in best.indices.tolist()], best.values.tolist()


def read(driver):
    """The labels and the probabilities that the page shows."""
    names = [item.text.split("\n")[0] for item in driver.find_elements(By.CSS_SELECTOR, "#guesses li")]
    bars = driver.find_elements(By.CSS_SELECTOR, "#guesses progress")
    return names, [float(bar.get_property("value")) for bar in bars]


@needs_runtime
@pytest.mark.parametrize("kind", ["int8", "float32", "inside"])
def test_the_browser_says_what_python_says_and_sends_no_photo(chromium, subject, files, kind):
    complaints(chromium)
    clear = set()
    tolerance = 0.02 if kind == "int8" else 1e-3  # float32 differs in its last bits, int8 by a step here and there
    with serving(create_app(subject, in_browser=InBrowser(files[kind], WEB))) as served:
        chromium.get(f"{served.address}/browser")
        until(chromium, lambda: "your photo does not leave it" in shown(chromium, "model"))
        until(chromium, lambda: len(chromium.find_elements(By.CSS_SELECTOR, "#samples img")) == 5)
        asked = len(served.requests)
        for size, color in PHOTOS.items():
            data = noisy(size, color)
            chromium.execute_script("document.getElementById('status').textContent = ''")
            give(chromium, data)
            until(chromium, lambda: " ms" in shown(chromium, "status"))
            labels, probabilities = expected(files[kind], data)
            seen_labels, seen = read(chromium)
            assert seen == pytest.approx(probabilities, abs=tolerance)
            assert shown(chromium, "status").startswith(seen_labels[0])
            if probabilities[0] - probabilities[1] > 2 * tolerance:
                assert seen_labels[0] == labels[0]
                clear.add(labels[0])
        assert len(clear) >= 2  # photos of different classes
        assert len(served.requests) == asked  # four photos, and nothing was asked of the server
        assert {method for method, _ in served.requests} == {"GET"}
    assert complaints(chromium) == []


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The model of the package and its ONNX file, as a user makes it."""
    file = tmp_path_factory.mktemp("shipped") / "mini.onnx"
    done = CliRunner().invoke(cli.app, ["export", NAME, "--pretrained", "--out", str(file)])
    assert done.exit_code == 0, done.output
    return load_photo_model(), file


def kinds_of_photos():
    """Name -> file: larger than any canvas needs to be, transparent, and a strip whose ends are cut."""
    rng = np.random.default_rng(0)

    def blobs(width, height):
        return Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((width, height))

    clear = blobs(300, 200)
    clear.putalpha(Image.linear_gradient("L").resize((300, 200)))
    for name, image in {"large.png": blobs(4500, 1500), "clear.png": clear, "strip.png": blobs(2000, 40)}.items():
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        yield name, buffer.getvalue()


@needs_runtime
def test_command_page_and_browser_give_one_answer(chromium, shipped, tmp_path):
    subject, file = shipped
    with serving(create_app(subject, in_browser=InBrowser(file, WEB))) as served:
        for name, data in kinds_of_photos():
            (tmp_path / name).write_bytes(data)
            printed = CliRunner().invoke(cli.app, ["classify", str(tmp_path / name)]).output
            title, words = printed.splitlines()[0], re.findall(r"^  (.*?) +([\d.]+) %", printed, re.MULTILINE)
            names, percents = [word for word, _ in words], [float(percent) for _, percent in words]
            for path in ("/", "/browser"):
                chromium.get(served.address + path)
                until(chromium, lambda: shown(chromium, "known"))
                give(chromium, data)
                until(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, "#guesses li"))
                seen_names, seen = read(chromium)
                assert 100 * np.array(seen) == pytest.approx(percents, abs=0.5), (name, path)
                assert seen_names[0] == names[0]
                assert shown(chromium, "status").startswith("unsure" if "unsure" in title else names[0])


def from_a_turned_phone():
    """A bright top over a dark bottom, stored lying, with the orientation noted."""
    noise = np.random.default_rng(0).integers(0, 60, (160, 120, 3)).repeat(2, 0).repeat(2, 1)
    upright = noise + np.linspace(190, 0, 320)[:, None, None]
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(upright).astype(np.uint8)).save(buffer, "JPEG", exif=exif, quality=100, subsampling=0)
    return buffer.getvalue()


@needs_runtime
def test_a_photo_is_upright_in_the_browser_too(chromium, subject, files):
    data = from_a_turned_phone()
    lying = np.asarray(read_image(io.BytesIO(data)).rotate(90, expand=True))
    Image.fromarray(lying).save(turned := io.BytesIO(), "PNG")
    _, probabilities = expected(files["float32"], data)
    assert expected(files["float32"], turned.getvalue())[1] != pytest.approx(probabilities, abs=0.02)
    with serving(create_app(subject, in_browser=InBrowser(files["float32"], WEB))) as served:
        chromium.get(f"{served.address}/browser")
        until(chromium, lambda: "your photo does not leave it" in shown(chromium, "model"))
        give(chromium, data, media="image/jpeg")
        until(chromium, lambda: " ms" in shown(chromium, "status"))
        assert read(chromium)[1] == pytest.approx(probabilities, abs=0.005)


@needs_runtime
def test_a_strip_is_refused_as_on_the_server(chromium, subject, files):
    Image.new("RGB", (3000, 29)).save(strip := io.BytesIO(), "PNG")
    with serving(create_app(subject, in_browser=InBrowser(files["float32"], WEB))) as served:
        chromium.get(f"{served.address}/browser")
        until(chromium, lambda: "your photo does not leave it" in shown(chromium, "model"))
        give(chromium, strip.getvalue())
        message = "3000 x 29 pixels; the longer side may be at most 100 times the shorter one"
        until(chromium, lambda: message in shown(chromium, "status"))


@needs_runtime
def test_what_is_no_image_is_explained(chromium, subject, files):
    with serving(create_app(subject, in_browser=InBrowser(files["int8"], WEB))) as served:
        chromium.get(f"{served.address}/browser")
        until(chromium, lambda: "your photo does not leave it" in shown(chromium, "model"))
        give(chromium, noisy((64, 64), (255, 0, 0)))
        until(chromium, lambda: " ms" in shown(chromium, "status"))
        give(chromium, b"no image at all")
        until(chromium, lambda: "not an image that the browser can read" in shown(chromium, "status"))
        assert not chromium.find_element(By.ID, "result").is_displayed()


@needs_runtime
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["desktop", "phone"])
def test_it_fits_the_window(chromium, subject, files, shots, size):
    set_window(chromium, size, dark=size == NARROW)
    with serving(create_app(subject, in_browser=InBrowser(files["int8"], WEB))) as served:
        chromium.get(f"{served.address}/browser")
        until(chromium, lambda: chromium.find_elements(By.CSS_SELECTOR, "#samples button"))
        chromium.find_element(By.CSS_SELECTOR, "#samples button").click()
        until(chromium, lambda: " ms" in shown(chromium, "status"))
        assert chromium.execute_script("return document.documentElement.scrollWidth") <= size[0]
        chromium.save_screenshot(str(shots / f"in-browser-{size[0]}.png"))
    set_window(chromium, WIDE)


def test_the_page_says_how_to_get_what_is_missing(chromium, subject, files, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where there is no .tools/web
    for onnx, message in ((None, "sima export MODEL"), (files["int8"], "make browser")):
        with serving(create_app(subject, in_browser=InBrowser(onnx))) as served:
            chromium.get(f"{served.address}/browser")
            until(chromium, lambda: shown(chromium, "status"))
            assert message in shown(chromium, "status")
            assert "no model to run" in shown(chromium, "model")
            assert "sima serve --onnx runs/mini.onnx" in shown(chromium, "missing")
    complaints(chromium)
