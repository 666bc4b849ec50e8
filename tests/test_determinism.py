"""What docs/scale.md promises to stay equal, by how much it may differ, and what was tried."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import determinism
from damage import MOST

FUZZ = Path(__file__).parent / "fuzz"


@pytest.mark.parametrize("name", [name for name in determinism.CLAIMS if name not in ("processes", "kills")])
def test_promise(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without a GPU a CPU stands in for it: the measurement runs, and finds nothing."""
    if not determinism.measurable(name):
        monkeypatch.setattr(determinism, "GPU", "cpu")
    claim = determinism.CLAIMS[name]
    found = claim.measure()
    assert claim.promise is None or found <= claim.promise


def test_the_record_is_of_what_is_tested():
    """The drills of tests/test_production.py test the other two rows."""
    recorded = json.loads((determinism.RESULTS / "determinism.json").read_text())["claims"]
    assert {name: (row["change"], row["promise"]) for name, row in recorded.items()} == {
        name: (claim.change, claim.promise) for name, claim in determinism.CLAIMS.items()
    }


def test_every_reader_was_fuzzed():
    """`make fuzz` has tried each test 2,000 times, without a failure and within the memory."""
    tests = json.loads((determinism.RESULTS / "fuzz.json").read_text())["tests"]
    marked = re.compile(r'^@pytest\.mark\.reader\("(.+)"\)\n(?:[@ )].*\n)*def (test_\w+)', re.MULTILINE)
    there = {(path.name, *found) for path in FUZZ.glob("test_*.py") for found in marked.findall(path.read_text())}
    assert len(there) > 20
    named = re.compile(r"tests/fuzz/(\w+\.py)::(test_\w+)")
    assert {
        (*(found := named.match(name)).groups()[:1], test["reader"], found[2]) for name, test in tests.items()
    } == there
    for name, test in tests.items():
        assert test["cases"] >= 2000, name
        assert test["failures"] == 0, name
        assert test["peak_bytes"] <= MOST, name
