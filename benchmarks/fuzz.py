"""Fuzz every reader of files, and what hosts hand over: damaged documents, headers, names, settings.

    python benchmarks/fuzz.py

Runs tests/fuzz with `--cases` cases a test, drawn from `--seed`; each must be read or refused by the documented error,
in at most 200 MB. Writes `benchmarks/results/fuzz.json`, file by file; `docs/scale.md` quotes it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from recording import machine
from steindiff._files import write_json

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "fuzz.json"
FOUND = re.compile(r"^(tests/fuzz/\S+?):\n.*?(\d+) passing, (\d+) failing, and \d+ invalid", re.MULTILINE | re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=2000, help="of every test")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--jobs", default="auto", help="processes")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    facts = {"seed": arguments.seed, "cases": arguments.cases, **machine("cpu")}
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    tests = known["tests"] if {name: known.get(name) for name in facts} == facts else {}
    failed = False
    for path in sorted((ROOT / "tests" / "fuzz").glob("test_*.py")):
        name = str(path.relative_to(ROOT))
        if any(test.startswith(name) for test in tests):
            continue
        options = ["-n", arguments.jobs, f"--hypothesis-seed={arguments.seed}", "--hypothesis-show-statistics"]
        environment = {**os.environ, "HYPOTHESIS_PROFILE": "fuzz", "FUZZ_CASES": str(arguments.cases)}
        command = [sys.executable, "-m", "pytest", "-q", *options, name]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, flush=True)
        if done.returncode:
            failed = True
            continue
        for test, passing, failing in FOUND.findall(done.stdout):
            tests[test] = {"tried": int(passing) + int(failing), "held": int(passing)}
        write_json(arguments.out, {**facts, "tests": dict(sorted(tests.items()))})
    sys.exit(failed)


if __name__ == "__main__":
    main()
