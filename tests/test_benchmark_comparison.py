"""The field's table on a model that answers at once: every method runs, counts truly, and can be resumed."""

from __future__ import annotations

import json
import math

import pytest
import torch

import comparison
from comparison import METHODS, PLAN, Bench, Cell, Cost, cells
from recording import Records
from steindiff.denoisers import Mixture
from steindiff.model import Model
from steindiff.schedules import EDM
from stepping import digits

SAMPLES = 24


@pytest.fixture(scope="module")
def bench() -> Bench:
    """Two digits as conditions, 8×8, slightly noisy, so that all denoisers are exact."""
    data = digits()[:200].float().reshape(-1, 1, 8, 8)
    halves = [Mixture(part, torch.full((100,), 0.02), torch.ones(100)) for part in data.split(100)]
    model = Model(
        lambda seeds: comparison.Tally(halves[seeds[0] % 2], [0]), EDM(), (1, 8, 8), condition=lambda seed: seed % 2
    )
    return Bench(model, model, SAMPLES, batch=12, seeds=16, iterations=2)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("teacher", "restart")])
def test_every_method_spends_what_its_column_says(bench: Bench, method: str):
    cell = Cell(PLAN[method][0], method, 3)
    record = bench.run(cell)
    assert record["network_calls"] == 3
    assert record["nfe_counted"] == (4 if "afs" in method else 3)
    for measure in ("own", "own_second", "precision", "recall", "psnr", "spread"):
        assert math.isfinite(record[measure])
    prepared = record["preparation"]
    assert (prepared["evaluations"] > 0) == (METHODS[method].seeds > 0)
    assert (prepared["backward_passes"] > 0) == (method == "learned" or method.startswith("dpm-v3"))
    assert record["training"] is (method == "learned")
    assert not record["data"]
    json.dumps(record)


def test_teacher_is_the_floor_and_itself(bench: Bench):
    record = bench.run(Cell("heun", "teacher", 35))
    assert record["network_calls"] == 35
    assert record["psnr"] is None
    assert record["spread"] == 1.0


def test_restart_counts_its_extra_evaluations(bench: Bench):
    record = bench.run(Cell("heun", "restart", 17))
    assert record["network_calls"] == 17 + 2 * 6


def test_records_are_resumed(bench: Bench, tmp_path):
    path = tmp_path / "records.json"
    wanted = list(cells(["logsnr"], ["ddim"], [3, 4]))
    Records(path).measure(wanted[:1], bench.identity, bench.run, float("inf"))
    before = path.read_text()
    again = Records(path)
    again.measure(wanted, bench.identity, bench.run, float("inf"))
    records = json.loads(path.read_text())
    assert [record["nfe"] for record in records] == [3, 4]
    assert records[0] == json.loads(before)[0]


def test_every_method_of_the_plan_is_known_and_every_method_planned():
    assert set(PLAN) | {"teacher", "restart"} == set(METHODS)
    listed = list(cells(list(METHODS), [], [5]))
    assert len(listed) == len(set(listed))
    assert listed[0] == Cell("heun", "teacher", 35)


def test_costs_add_up():
    total = Cost(1.0, 5.0, 10, 2) + Cost(2.0, None, 5, 0)
    assert total == Cost(3.0, 5.0, 15, 2)
