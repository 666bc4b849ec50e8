"""A folder for damaged files: `make fuzz` tries 2,000 cases of each test, the suite 40."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")
