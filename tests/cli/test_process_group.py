"""Processes started by torchrun make and measure what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import launched
from steindiff._distributed import Rank
from steindiff.cli import options, process_group
from steindiff.cli.commands import evaluate

SAMPLE = "sample --model digits --nfe 3 --method edm --num 30 --batch 4 --shard 8 --png --npz --json --out OUT/set"
EVALUATE = "evaluate OUT/set --reference OUT/set/png --metrics fid,kid,precision-recall --batch 4 --json"

CALIBRATE = "calibrate --model digits --nfe 4 --num 18 --seed 100 --batch 5 --json --out OUT/calibrations"


LINES = (SAMPLE, EVALUATE, CALIBRATE)


class Together(NamedTuple):
    """What two processes made, printed for each line, and said beside it."""

    folder: Path
    printed: list[dict]
    said: str


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Together:
    """All lines by two processes, one of which is killed and started anew; one torchrun, since each imports torch."""
    folder = tmp_path_factory.mktemp("two")
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command = [*program, "--", launched.__file__, *" ++ ".join(LINES).replace("OUT", str(folder)).split()]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DIE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n{") == len(LINES) - 1, "one process speaks for all"
    return Together(folder, json.loads(f"[{done.stdout.replace(NEXT, ',{')}]"), done.stderr)


NEXT = "\n{"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def pooled(monkeypatch):
    monkeypatch.setattr(evaluate.Evaluation, "inception", staticmethod(launched.pooled))


def test_two_processes_do_what_one_does(steindiff, pooled, together: Together, tmp_path):
    """Bytes are equal, after a kill, too; features are equal, sums over images up to the order of summation."""
    made = json.loads(steindiff(SAMPLE.replace("OUT", str(tmp_path))).out)
    also, again, _ = together.printed
    assert "failed (exitcode: -9) local_rank: 1" in together.said
    assert (made["new"], made["kept"]) == (30, 0)
    assert also["new"] + also["kept"] == 30
    assert also["kept"] >= 8
    assert files(tmp_path / "set") == files(together.folder / "set")
    measured = json.loads(steindiff(EVALUATE.replace("OUT", str(tmp_path))).out)
    assert again["fid"] == pytest.approx(measured["fid"], abs=1e-12)
    assert again["kid"] == measured["kid"]
    assert again["precision-recall"] == measured["precision-recall"]


def test_two_processes_calibrate_as_one_does(steindiff, together: Together, tmp_path):
    """To the bit: what is averaged over samples is summed in one order."""
    assert steindiff(CALIBRATE.replace("OUT", str(tmp_path))).code == 0
    made = files(tmp_path / "calibrations")
    assert [b'"kept": "plain' in content for content in made.values()] == [False]  # there was something to correct
    assert made == files(together.folder / "calibrations")


def test_fewer_images_than_processes_is_said(steindiff, pooled, tmp_path, monkeypatch):
    steindiff(SAMPLE.replace("OUT", str(tmp_path)))
    monkeypatch.setattr(evaluate, "rank", lambda: Rank(0, 2))
    done = steindiff(EVALUATE.replace("OUT", str(tmp_path)).replace("--batch 4", "--batch 30"))
    assert done.code == 1
    assert "batch must leave one for each of 2 processes, got 30 for 30" in done.err


def start(monkeypatch, rank: int, local: int) -> None:
    """As torchrun does."""
    variables = {"TORCHELASTIC_RUN_ID": 1, "RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 4}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_other_commands_are_for_one_process(steindiff, monkeypatch):
    start(monkeypatch, rank=3, local=3)
    done = steindiff("compare --model digits")
    assert done == (1, "", "steindiff, process 3: compare: runs in one process; leave torchrun out\n")


def test_every_process_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert options.device("auto") == "cuda"
    start(monkeypatch, rank=5, local=1)
    assert process_group.speaker() == "steindiff, process 5"
    assert options.device("auto") == options.device("cuda") == "cuda:1"
    assert options.device("cuda:0") == "cuda:0"
    assert options.device("cpu") == "cpu"
    start(monkeypatch, rank=2, local=2)
    with pytest.raises(ValueError, match="nproc_per_node must be at most 2 here, the number of GPUs, got 4"):
        options.device("auto")


ORPHAN = """
import os, signal, sys
from steindiff.cli import process_group
process_group.LOOK = 0.01
pid = os.fork()
if pid == 0:  # torchrun
    parent = os.getpid()
    if os.fork() == 0:  # a worker, which would never end
        print("at work", flush=True)
        process_group.end_with(parent)
    signal.pause()
assert sys.stdin.readline() == "kill\\n"
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
"""


def test_workers_end_with_the_torchrun_that_was_killed():
    """The pipe ends when the last process that holds it has ended."""
    run = subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "at work\n"
    assert run.communicate("kill\n") == ("", None)
    assert run.returncode == 0
