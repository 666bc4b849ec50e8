"""Every pipeline people run: verified against itself, or refused in one sentence."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from hosts import HOSTS
from support import PAGE, RESULTS, TOLERANCE, examine, table

from pages import filled

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:In CPU autocast:UserWarning"
)


def committed() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", HOSTS)
def test_verified_or_refused(name: str):
    """Our loop over the rebuilt denoiser gives the pipeline's own latents, or one sentence says why it cannot."""
    host = HOSTS[name]
    row = examine(name, host)
    if host.refused:
        assert re.search(host.refused, row["refused"])
        assert "\n" not in row["refused"]
        assert row["refused"].split(":")[0].split(" = ")[0] in {"pipe", "scheduler", "skip_guidance_layers"}
    else:
        assert "refused" not in row, row
        assert row["relative_difference"] <= TOLERANCE
        assert row["extra_calls"] == 0
        assert row["bands"] > 1
    known = committed()[name]
    fixed = ("pipeline", "solver", "note", "refused", "bands", "shape", "network_calls")
    assert {key: row.get(key) for key in fixed} == {key: known.get(key) for key in fixed}


def test_the_matrix_covers_the_classes_people_run():
    assert len({row["pipeline"] for row in committed().values()}) >= 40


def test_the_page_shows_the_matrix():
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page, "support", table(list(committed().values())))
