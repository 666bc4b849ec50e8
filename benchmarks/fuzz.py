"""Fuzz every reader of files, and what hosts hand over: damaged documents, headers, names, settings.

    python benchmarks/fuzz.py

Runs tests/fuzz with `--cases` cases a test, drawn from `--seed`; each must be read or refused by the documented error,
in at most 200 MB. Writes `benchmarks/results/fuzz.json`, test by test, and goes on where it stopped;
`benchmarks/scale_tables.py` puts it into `docs/scale.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from recording import machine
from steindiff._files import write_json

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "fuzz.json"
LIBRARIES = ("diffusers", "hypothesis", "numpy", "pillow", "safetensors")


class Record:
    """A pytest plugin that writes down what tests/fuzz/conftest.py says about each test.

    Args:
        path: of the file; what is in it stays, if it was made in the same way.
        facts: how.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        known = json.loads(path.read_text()) if path.exists() else {}
        self.path, self.facts = path, facts
        self.tests: dict[str, dict[str, Any]] = known["tests"] if facts.items() <= known.items() else {}
        self.failed: set[str] = set()

    @property
    def done(self) -> list[str]:
        return [name for name, found in self.tests.items() if not found["failures"]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        found = dict(report.user_properties)
        if report.when == "teardown" and "reader" in found:
            found["failures"] = max(found["failures"], report.nodeid in self.failed)  # an @example is not counted
            self.tests[report.nodeid] = found
            write_json(self.path, {**self.facts, "tests": dict(sorted(self.tests.items()))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=2000, help="of every test")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--jobs", default="auto", help="processes")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    facts = {"seed": arguments.seed, **machine("cpu")}
    facts["versions"] |= {name: version(name) for name in LIBRARIES}
    os.environ |= {"HYPOTHESIS_PROFILE": "fuzz", "FUZZ_CASES": str(arguments.cases)}
    os.chdir(ROOT)
    record = Record(arguments.out, {"cases": arguments.cases, **facts})
    options = ["-v", "-n", arguments.jobs, "-m", "reader", f"--hypothesis-seed={arguments.seed}"]
    sys.exit(pytest.main([*options, *(f"--deselect={name}" for name in record.done), "tests/fuzz"], plugins=[record]))


if __name__ == "__main__":
    main()
