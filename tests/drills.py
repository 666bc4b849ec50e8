"""Faults on purpose, for tests/test_production.py: `python tests/drills.py NAME … FOLDER`.

The process imports everything once and forks for each drill, which forks the workers it kills. It prints a line a
drill: its name, exit status, faults tried and held.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steindiff.cli.process_group import meet
from steindiff.corrections import Relaxation
from steindiff.denoisers.base import CountingDenoiser, Denoiser
from steindiff.grids import GRIDS
from steindiff.levels import Level
from steindiff.model import Model
from steindiff.probes import VJP
from steindiff.production import GenerateResult, Images, Listener, Shards, generate, verify
from steindiff.sampler import Sampler, levels_for
from steindiff.schedules import SCHEDULES
from steindiff.solvers import SOLVERS

SHAPE = (1, 4, 4)
CLASSES = 3
SOLVER = SOLVERS["dpmpp-2m"]
LEVELS = levels_for(SOLVER, GRIDS["edm"], SCHEDULES["edm"], 4)
PLAIN = Sampler(SOLVER, LEVELS)
RELAXED = Sampler(SOLVER, LEVELS, correction=Relaxation(VJP(2)))


def label(seed: int) -> int:
    return seed % CLASSES


class Toy(CountingDenoiser):
    """A conditional model in closed form that says NaN at one call if its batch holds a given seed."""

    def __init__(
        self, seeds: Sequence[int], scale: float, nan: tuple[int, int] | None, tick: Callable[[], None]
    ) -> None:
        faces = torch.linspace(-1.5, 1.5, CLASSES * 16).reshape(CLASSES, *SHAPE).sin()
        self.means = scale * faces[[label(seed) for seed in seeds]]
        self.bad = nan[1] if nan and nan[0] in seeds else 0
        self.tick = tick

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        self.tick()
        if self.calls == self.bad:
            return torch.full_like(x, float("nan"))
        g = 0.1 * level.alpha / (0.1 * level.alpha**2 + level.sigma**2)
        return self.means + (g * (x - level.alpha * self.means)).tanh()


def nothing() -> None:
    """What a step of a run that nobody watches tells."""


def model(
    scale: float = 1.0, nan: tuple[int, int] | None = None, tick: Callable[[], None] = nothing, name: str = "toy"
) -> Model:
    def denoisers(seeds: Sequence[int]) -> Denoiser:
        return Toy(seeds, scale, nan, tick)

    return Model(denoisers, SCHEDULES["edm"], SHAPE, name=name).trust()  # every call counts here


class Ears(Listener):
    """Tells functions what it hears."""

    def __init__(self, **functions: Callable[[Any], None]) -> None:
        vars(self).update(functions)


def make(
    folder: Path,
    count: int = 18,
    sampler: Sampler = PLAIN,
    listener: Listener | None = None,
    of: Model | None = None,
    tick: Callable[[], None] = nothing,
    **cut,
) -> GenerateResult:
    """Eighteen images in shards of four, sampled by three at most."""
    shards = Shards(**{"size": 4, "batch": 3, "labels": label, **cut})
    seeds = range(5, 5 + count)
    return generate(of or model(tick=tick), sampler, seeds, folder, shards=shards, listener=listener)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def fork(work: Callable[[], object]) -> int:
    """Start a process; its exit status is 0 if the work was done."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def result(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Score:
    """How many faults this process tried, and how many of them held: what follows a fault was as it should be."""

    tried = held = 0

    @classmethod
    @contextmanager
    def fault(cls) -> Iterator[None]:
        """One fault and what is checked after it."""
        cls.tried += 1
        yield
        cls.held += 1


class Watched:
    """Work in a process of its own that tells its steps, and is killed once it has made some of them.

    The kill comes at any moment after step `n`; the work waits at step `n + slack`, so it is never over before.
    """

    def __init__(self, work: Callable[[Callable[[], None]], object], n: int, slack: int) -> None:
        read, write = os.pipe()
        never, hold = os.pipe()
        self.open = (read, never, hold)
        steps = itertools.count(1)

        def tick() -> None:
            os.write(write, b".")
            if next(steps) == n + slack:
                os.read(never, 1)

        def start() -> None:
            os.close(hold)  # where this process ends, the work need not wait for it
            work(tick)

        self.pid = fork(start)
        os.close(write)
        self.reached = sum(len(os.read(read, 1)) for _ in range(n)) == n  # ends early where the work did

    def kill(self, number: int = signal.SIGKILL) -> int:
        """The exit status."""
        os.kill(self.pid, number)
        status = result(self.pid)
        for descriptor in self.open:
            os.close(descriptor)
        return status


