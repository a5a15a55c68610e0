"""The page in Chromium: a photo comes in, and what a visitor sees follows."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium")

from driving import NARROW, WIDE, complaints, give, in_window, open_page, photo, set_window, shown, slide, until
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from serving import serving
from sima_attn.explain.photo_model import photo_model
from sima_attn.serve import analysis
from sima_attn.serve.app import create_app
from sima_attn.serve.limits import Limits

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
CLASSES = ["ant", "bee", "cat", "dog", "elk"]
LIMITS = Limits(bytes=2**20)
PIXELS = "return document.getElementById(arguments[0]).toDataURL('image/png').split(',')[1]"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    torch.manual_seed(0)
    samples = tmp_path_factory.mktemp("samples")
    for name, color in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        Image.new("RGB", (60, 40), color).save(samples / f"{name}.png")
    model = timm.create_model("sima_deit_tiny_patch16_224", **VIT).eval()
    small = photo_model(model, name="small", trained=False, classes=CLASSES, size=32)
    with serving(create_app(small, samples=samples, limits=LIMITS)) as served:
        yield served


@pytest.fixture
def page(chromium, served):
    """The page, freshly opened; whatever a test did, it wrote no error to the console."""
    set_window(chromium, WIDE)
    open_page(chromium, served)
    yield chromium
    assert complaints(chromium) == []


def drop_and_wait(driver, data=None):
    give(driver, data or photo())
    until(driver, lambda: driver.find_element(By.ID, "result").is_displayed() and "%" in shown(driver, "status"))


def pixels(driver, canvas="view"):
    """What a canvas shows, in floats."""
    image = Image.open(io.BytesIO(base64.b64decode(driver.execute_script(PIXELS, canvas)))).convert("RGB")
    return np.asarray(image, np.float32)


def choose(driver, part):
    driver.find_element(By.CSS_SELECTOR, f"input[name=part][value={part}]").click()


def test_a_dropped_photo_gets_five_guesses_with_bars_and_a_map(page):
    drop_and_wait(page)
    items = page.find_elements(By.CSS_SELECTOR, "#guesses li")
    names, shares = zip(*(item.text.split("\n") for item in items), strict=True)
    assert sorted(names) == CLASSES
    percents = [float(share.rstrip(" %")) for share in shares]
    assert percents == sorted(percents, reverse=True)
    assert sum(percents) == pytest.approx(100, abs=0.3)
    bars = page.find_elements(By.CSS_SELECTOR, "#guesses progress")
    assert [float(bar.get_property("value")) for bar in bars] == pytest.approx([p / 100 for p in percents], abs=6e-4)
    assert shown(page, "status") == f"{names[0]}, {shares[0]}"
    image = pixels(page)
    assert image.shape[:2] == (683, 1024)
    assert np.abs(image - image.mean(axis=2, keepdims=True)).max() > 50  # a gray photo has colored heat on it


def test_sliders_and_choices_change_the_map(page):
    drop_and_wait(page)
    assert shown(page, "layer-shown") == "3 of 3"
    last = pixels(page)
    slide(page, "layer", 1)
    assert shown(page, "layer-shown") == "1 of 3"
    first = pixels(page)
    choose(page, "k")
    keys = pixels(page)
    slide(page, "opacity", 100)
    strong = pixels(page)
    for one, other in ((last, first), (first, keys), (keys, strong)):
        assert np.abs(one - other).mean() > 1
    slide(page, "opacity", 0)
    plain = pixels(page)
    assert np.abs(plain - plain.mean(axis=2, keepdims=True)).max() < 3  # the photo as it is: gray


def test_a_clicked_patch_shows_what_it_takes_and_escape_goes_back(page):
    drop_and_wait(page)
    before = pixels(page)
    view = page.find_element(By.ID, "view")
    view.click()  # its middle
    until(page, lambda: "negative" in shown(page, "status"))
    assert shown(page, "status").startswith("patch 1, 2: ")  # of 3 rows and 5 columns
    assert (shown(page, "least"), shown(page, "most")) == ("negative", "positive")
    effect = pixels(page)
    assert np.abs(effect - before).mean() > 3
    view.send_keys(Keys.ESCAPE)
    assert np.array_equal(pixels(page), before)
    view.send_keys(Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ENTER)
    until(page, lambda: "negative" in shown(page, "status"))
    assert shown(page, "status").startswith("patch 0, 1: ")
    slide(page, "layer", 1)
    until(page, lambda: "analyzing" not in shown(page, "status"))
    assert np.abs(pixels(page) - effect).mean() > 1


def test_a_photo_comes_in_every_way(page, tmp_path, served):
    def looked_at():
        return served.requests.count(("POST", "/api/analyze"))

    (tmp_path / "mine.jpg").write_bytes(photo((64, 64), "JPEG"))
    ways = [
        lambda: give(page, photo(), "paste"),
        lambda: page.find_element(By.ID, "file").send_keys(str(tmp_path / "mine.jpg")),
        lambda: page.find_element(By.CSS_SELECTOR, "#samples button[title=red]").send_keys(Keys.ENTER),
    ]
    for way in ways:
        before = looked_at()
        until(page, lambda: page.find_elements(By.CSS_SELECTOR, "#samples button"))
        way()
        until(page, lambda: looked_at() == before + 1 and "%" in shown(page, "status"))  # noqa: B023
    red = pixels(page)
    assert red[..., 0].mean() > red[..., 1].mean()


def test_times_are_measured_at_the_chosen_size(page, monkeypatch):
    monkeypatch.setattr(analysis, "TIMED_SECONDS", 0.0)
    drop_and_wait(page)
    Select(page.find_element(By.ID, "size")).select_by_visible_text("64 px")
    page.find_element(By.ID, "measure").click()
    until(page, lambda: "tokens" in shown(page, "status"))
    names = [one.text for one in page.find_elements(By.CSS_SELECTOR, "#times dt")]
    assert names == ["SimA", "softmax"]
    assert len(page.find_elements(By.CSS_SELECTOR, "#times progress")) == 2


def test_the_model_and_its_classes_are_described_before_any_photo(page):
    facts = [one.text.split("\n") for one in page.find_elements(By.CSS_SELECTOR, "#facts > div")]
    assert ["exp() in attention", "0"] in facts
    assert ["unsure below", "not measured"] in facts
    assert "no trained weights" in shown(page, "model")
    assert shown(page, "known") == "The 5 classes that it knows"
    page.find_element(By.CSS_SELECTOR, "#known summary").click()
    assert [one.text for one in page.find_elements(By.CSS_SELECTOR, "#known li")] == CLASSES


@pytest.mark.parametrize("shape", [(90, 60), (60, 60), (50, 100)], ids=["wide", "square", "tall"])
def test_photo_map_and_controls_are_in_one_window(page, shape):
    drop_and_wait(page, photo(shape))
    for name in ("photo", "view", "legend", "parts", "layer", "opacity", "download", "guesses", "measure"):
        assert in_window(page, name), name
    left, right = (page.find_element(By.ID, name).rect for name in ("photo", "view"))
    assert (left["y"], left["width"], left["height"]) == (right["y"], right["width"], right["height"])
    assert left["x"] + left["width"] < right["x"]


def test_the_square_that_is_classified_is_the_bright_one(page):
    drop_and_wait(page, photo((60, 60)))
    assert shown(page, "classified") == ""  # all of it
    Image.new("RGB", (200, 100), (240, 240, 240)).save(wide := io.BytesIO(), "PNG")
    drop_and_wait(page, wide.getvalue())
    assert shown(page, "classified") == "The bright square is classified."
    image = pixels(page, "photo")
    dark, bright = image[256, 200], image[256, 512]
    assert dark == pytest.approx([120] * 3, abs=3)
    assert bright == pytest.approx([240] * 3, abs=3)


def test_the_map_is_downloaded(page, tmp_path):
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.find_element(By.CSS_SELECTOR, "#samples button[title=red]").click()
    until(page, lambda: "%" in shown(page, "status"))
    choose(page, "k")
    page.find_element(By.ID, "download").click()
    file = tmp_path / "red-keys-layer-3.png"
    until(page, file.is_file)
    assert np.array_equal(np.asarray(Image.open(file).convert("RGB"), np.float32), pixels(page))


def test_a_tiff_is_shown_although_the_browser_cannot(page):
    drop_and_wait(page, photo(kind="TIFF"))
    slide(page, "opacity", 0)
    expected = Image.open(io.BytesIO(photo())).convert("RGB").resize((1024, 683), Image.Resampling.BILINEAR)
    assert np.abs(pixels(page) - np.asarray(expected, np.float32)).mean() < 3


def test_an_unsure_answer_is_called_so(chromium):
    torch.manual_seed(0)
    model = timm.create_model("sima_deit_tiny_patch16_224", **VIT).eval()
    small = replace(photo_model(model, name="small", classes=CLASSES, size=32), unsure_below=0.99)
    set_window(chromium, WIDE)
    with serving(create_app(small, limits=LIMITS)) as served:
        open_page(chromium, served)
        give(chromium, photo())
        until(chromium, lambda: shown(chromium, "status") == "unsure: maybe none of its classes")
        assert shown(chromium, "unsure") == "Unsure: this may be none of the 5 classes that the model knows."
        assert len(chromium.find_elements(By.CSS_SELECTOR, "#guesses li")) == 5
        assert complaints(chromium) == []


def test_a_result_without_maps_and_classes_is_the_photo(page, monkeypatch):
    nothing = analysis.Analysis(32, 32, [], False, [])
    monkeypatch.setattr(analysis.Analyzer, "analyze", lambda *_: nothing)
    give(page, photo())
    until(page, lambda: page.find_element(By.ID, "photo").is_displayed())
    for name in ("map", "controls", "classes"):
        assert not page.find_element(By.ID, name).is_displayed()
    assert shown(page, "classified") == ""


def test_the_words_are_those_of_the_device(page):
    assert shown(page, "drop") == "Drop, paste or choose a photo"
    set_window(page, NARROW)
    assert shown(page, "drop") == "Choose or take a photo"
    assert "Click" not in page.find_element(By.TAG_NAME, "main").text


def test_samples_stand_in_line(page):
    until(page, lambda: len(page.find_elements(By.CSS_SELECTOR, "#samples button")) == 2)
    for window in (WIDE, NARROW):
        set_window(page, window)
        first, second = (one.rect for one in page.find_elements(By.CSS_SELECTOR, "#samples button"))
        assert first["x"] == page.find_element(By.ID, "drop").rect["x"]
        assert (first["y"], first["width"], first["height"]) == (second["y"], second["width"], second["height"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no image at all", "not a readable"),
        (photo()[:60], "broken"),
        (b"\0" * 3 * 2**20, "larger than the allowed 1"),
    ],
    ids=["text", "half a photo", "too large"],
)
def test_a_refused_file_is_explained_and_the_page_goes_on(chromium, served, data, message):
    open_page(chromium, served)
    drop_and_wait(chromium)
    give(chromium, data)
    until(chromium, lambda: "error" in chromium.find_element(By.ID, "status").get_attribute("class"))
    assert message in shown(chromium, "status")
    assert not chromium.find_element(By.ID, "result").is_displayed()  # that of the photo before
    drop_and_wait(chromium)
    assert "error" not in chromium.find_element(By.ID, "status").get_attribute("class")
    assert all("status of 4" in line for line in complaints(chromium))  # the refusals, which Chromium notes


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_the_window_and_follows_the_colors_of_the_system(page, shots, size, dark):
    set_window(page, size, dark=dark)
    page.save_screenshot(str(shots / f"start-{size[0]}-{'dark' if dark else 'light'}.png"))
    drop_and_wait(page)
    assert page.execute_script("return document.documentElement.scrollWidth") <= size[0]
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(21, 23, 27)") is dark
    view, guesses = (page.find_element(By.ID, one).rect for one in ("view", "guesses"))
    beside = guesses["x"] >= view["x"] + view["width"]
    assert beside is (size == WIDE)
    assert view["width"] / view["height"] == pytest.approx(1.5, abs=0.02)
    page.save_screenshot(str(shots / f"photo-{size[0]}-{'dark' if dark else 'light'}.png"))


def test_the_keyboard_alone_reaches_everything(page):
    drop_and_wait(page)
    page.find_element(By.TAG_NAME, "body").click()
    reached = set()
    for _ in range(20):
        ActionChains(page).send_keys(Keys.TAB).perform()
        now = page.switch_to.active_element
        reached.add(now.get_attribute("id") or now.get_attribute("name") or now.get_attribute("title"))
    assert {"file", "red", "blue", "view", "part", "layer", "opacity", "download", "size", "measure"} <= reached


def test_nothing_is_asked_of_other_hosts(page, served):
    drop_and_wait(page)
    asked = page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert asked
    assert [one for one in asked if not one.startswith(served.address)] == []
