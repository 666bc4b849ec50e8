"""Chromium for the tests that open a page."""

from __future__ import annotations

import os
import shutil

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str:
    """Where it is; without it a test is skipped, in continuous integration it fails."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        message = "no Chromium found: on Debian, apt-get install chromium"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return found