def kills(folder: Path) -> None:
    """A production killed 24 times at work and then left alone equals one that was never killed."""
    count = 400
    make(folder / "whole", count)
    torn, rng, seen = folder / "torn", random.Random(8), 0
    for _ in range(24):
        with Score.fault():
            run = Watched(lambda tick: make(torn, count, tick=tick), rng.randint(2, 40), rng.randint(1, 9))
            assert run.reached
            assert run.kill() == -signal.SIGKILL
            if (torn / "manifest.json").exists():
                condition = verify(torn)
                assert not condition.damaged, condition
                assert len(condition.sound) >= seen, f"{condition.sound} after {seen}"
                seen = len(condition.sound)
    assert 0 < seen < 100, f"{seen} shards after all kills"
    assert make(torn, count) == (count - 4 * seen, 4 * seen)
    assert not leftovers(torn)
    assert files(torn) == files(folder / "whole")
    seeds = torch.cat([shard.seeds for shard in Images(torn).shards()])
    assert seeds.tolist() == list(range(5, 5 + count))


def crowd(folder: Path) -> None:
    """Several independent processes on one folder at once, one of them killed: none disturbs another."""
    make(folder / "whole", 60)
    for trial in range(6):
        torn, rng = folder / f"torn-{trial}", random.Random(trial)
        with Score.fault():
            victim = Watched(lambda tick, torn=torn: make(torn, 60, tick=tick), rng.randint(2, 40), rng.randint(1, 9))
            others = [fork(lambda torn=torn: make(torn, 60)) for _ in range(3)]
            assert victim.kill() == -signal.SIGKILL
            assert [result(pid) for pid in others] == [0, 0, 0]
            make(torn, 60)
            assert files(torn) == files(folder / "whole")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_replace(n: int) -> None:
    """Die in place of the n-th rename."""
    real, seen = os.replace, []

    def replace(source: Path, target: Path) -> None:
        seen.append(target)
        if len(seen) == n:
            die()
        real(source, target)

    os.replace = replace


def after_replace(n: int) -> None:
    """Die right after the n-th rename."""
    real, seen = os.replace, []

    def replace(source: Path, target: Path) -> None:
        real(source, target)
        seen.append(target)
        if len(seen) == n:
            die()

    os.replace = replace


