"""Debian's Chromium without a window."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --force-device-scale-factor=1"
).split()


@pytest.fixture(scope="session")
def chromium():
    """A browser whose console is read; one for all tests, since it takes seconds to start."""
    if not CHROMIUM or not DRIVER:
        pytest.skip("there is no chromium or no chromedriver here: `make browser` installs them")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    # In /tmp, wherever TMPDIR is: Chromium opens a socket there, whose path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="chromium-", ignore_cleanup_errors=True) as folder:
        options = Options()
        options.binary_location = CHROMIUM
        for flag in [*FLAGS, f"--user-data-dir={folder}"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER, env={**os.environ, "TMPDIR": "/tmp"}))
        driver.set_script_timeout(60)
        yield driver
        driver.quit()


@pytest.fixture(scope="session")
def shots():
    """Where pictures of the pages go: to be looked at, not kept."""
    folder = Path(__file__).parents[2] / "runs" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
