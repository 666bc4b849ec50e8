"""What it costs to calibrate the embedded CIFAR-10 model with the settings of `steindiff calibrate`.

    python benchmarks/calibration_cost.py

Sixty-four samples, 24 steps, ten levels probed with two directions on sixteen samples, then 5 evaluations; twice in one
process, the first time with all warm-up of the device. Writes `benchmarks/results/calibration_cost.json`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from recording import Records, machine
from steindiff import SOLVERS
from steindiff.calibrating import calibrate
from steindiff.models import embedded

SEEDS = range(10**6, 10**6 + 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/calibration_cost.json"))
    args = parser.parse_args()

    batch = 64 if args.device == "cuda" else 16
    records = Records(args.out)
    for run in ("first", "again"):
        begun = time.monotonic()
        subject = embedded("cifar10", device=args.device)
        facts = {"batch": batch, "device": args.device}
        solver, shape = SOLVERS["dpmpp-2m"], subject.shape
        made = calibrate(subject.denoisers, solver, subject.schedule, 5, shape, seeds=SEEDS, **facts)
        seconds = time.monotonic() - begun  # what was measured is on the CPU now: nothing is left running
        costs = {name: made.settings[name] for name in ("seed", "samples", "network_calls", "backward_passes")}
        record = {"model": "cifar10", "solver": "dpmpp-2m", "nfe": 5, "run": run, "batch": batch, **costs}
        records.add(
            {**record, "seconds": round(seconds, 2), "threads": torch.get_num_threads(), **machine(args.device)}
        )


if __name__ == "__main__":
    main()
