"""Tables in README and docs are what their command makes of the committed records."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import comparison_tables
import figures
import reproduction
import scale_tables
import speed
from pages import filled

ROOT = Path(__file__).parent.parent
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
MODULES = (comparison_tables, figures, reproduction, scale_tables, speed)
ELSEWHERE = {"support"}
"""Tested in integrations/test_support.py."""


@cache
def made(module: ModuleType) -> dict[str, str]:
    return module.tables()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_tables_are_what_the_records_say(module: ModuleType):
    for name, text in made(module).items():
        there = [page for page, words in PAGES.items() if f"<!-- table:{name} -->" in words]
        assert there, f"no page has the table {name}"
        for page in there:
            assert filled(PAGES[page], name, text) == PAGES[page], f"run python benchmarks/{module.__name__}.py"


@pytest.mark.parametrize("records", [figures.SMALL, figures.LARGE], ids=["small", "large"])
def test_figures_are_of_one_model_and_one_record_a_cell(records: list[dict[str, Any]]):
    """Records of several networks lie in one file."""
    assert {record["model"] for record in records} == {figures.MODEL}
    cells = [(record["solver"], record["method"], record["nfe"]) for record in records]
    assert len(cells) == len(set(cells)) > 0


def test_every_table_has_a_command():
    marks = {name for words in PAGES.values() for name in re.findall("<!-- table:([^ ]+) -->", words)}
    assert marks == {name for module in MODULES for name in made(module)} | ELSEWHERE


def test_a_table_goes_between_its_marks():
    once = filled("before\n<!-- table:a -->\nafter\n", "a", "| x |")
    assert once == "before\n<!-- table:a -->\n\n| x |\n\n<!-- /table:a -->\nafter\n"
    assert filled(once, "a", "| x |") == once
    assert filled(once, "b", "| y |") == once
