"""Make calibrations to ship with the package.

    python benchmarks/calibrations.py fashion --solver dpmpp-2m --nfe 5,8

Those of cifar10 were kept by `benchmarks/fid.py calibrated --calibrations FOLDER`, so that what ships is what was
measured. One survey of the model serves all budgets. The cost and settings of each calibration are in its own file.
"""

from __future__ import annotations

import argparse
import time

import torch
from steindiff.zoo.shipped import location

from steindiff import SOLVERS
from steindiff.calibrating import Recipe, calibrate
from steindiff.models import MODELS
from steindiff.reference import reference_run
from steindiff.zoo import names

SEEDS = 10**6
"""First seed; far from the ones anybody compares or evaluates on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=names())
    parser.add_argument("--solver", choices=SOLVERS, default="dpmpp-2m")
    parser.add_argument("--nfe", default="4,5,6,8,10")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    begun = time.monotonic()
    subject = MODELS[args.model](device=args.device)
    seeds = range(SEEDS, SEEDS + args.samples)
    measured = reference_run(
        subject.denoisers,
        subject.schedule,
        subject.shape,
        **Recipe().reference_run(seeds),
        batch=args.batch,
        device=args.device,
    )
    print(f"survey: {time.monotonic() - begun:.0f} s", flush=True)
    solver = SOLVERS[args.solver]
    for nfe in map(int, args.nfe.split(",")):
        path = location(args.model, solver, nfe)
        assert path is not None, "every solver of the table has a name"
        calibration = calibrate(
            subject.denoisers,
            solver,
            subject.schedule,
            nfe,
            subject.shape,
            measured=measured,
            batch=args.batch,
            device=args.device,
            settings={"model": args.model, "guidance": 1.0},
        )
        calibration.save(path)
        print(f"{path.name}: {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
