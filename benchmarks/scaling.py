"""Time of producing images against their number, the number of evaluations and the number of processes, as ratios.

    torchrun --standalone --nproc_per_node=2 benchmarks/scaling.py

Two processes with one thread each. For the rows "one process" the second one waits at a barrier, so that all cases are
timed in one run, in random order within each repetition; ratios are taken within a repetition, and given as their
median with the smallest and the largest. Writes `results/scaling.json`;
`scale_tables.py` puts it into `docs/scale.md`.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from steindiff import SOLVERS, Sampler, load
from steindiff._distributed import local_only
from steindiff._files import write_json
from steindiff.production import Shards, generate

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "scaling.json"
SOLVER = SOLVERS["dpmpp-2m"]
IMAGES, BATCH = 16, 8
"""Of the first row; a shard holds as many images."""


class Case(NamedTuple):
    """What is timed."""

    images: int
    nfe: int
    processes: int


ONE = Case(IMAGES, 5, 1)
MANY = ONE._replace(images=4 * IMAGES)
TWO = MANY._replace(processes=2)
ROWS = {
    "2 × the images": (ONE._replace(images=2 * IMAGES), ONE, 2.0),
    "4 × the images": (MANY, ONE, 4.0),
    "10 evaluations instead of 5": (ONE._replace(nfe=10), ONE, 2.0),
    "20 evaluations instead of 5": (ONE._replace(nfe=20), ONE, 4.0),
    "one process instead of two": (MANY, TWO, 2.0),
}
"""What the table says: the time of which case over that of which other, and what it would be if cost were linear."""


def seconds(model: Any, case: Case, seed: int) -> float:
    """Wall-clock time until all processes are done."""
    working = dist.get_rank() < case.processes
    sampler = Sampler(SOLVER, "edm", case.nfe)
    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    dist.barrier()
    begun = time.perf_counter()
    if working:
        with nullcontext() if case.processes > 1 else local_only():
            seeds = range(seed, seed + case.images)
            generate(model, sampler, seeds, place[0], shards=Shards(IMAGES, BATCH))
    dist.barrier()
    return time.perf_counter() - begun


def ratios(times: list[dict[Case, float]]) -> list[dict[str, Any]]:
    found = []
    for name, (case, base, linear) in ROWS.items():
        values = sorted(row[case] / row[base] for row in times)
        found.append(
            {
                "name": name,
                "case": case._asdict(),
                "base": base._asdict(),
                "linear": linear,
                "ratio": statistics.median(values),
                "smallest": values[0],
                "largest": values[-1],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = load("cifar10")
    cases = sorted({case for pair in ROWS.values() for case in pair[:2]})
    order = random.Random(options.seed)  # the same in both processes
    seconds(model, TWO, options.seed)  # warm up
    times = []
    for _ in range(options.repetitions):
        order.shuffle(cases)
        times.append({case: seconds(model, case, options.seed) for case in cases})
    if dist.get_rank() == 0:
        write_json(
            RESULTS,
            {
                "command": "torchrun --standalone --nproc_per_node=2 benchmarks/scaling.py",
                "seed": options.seed,
                "device": platform.machine(),
                "threads": 1,
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
                "model": model.name,
                "solver": repr(SOLVER),
                "batch": BATCH,
                "shard_size": IMAGES,
                "network_calls": "as many for each image as evaluations",
                "backward_passes": 0,
                "repetitions": options.repetitions,
                "rows": ratios(times),
            },
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
