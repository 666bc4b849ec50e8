"""A folder for damaged files, and what a test of a reader found: `make fuzz` tries 2,000 cases a test, the suite 40."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import damage

COUNTS = re.compile(r"(\d+) passing(?: examples)?, (\d+) failing")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    damage.TAKEN["most"], start = 0, time.process_time()
    try:
        yield
    finally:
        found = {"peak_bytes": damage.TAKEN["most"], "cpu_seconds": round(time.process_time() - start, 1)}
        item.user_properties += found.items()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    counts = [tuple(map(int, pair)) for pair in COUNTS.findall(getattr(item, "hypothesis_statistics", ""))]
    if counts and (reader := item.get_closest_marker("reader")):
        passing, failing = map(sum, zip(*counts, strict=True))
        found = {"reader": reader.args[0], "cases": passing + failing, "failures": failing}
        item.user_properties += found.items()
