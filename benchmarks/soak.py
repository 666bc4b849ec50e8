"""Fifty thousand tiny images through kills, a full disk and a changing number of processes; and every drill, counted.

    python benchmarks/soak.py

Everything that goes wrong is drawn from `SEED` and happens on progress (so many steps were told), never after a time.
Writes `benchmarks/results/soak.json` and `benchmarks/results/drills.json`; `docs/scale.md` quotes both.
"""

from __future__ import annotations

import argparse
import errno
import random
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import drills
from recording import machine
from steindiff._files import write_json
from steindiff.production import Images, verify

SEED = 18
RESULTS = Path(__file__).parent / "results"
SHARD, BATCH = 250, 125


def make(folder: Path, count: int, **more: Any) -> Any:
    return drills.make(folder, count, size=SHARD, batch=BATCH, **more)


def killed(folder: Path, count: int, rng: random.Random, number: int) -> bool:
    """One process, ended by a signal after some steps; whether it was at work."""
    steps, slack = rng.randint(2, 30), rng.randint(1, 16)
    run = drills.Watched(lambda tick: make(folder, count, tick=tick), steps, slack)
    return run.reached and run.kill(number) == -number


def crowded(folder: Path, count: int, rng: random.Random, world: int) -> bool:
    """Several ranks, each ending itself after some images of its own."""
    enough = [rng.randint(1, 5) * BATCH for _ in range(world)]

    def work(rank: int) -> None:
        made = []

        def advance(amount: int) -> None:
            made.append(amount)
            if sum(made) >= enough[rank]:
                drills.die()

        make(folder, count, listener=drills.Ears(advance=advance))

    return set(drills.group(folder.parent, world, work)) <= {0, -signal.SIGKILL}


def full(folder: Path, count: int, rng: random.Random) -> bool:
    """A disk that takes no more: no file may grow beyond a part of a shard."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randint(500, 4000), resource.RLIM_INFINITY))
        assert drills.refusal(lambda: make(folder, count)).errno == errno.EFBIG

    return drills.result(drills.fork(work)) == 0


def damaged(folder: Path, rng: random.Random) -> bool:
    """A shard loses its end, or a bit of it turns; whether it is no longer taken for sound."""
    shards = sorted(folder.glob("shard-*.safetensors"))
    if not shards:
        return True
    path = rng.choice(shards)
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1
    path.write_bytes(data[: rng.choice([len(data), len(data) // 2])])
    return int(path.name[6:11]) not in verify(folder).sound


def soak(count: int, place: Path) -> dict[str, Any]:
    """What was tried, what held, and how the set compares with one made in one go."""
    rng = random.Random(SEED)
    whole, torn = place / "whole", place / "torn" / "set"
    make(whole, count)
    torn.parent.mkdir()
    tried: dict[str, list[bool]] = {}
    while not (torn / "manifest.json").exists() or not verify(torn).complete:
        faults = {
            "SIGKILL": lambda: killed(torn, count, rng, signal.SIGKILL),
            "SIGTERM": lambda: killed(torn, count, rng, signal.SIGTERM),
            "2 processes, killed": lambda: crowded(torn, count, rng, 2),
            "3 processes, killed": lambda: crowded(torn, count, rng, 3),
            "no room for a file": lambda: full(torn, count, rng),
            "a damaged shard": lambda: damaged(torn, rng),
        }
        sound = len(verify(torn).sound) if (torn / "manifest.json").exists() else 0
        if sound > 0.95 * count / SHARD:  # the rest is left to one that nobody disturbs
            make(torn, count)
            break
        name = rng.choice(sorted(faults))
        tried.setdefault(name, []).append(faults[name]())
    first, second = ({int(s): i for shard in Images(f).shards() for s, i in zip(shard.seeds, shard.images, strict=True)}
                     for f in (whole, torn))  # fmt: skip
    seeds = [int(s) for shard in Images(torn).shards() for s in shard.seeds]
    return {
        "images": count,
        "lost": len(first.keys() - second.keys()),
        "duplicated": len(seeds) - len(set(seeds)),
        "different": sum(not torch.equal(image, second[seed]) for seed, image in first.items() if seed in second),
        "files equal to the byte": drills.files(whole) == drills.files(torn),
        "unfinished files left": len(drills.leftovers(torn)),
        "faults": {name: {"tried": len(held), "held": sum(held)} for name, held in sorted(tried.items())},
    }


def run_drills() -> dict[str, dict[str, Any]]:
    """Every drill of the test suite, each in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, drills.__file__, *drills.DRILLS, place]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = {}
    for line in done.stdout.splitlines():
        name, *counts = line.split()
        what = (drills.DRILLS[name].__doc__ or "").split(".")[0]
        found[name] = {"what": what, **dict(zip(("exit", "tried", "held"), map(int, counts), strict=True))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"seed": SEED, "nfe": drills.PLAIN.nfe, "network_calls": drills.PLAIN.nfe, "backward_passes": 0}
    with tempfile.TemporaryDirectory() as place:
        found = soak(arguments.images, Path(place))
    write_json(arguments.out / "soak.json", {**facts, **machine("cpu"), **found})
    write_json(arguments.out / "drills.json", {**facts, **machine("cpu"), "drills": run_drills()})


if __name__ == "__main__":
    main()
