"""The page of a detector in Chromium, and the page of a model of features."""

import pytest
import timm
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("selenium")

from driving import NARROW, WIDE, complaints, give, in_window, open_page, photo, set_window, shown, slide, until
from selenium.webdriver.common.by import By

from serving import serving
from sima_attn.explain.photo_model import photo_model
from sima_attn.serve.app import create_app
from small_detectors import CLASSES, small_detector


@pytest.fixture(scope="module")
def served():
    with serving(create_app(small_detector(masks=True))) as served:
        yield served


@pytest.fixture
def page(chromium, served):
    """The page, freshly opened; whatever a test did, it wrote no error to the console."""
    set_window(chromium, WIDE)
    open_page(chromium, served)
    yield chromium
    assert complaints(chromium) == []


def drop_and_find(driver, data):
    """Drop a photo, and lower the score, since a detector without training is sure of nothing."""
    give(driver, data)
    until(driver, lambda: shown(driver, "status") == "No object has this score: lower it.")
    slide(driver, "threshold", 5)
    until(driver, lambda: shown(driver, "status").endswith("objects"))


@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["desktop", "phone"])
@pytest.mark.parametrize("shape", [(90, 60), (50, 100)], ids=["wide", "tall"])
def test_photo_and_score_are_in_one_window(page, shots, window, shape):
    set_window(page, window)
    drop_and_find(page, photo(shape))
    assert shown(page, "threshold-shown") == "5 %"
    for name in ("photo", "threshold"):
        assert in_window(page, name), name
    assert page.execute_script("return document.documentElement.scrollWidth") <= window[0]
    box = page.find_element(By.ID, "photo").rect
    assert box["width"] / box["height"] == pytest.approx(shape[0] / shape[1], abs=0.02)
    page.save_screenshot(str(shots / f"detector-{window[0]}-{shape[0]}.png"))


def test_objects_are_listed_with_their_scores(page):
    drop_and_find(page, photo())
    names, scores = zip(
        *(one.text.split("\n") for one in page.find_elements(By.CSS_SELECTOR, "#guesses li")), strict=True
    )
    assert shown(page, "status") == f"{len(names)} objects"
    assert set(names) <= set(CLASSES)
    percents = [float(score.rstrip(" %")) for score in scores]
    assert percents == sorted(percents, reverse=True)


def test_the_words_are_those_of_the_device(page):
    assert shown(page, "drop") == "Drop, paste or choose a photo"
    assert shown(page, "known") == "The 2 classes that it knows"
    set_window(page, NARROW)
    assert shown(page, "drop") == "Choose or take a photo"


def test_a_model_of_features_shows_maps_and_speaks_of_no_classes(chromium):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    model = timm.create_model("sima_deit_tiny_patch16_224", **sizes).eval()
    set_window(chromium, WIDE)
    with serving(create_app(photo_model(model, name="features", size=32))) as served:
        open_page(chromium, served)
        give(chromium, photo())
        until(chromium, lambda: in_window(chromium, "view"))
        assert "parameters" in shown(chromium, "facts")
        assert "unsure" not in chromium.find_element(By.TAG_NAME, "main").text
        assert not chromium.find_element(By.ID, "classes").is_displayed()
        assert complaints(chromium) == []
