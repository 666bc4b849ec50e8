"""`steindiff bench`."""

from __future__ import annotations

import json

import pytest


def test_bench(steindiff, tmp_path):
    line = f"bench --model digits --section loop --batch 1,3 --repeats 2 --nfe 4 --out {tmp_path}"
    done = steindiff(line)
    assert done.code == 0, done.err
    assert done.err == ""
    assert "plain, batch 3: outside the network" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench-cpu.json", "bench-cpu.png"]
    found = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert (found["model"], found["nfe"], found["rounds"]) == ("digits", 4, 2)
    assert [record["batch"] for record in found["records"] if record["name"] == "replay"] == [1, 3]
    done = steindiff(f"{line} --json --seed 3")
    assert json.loads(done.out) == json.loads((tmp_path / "bench-cpu.json").read_text())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--batch 0", "batch = '0': allowed are whole numbers >= 1, several as 1,4,32"),
        ("--batch many", "batch = 'many': allowed are whole numbers >= 1"),
        ("--repeats 0", "repeats = 0: allowed are whole numbers >= 1"),
        ("--section speed", "section = 'speed': allowed are loop, corrections, scaling, precision, compile"),
        ("--seed -1", "seed must be >= 0, got -1"),
        ("--nfe 0 --section loop", "nfe = 0: allowed are whole numbers >= 1"),
        ("--device tpu", "device = 'tpu': allowed here are auto, cpu"),
    ],
)
def test_mistakes_are_one_line(steindiff, tmp_path, option: str, message: str):
    done = steindiff(f"bench --model digits --out {tmp_path} {option}")
    assert done.code == 1
    assert message in " ".join(done.err.split())
    assert len(done.err.strip().splitlines()) == 1
