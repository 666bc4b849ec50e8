"""How far the end of a fine trajectory is from the limit, by its number of steps, beside plain solvers.

    python benchmarks/fine_trajectory.py
    python benchmarks/figures.py              # the table of docs/method.md

What is fitted to a trajectory cannot end nearer to the limit than it does, and a distance to many-step samples says
nothing finer than those samples are. The limit is the fine trajectory's solver in 120 steps.
Writes `benchmarks/results/fine_trajectory.json`: `rms` of images in [−1, 1], and the mismatch J of `steindiff.search`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from comparison import TEACHER
from recording import machine, options
from steindiff import GRIDS, Sampler, load, reference_run, zoo
from steindiff._files import write_json
from steindiff.grids import LogSNR
from steindiff.search import Mismatch

FIRST_SEED = 3 * 10**6
"""Apart from seeds of calibration and of evaluation."""
LIMIT = 120
STEPS = (24, 30, 36, 45, 60)
PLAIN = ("dpmpp-3m", "unipc-bh1-3", "ipndm-4")
BUDGETS = (10, 15, 20)


class Run(NamedTuple):
    """What is measured: a fine trajectory, the many-step samples, or a plain solver on the log-SNR grid."""

    solver: str
    nfe: int


def runs() -> Iterator[Run]:
    yield from (Run("fine trajectory", steps) for steps in STEPS)
    yield Run("many steps", TEACHER[2])
    yield from (Run(solver, nfe) for nfe in BUDGETS for solver in PLAIN)


def sampler(run: Run, to_zero: bool) -> Sampler:
    """The many-step sampler, or a plain one."""
    if run.solver == "many steps":
        solver, grid, nfe = TEACHER
        return Sampler(solver, GRIDS[grid], nfe)
    return Sampler(run.solver, LogSNR(to_zero=to_zero), run.nfe)


def main() -> None:
    parser = options(__doc__, "fine_trajectory")
    parser.add_argument("--model", default="cifar10", choices=zoo.names())
    parser.set_defaults(samples=16, batch=16)
    args = parser.parse_args()
    model = load(args.model, device=args.device, forward_only=True)
    seeds = range(FIRST_SEED, FIRST_SEED + args.samples)
    limit = reference_run(model, seeds, steps=LIMIT, batch=args.batch)
    objective = Mismatch(limit.basis, limit.samples.to(args.device), limit.groups())
    records = []
    for run in runs():
        if run.solver == "fine trajectory":
            x = reference_run(model, seeds, steps=run.nfe, batch=args.batch).samples
        else:
            x = sampler(run, limit.to_zero)(model, seeds, batch=args.batch).x.cpu()
        rms = float((x - limit.samples).square().mean().sqrt())
        cost = {"network_calls": run.nfe, "backward_passes": 0}
        record = {"model": args.model, **run._asdict(), **cost, "seed": FIRST_SEED, "samples": args.samples}
        records.append({**record, "rms": rms, "mismatch": objective(x.to(args.device)), **machine(args.device)})
        print(run, rms, flush=True)
    write_json(args.out, records)


if __name__ == "__main__":
    main()
