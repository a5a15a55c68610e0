"""What a visitor does to a page and sees of it."""

import base64
import io

from PIL import Image
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WIDE, NARROW = (1280, 720), (390, 844)
# What a hand or the clipboard would do: a File made in the page, in an event of the browser.
GIVE = """
const [encoded, type, kind] = arguments;
const bytes = Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0));
const held = new DataTransfer();
held.items.add(new File([bytes], "photo", { type }));
document.dispatchEvent(kind === "paste"
  ? new ClipboardEvent("paste", { clipboardData: held, bubbles: true })
  : new DragEvent(kind, { dataTransfer: held, bubbles: true, cancelable: true }));
"""


def set_window(driver, size, *, dark=False):
    """Give the page a size in CSS pixels, as on a phone where it is narrow, and a color scheme."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def complaints(driver):
    """What the page wrote to the console since this was last asked: script errors, breaches of the policy."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def until(driver, met, seconds=30):
    return WebDriverWait(driver, seconds, poll_frequency=0.03).until(lambda _: met())


def shown(driver, name):
    return driver.find_element(By.ID, name).text


def in_window(driver, name):
    """Whether all of an element is in the window, without scrolling."""
    box, height = driver.find_element(By.ID, name).rect, driver.execute_script("return window.innerHeight")
    scrolled = driver.execute_script("return window.scrollY")
    return box["height"] > 0 and scrolled <= box["y"] and box["y"] + box["height"] <= scrolled + height


def photo(size=(90, 60), kind="PNG"):
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


def give(driver, data, kind="drop", media="image/png"):
    driver.execute_script(GIVE, base64.b64encode(data).decode(), media, kind)


def slide(driver, name, value):
    """Move a slider and let go of it."""
    driver.execute_script(
        "const [slider, value] = arguments; slider.value = value;"
        "for (const kind of ['input', 'change']) slider.dispatchEvent(new Event(kind, { bubbles: true }));",
        driver.find_element(By.ID, name),
        value,
    )


def open_page(driver, served):
    """Open the page of a server, and wait for its model."""
    driver.get("about:blank")  # so that nothing of the page before is taken for this one
    complaints(driver)
    driver.get(served.address)
    until(driver, lambda: "loading" not in shown(driver, "model"))
