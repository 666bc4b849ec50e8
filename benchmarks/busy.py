"""The test suite beside processes that never rest: no test may depend on the clock.

    python benchmarks/busy.py

Runs the suite `--times` times beside `--busy` processes that each keep a core at work. There is no time limit; a test
that waits for one would fail. Writes `benchmarks/results/busy.json` after every run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

from recording import machine
from steindiff._files import write_json

ROOT = Path(__file__).parent.parent
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed)")


def spin() -> None:
    """Work without end, or until whoever started it is gone."""
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():
        sum(i * i for i in range(10**6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="tests to run; default all")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "busy.json")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", "-q", *arguments.paths]
    runs: list[dict[str, int]] = []
    for _ in range(arguments.times):
        crowd = [multiprocessing.Process(target=spin, daemon=True) for _ in range(arguments.busy)]
        for process in crowd:
            process.start()
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        awake = sum(process.is_alive() for process in crowd)
        for process in crowd:
            process.terminate()
        print(done.stdout[-4000:], flush=True)
        counts = {kind: int(count) for count, kind in COUNTS.findall(done.stdout.splitlines()[-1])}
        runs.append({"exit": done.returncode, "busy processes at the end": awake, **counts})
        facts = {"tests": arguments.paths or ["all"], "busy": arguments.busy, **machine("cpu")}
        write_json(arguments.out, {**facts, "runs": runs})
    sys.exit(any(run["exit"] for run in runs))


if __name__ == "__main__":
    main()
