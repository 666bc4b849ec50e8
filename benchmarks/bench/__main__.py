"""`python -m bench`: the benchmark on machines without the command line's packages.

    python -m bench --device cuda --out results

Writes `bench-<device>.json` and, where matplotlib is installed, `bench-<device>.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from bench.report import markdown
from bench.scope import SCOPES
from bench.sections import SECTIONS, bench
from bench.writing import write
from steindiff import load, zoo
from steindiff._environment import available
from steindiff._files import folder
from steindiff.solvers import SOLVERS


def main() -> None:
    """Parse the arguments, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cifar10", choices=zoo.names())
    parser.add_argument("--solver", default="dpmpp-2m", choices=SOLVERS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nfe", type=int, default=5)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--section", nargs="*", choices=SECTIONS)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    kind = asked.device.partition(":")[0]
    there = available()
    if kind not in there:
        parser.error(f"argument --device must be one of {', '.join(there)} here, got {asked.device!r}")
    for name in ("nfe", "repeats"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name} must be a whole number >= 1, got {value}")
    folder(asked.out)
    scope = SCOPES[kind]
    if asked.repeats is not None:
        scope = dataclasses.replace(scope, repeats=asked.repeats)
    begun = time.perf_counter()

    def advance(name: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {name}", file=sys.stderr, flush=True)

    subject = load(asked.model, device=asked.device)
    result = bench(subject, SOLVERS[asked.solver], asked.nfe, scope, sections=asked.section, advance=advance)
    paths = write(result, asked.out, lambda text: print(text, file=sys.stderr))
    advance("done")
    print(markdown(result), *paths, sep="\n")


if __name__ == "__main__":
    main()