def half_written(n: int) -> None:
    """Die half-way through the n-th file."""
    real, seen = Path.write_bytes, []

    def write_bytes(path: Path, data: bytes) -> int:
        seen.append(path)
        if len(seen) == n:
            real(path, data[: len(data) // 2])
            die()
        return real(path, data)

    Path.write_bytes = write_bytes


def moments(folder: Path) -> None:
    """Killed at every moment of writing manifest, shard and checksum: the next run makes it whole."""
    make(folder / "whole", sampler=RELAXED)
    whole = files(folder / "whole")
    for arm in (before_replace, after_replace, half_written):
        for n in range(1, 6):  # manifest, shard, checksum, shard, checksum
            torn = folder / f"{arm.__name__}-{n}"

            def work(torn: Path = torn, arm: Callable[[int], None] = arm, n: int = n) -> None:
                arm(n)
                make(torn, sampler=RELAXED)

            with Score.fault():
                assert result(fork(work)) == -signal.SIGKILL, torn
                assert not (torn / "manifest.json").exists() or not verify(torn).damaged, torn
                make(torn, sampler=RELAXED)
                assert not leftovers(torn), torn
                assert whole == files(torn), torn


def grows(folder: Path) -> None:
    """A set of ten images made larger, killed at every moment of it, equals one of eighteen made in one go."""
    make(folder / "whole")
    whole = files(folder / "whole")
    for arm in (before_replace, after_replace, half_written):
        for n in range(1, 6):  # manifest, the shard that was not full, its checksum, shard, checksum
            torn = folder / f"{arm.__name__}-{n}"
            make(torn, 10)

            def work(torn: Path = torn, arm: Callable[[int], None] = arm, n: int = n) -> None:
                arm(n)
                make(torn)

            with Score.fault():
                assert result(fork(work)) == -signal.SIGKILL, torn
                assert set(verify(torn).sound) >= {0, 1}, torn  # the full shards stay
                made, kept = make(torn)
                assert made + kept == 18, torn
                assert kept >= 8, torn
                assert not leftovers(torn), torn
                assert whole == files(torn), torn


STORES = itertools.count()


def group(folder: Path, world: int, work: Callable[[int], object]) -> list[int]:
    """Run `work(rank)` in a gloo group; returns all exit statuses."""
    store = folder / f"store-{next(STORES)}"

    def start(rank: int) -> None:
        meet("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        work(rank)

    return [result(pid) for pid in [fork(lambda rank=rank: start(rank)) for rank in range(world)]]


def ranks(folder: Path) -> None:
    """Two processes make the files of one, also with a correction that averages over a batch; a dead one is mended."""
    for _ in range(20):  # one that has nothing to do is not gone before the other has reached it
        assert group(folder, 2, lambda rank: None) == [0, 0]
    for name, sampler in (("plain", PLAIN), ("relaxed", RELAXED)):
        one, two = folder / f"{name}-one", folder / f"{name}-two"
        make(one, sampler=sampler)
        assert group(folder, 2, lambda rank, two=two, sampler=sampler: make(two, sampler=sampler)) == [0, 0]
        assert files(one) == files(two), name
    torn = folder / "torn"

    def dies(rank: int) -> None:
        made = []

        def advance(amount: int) -> None:
            made.append(amount)
            if rank == 1 and sum(made) > 4:
                die()

        make(torn, listener=Ears(advance=advance))

    with Score.fault():
        assert group(folder, 2, dies) == [0, -signal.SIGKILL]
        condition = verify(torn)
        assert condition.sound == (0, 1, 2, 4), condition
        assert condition.missing == (3,), condition
        assert group(folder, 2, lambda rank: make(torn)) == [0, 0]
        assert files(torn) == files(folder / "plain-one")


def refusal(work: Callable[[], object]) -> OSError:
    """The error that the work ends with."""
    try:
        work()
    except OSError as error:
        return error
    raise AssertionError("nothing was refused")


def grow(folder: Path) -> None:
    """A file that may not grow: the error names it, nothing half-written stays, and the next run completes the set."""
    torn = folder / "torn"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        error = refusal(lambda: make(torn, 2000, size=1000, batch=1000))
        assert error.errno == errno.EFBIG, error
        assert error.filename == str(torn / "shard-00000.safetensors"), error

    assert result(fork(work)) == 0
    assert set(files(torn)) == {"manifest.json"}
    make(torn, 2000, size=1000, batch=1000)
    make(folder / "whole", 2000, size=1000, batch=1000)
    assert files(torn) == files(folder / "whole")


def disk(folder: Path) -> None:
    """No room for a file, a full disk, a read-only one. Exits with 77 before the last two where none can be mounted."""
    with Score.fault():
        grow(folder / "limited")
    place = folder / "disk"
    place.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", place]).returncode
    ):
        sys.exit(77)
    try:
        torn = place / "torn"
        filler = place / "filler"
        filler.write_bytes(bytes(88 * 1024))
        with Score.fault():
            error = refusal(lambda: make(torn, 40))
            assert error.errno == errno.ENOSPC, error
            assert Path(error.filename).parent == torn, error
            assert not leftovers(torn)
            sound = verify(torn).sound
            assert sound, "nothing fitted"
            filler.unlink()
            assert make(torn, 40).kept == 4 * len(sound)
            make(folder / "whole", 40)
            assert files(torn) == files(folder / "whole")
        with Score.fault():
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
            error = refusal(lambda: make(torn, 40))
            assert error.errno == errno.EROFS, error
            assert error.filename == str(torn), error
            assert len(Images(torn)) == 40
    finally:
        subprocess.run(["umount", place], check=True)


DRILLS = {drill.__name__: drill for drill in (kills, crowd, moments, grows, ranks, disk)}


def drilled(name: str, place: Path) -> None:
    """One drill, told."""
    place.mkdir()
    score = place / "score"

    def work() -> None:
        status = 1
        try:
            DRILLS[name](place)
            status = 0
        except SystemExit as skipped:
            status = skipped.code
        except Exception:
            traceback.print_exc()
        score.write_text(f"{Score.tried} {Score.held}")
        os._exit(status)

    status = result(fork(work))
    print(name, status, score.read_text(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    *names, folder = sys.argv[1:]
    for name in names:
        drilled(name, Path(folder) / name)
