"""diffusers' own tests of its schedulers, run on the stock classes and on ours in their place.

    python benchmarks/scheduler_suite.py CHECKOUT

CHECKOUT is a clone of diffusers' repository, whose tests are not in its package; the installed package is what they
run on. Tests of another version than the installed one may fail on stock: what counts is that ours fare alike.
"""

from __future__ import annotations

import argparse
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import pytest

from recording import Records, machine
from steindiff.integrations import diffusers as ours

SUITES = {
    "dpm_multi": ours.SteinDPMSolverMultistepScheduler,
    "edm_dpmsolver_multistep": ours.SteinEDMDPMSolverMultistepScheduler,
    "heun": ours.SteinHeunDiscreteScheduler,
    "unipc": ours.SteinUniPCMultistepScheduler,
}
"""The file of tests of a stock class → our class."""


class Outcomes:
    """A pytest plugin: puts classes into the tests, and keeps how each test ended.

    Args:
        places: stock class → the class that is tested in its place.
    """

    def __init__(self, places: dict[type, type]) -> None:
        self._places = places
        self.ended: dict[str, str] = {}
        self.tested: set[str] = set()

    def pytest_pycollect_makeitem(self, obj: Any) -> None:
        """Before a class of tests is collected."""
        if inspect.isclass(obj) and "scheduler_classes" in vars(obj):
            obj.scheduler_classes = tuple(self._places.get(found, found) for found in obj.scheduler_classes)
            self.tested |= {found.__name__ for found in obj.scheduler_classes}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each stage of a test."""
        if report.when == "call" or report.outcome != "passed":
            self.ended[report.nodeid.split("/")[-1]] = report.outcome


def run(checkout: Path, places: dict[type, type]) -> Outcomes:
    """Run the tests with some classes in the place of others."""
    watching = Outcomes(places)
    files = [str(checkout / f"tests/schedulers/test_scheduler_{name}.py") for name in SUITES]
    config = ["-c", str(checkout / "pyproject.toml"), f"--rootdir={checkout}", "-p", "no:cacheprovider"]
    pytest.main([*files, *config, "-q", "--tb=line", "--assert=plain", "--noconftest"], plugins=[watching])
    return watching


def main() -> None:
    """Run both, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a clone of diffusers' repository")
    parser.add_argument("--commit", required=True, help="of the clone")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scheduler_suite.json"))
    given = parser.parse_args()
    # Ours first: a replaced class stays replaced in the module pytest has imported, so stock is put back by name.
    with_ours = run(given.checkout, {cls.stock: cls for cls in SUITES.values()})
    with_stock = run(given.checkout, {cls: cls.stock for cls in SUITES.values()})
    a, b = with_stock.ended, with_ours.ended
    if not (a and b):
        raise SystemExit(f"{given.checkout}: no test ran; give a whole clone of diffusers' repository")
    Records(given.out).add(
        {
            "tests": "diffusers, tests/schedulers",
            "commit": given.commit,
            "stock": {"classes": sorted(with_stock.tested), **Counter(a.values())},
            "ours": {"classes": sorted(with_ours.tested), **Counter(b.values())},
            "failed_on_both": sorted(name for name in a if a[name] == b.get(name) == "failed"),
            "differ": sorted(name for name in a | b if a.get(name) != b.get(name)),
            **machine("cpu"),
            "diffusers": diffusers.__version__,
        }
    )


if __name__ == "__main__":
    main()
