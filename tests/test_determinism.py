"""What docs/scale.md promises to stay equal, and by how much it may differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import determinism

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", [name for name in determinism.CLAIMS if name not in ("processes", "kills")])
def test_promise(name: str):
    if not determinism.measurable(name):
        pytest.skip("there is no GPU here")
    claim = determinism.CLAIMS[name]
    found = claim.measure()
    assert claim.promise is None or found <= claim.promise


def test_the_page_says_what_is_tested():
    """The drills of tests/test_production.py test the other two rows."""
    recorded = json.loads((determinism.RESULTS / "determinism.json").read_text())["claims"]
    assert {name: row["promise"] for name, row in recorded.items()} == {
        name: claim.promise for name, claim in determinism.CLAIMS.items()
    }
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for claim in determinism.CLAIMS.values():
        assert f"| {claim.change} | {determinism.spelled(claim.promise)} |" in page
