"""Chromium without a window, driven by Playwright for Python: Debian's package, or another that is on the PATH."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Where the browser is; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=arguments)
        yield browser
        browser.close()
