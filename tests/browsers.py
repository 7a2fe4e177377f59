"""A browser without a window, for pages of HTML."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
NEEDS_BROWSER = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs a browser: apt-get install chromium chromium-driver"
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
]


@contextmanager
def opened(folder: Path) -> Iterator[Any]:
    """A browser with a profile of its own; skips without selenium."""
    pytest.importorskip("selenium", reason="needs selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def screenshots(folder: Path) -> Path:
    """Where they go."""
    folder = Path(os.environ.get("KVLOOM_SCREENSHOTS", folder))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wait(condition: Any) -> Any:
    """What ``condition`` returns, as soon as that is true."""
    while not (found := condition()):
        time.sleep(0.05)
    return found
