"""The field's table on a model that answers at once: every method runs, counts truly, and can be resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import comparison
import comparison_tables
from comparison import METHODS, PLAN, REPEATED, Bench, Cell, Cost, cells
from networks.mixture import Mixture
from recording import Records
from rivals.gits import with_free_level
from steindiff.levels import Levels
from steindiff.metrics import Moments
from steindiff.model import Model
from steindiff.schedules import EDM
from steindiff.solvers import SOLVERS
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
    return Bench(model, model, model, SAMPLES, batch=12, seeds=16, iterations=2)


@pytest.mark.parametrize(
    "method",
    [
        name
        for name in METHODS
        if name not in ("teacher", "restart", "edm-to-zero", "from-file", "transferred", *REPEATED)
    ],
)
def test_every_method_spends_what_its_column_says(bench: Bench, method: str):
    cell = Cell(PLAN[method][0], method, 3)
    record = bench.run(cell)
    assert record["network_calls"] == 3
    assert record["nfe_counted"] == (4 if "afs" in method else 3)
    for measure in ("own", "own_second", "precision", "recall", "psnr", "spread"):
        assert math.isfinite(record[measure])
    assert record["sampled_in"] == "float32"
    prepared = record["preparation"]
    assert (prepared["evaluations"] > 0) == (METHODS[method].seeds > 0)
    assert (prepared["backward_passes"] > 0) == (method == "learned" or method.startswith("dpm-v3"))
    assert record["training"] is (method == "learned")
    assert not record["data"]
    json.dumps(record)


def test_choices_are_made_by_other_seeds(bench: Bench):
    """Those the figures are of, and those methods prepare with, are not looked at."""
    seen: list[int] = []

    def run(model: Model, seeds: Sequence[int]) -> comparison.Made:
        seen.extend(seeds)
        return comparison.Made(torch.zeros(len(seeds), 1, 8, 8), 1, 1)

    choices = replace(bench, first=comparison.CHOICE_SEED)
    choices.images(run, [*choices.judged, *choices.other])
    chosen = set(seen)
    seen.clear()
    bench.images(run, [*bench.judged, *bench.other])
    assert not chosen & {*seen, *bench.preparation_seeds(16)}
    cell = Cell("dpmpp-2m", "logsnr", 5)
    assert choices.identity(cell) != bench.identity(cell)


def test_the_teachers_images_are_made_once_and_shared(bench: Bench, tmp_path):
    """By runs that judge by as many samples of the same teacher; another teacher's are others."""
    fresh = replace(bench, cache=tmp_path, kept={})
    made = fresh.taught(fresh.judged)
    torch.testing.assert_close(made, bench.taught(bench.judged), rtol=0, atol=0)
    (path,) = tmp_path.iterdir()
    torch.testing.assert_close(torch.from_numpy(np.load(path)), made, rtol=0, atol=0)
    np.save(path, np.zeros_like(made.numpy()))
    assert not bool(fresh.taught(fresh.judged).any())  # read, not made again
    assert bool(replace(fresh, many=("ddim", "logsnr", 8)).taught(fresh.judged).any())
    assert bool(fresh.taught(fresh.other).any())


def test_few_samples_may_be_compared_with_the_teachers(bench: Bench):
    """FID and own distance take all of them."""
    cell = Cell("dpmpp-2m", "logsnr", 5)
    some, whole = replace(bench, paired=8).run(cell), bench.run(cell)
    assert (some["paired"], whole["paired"]) == (8, SAMPLES)
    assert some["own"] == whole["own"]
    assert some["psnr"] != whole["psnr"]


def test_fid_alone_needs_no_teacher(bench: Bench):
    cell = Cell("dpmpp-2m", "logsnr", 20)
    reference = Moments.of(torch.randn(64, 48, generator=torch.Generator().manual_seed(0)))
    alone = replace(bench, reference=reference, fid_only=True)
    found = alone.run(cell)
    assert not {"teacher", "others", "near", "limit"} & set(vars(alone))
    assert "own" not in found
    assert "second" not in vars(alone)
    assert found["fid"] == replace(bench, reference=reference).run(cell)["fid"] > 0.0


def test_teacher_is_the_floor_and_itself(bench: Bench):
    record = bench.run(Cell("heun", "teacher", 35))
    assert record["network_calls"] == 35
    assert record["psnr"] is None
    assert record["spread"] == 1.0


def test_the_row_of_many_steps_is_named_after_the_teacher():
    assert list(cells(["teacher"], [], [])) == [Cell("heun", "teacher", 35)]
    assert list(cells(["teacher"], [], [], ("unipc-bh1-3", "logsnr", 12))) == [Cell("unipc-bh1-3", "teacher", 12)]


def test_the_free_level_of_gits_lies_after_its_first_and_ends_nearest(bench: Bench):
    solver = SOLVERS["ipndm-4"]
    plain, free, longer = (
        METHODS[name].prepare(bench, solver, 3).chosen["sigmas"] for name in ("gits", "gits-afs", "gits-longer-afs")
    )
    assert free[:1] + free[2:] == plain
    assert plain[1] < free[1] < plain[0]
    assert len(longer) == len(free)
    fine, _ = bench.fine(min(256, bench.seeds), 60)
    levels = bench.levels(solver, bench.gits_grid()[0], 3)

    def error(tried: Levels) -> float:
        made = comparison.analytically_begun(solver, tried)(bench.plain, fine.seeds)
        return float((made.x - fine.samples).flatten(1).norm(dim=1).mean())

    every = with_free_level(levels, fine.trajectory.levels)
    assert len(every) > 5
    assert comparison.sigmas(min(every, key=error)) == free


def test_calibrations_are_kept_of_one_method_alone(bench: Bench, tmp_path):
    """Those from fewer seeds would stand under the same name."""
    keeping = replace(bench, calibrations=tmp_path, seeds=72, kept={})
    keeping.run(Cell("ddim", "calibrated", 3))
    (kept,) = tmp_path.iterdir()
    before = kept.read_bytes()
    for other in ("calibrated-64", "no search"):
        keeping.run(Cell("ddim", other, 3))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_restart_counts_its_extra_evaluations(bench: Bench):
    record = bench.run(Cell("heun", "restart", 17))
    assert record["network_calls"] == 17 + 2 * 4
    plain = bench.run(Cell("heun", "edm-to-zero", 17))
    assert plain["network_calls"] == 17
    assert abs(record["spread"] - 1.0) < 0.2  # fresh noise: with the first noise again it was 1.3


def test_runs_of_many_calls_are_also_held_to_finer_samples(bench: Bench):
    near = bench.run(Cell("dpmpp-3m", "logsnr", 20))
    assert math.isfinite(near["own_limit"])
    # The other seeds' limit: near where their many-step samples are.
    assert near["own_limit"] == pytest.approx(near["own"], rel=0.1)
    assert "own_limit" not in bench.run(Cell("dpmpp-3m", "logsnr", 10))


def test_records_are_resumed(bench: Bench, tmp_path):
    path = tmp_path / "records.json"
    wanted = list(cells(["edm"], ["ddim"], [3, 4]))
    Records(path).measure(wanted[:1], bench.identity, bench.run, float("inf"))
    before = path.read_text()
    again = Records(path)
    again.measure(wanted, bench.identity, bench.run, float("inf"))
    records = json.loads(path.read_text())
    assert [record["nfe"] for record in records] == [3, 4]
    assert records[0] == json.loads(before)[0]


def test_every_method_of_the_plan_is_known_and_every_method_planned():
    assert set(PLAN) | {"teacher", "restart", "edm-to-zero"} == set(METHODS)
    listed = list(cells(list(METHODS), [], [5]))
    assert len(listed) == len(set(listed))
    assert listed[0] == Cell("heun", "teacher", 35)


def test_costs_add_up():
    total = Cost(1.0, 5.0, 10, 2) + Cost(2.0, None, 5, 0)
    assert total == Cost(3.0, 5.0, 15, 2)


def record(solver: str, method: str, nfe: int, own: float, **more) -> dict:
    measures = {"fid": own + 1, "own_second": own, "precision": 0.8, "recall": 0.5, "psnr": 20.0, "spread": 1.0}
    preparation = {
        "alone": True,
        "seeds": METHODS[method].seeds,
        "teacher_nfe": METHODS[method].teacher_nfe,
        "seconds": 1.0,
        "memory_mb": 10,
        "evaluations": 100 * bool(METHODS[method].seeds),
        "backward_passes": 0,
    }
    return {
        "model": "cifar10",
        "solver": solver,
        "method": method,
        "nfe": nfe,
        "samples": 100,
        "network_calls": nfe,
        "nfe_counted": nfe,
        "own": own,
        **measures,
        "training": METHODS[method].training,
        "data": False,
        "preparation": preparation,
        "chosen": {"sampling_memory_mb": 8} if method == "calibrated" else {},
        "features": ["inception", "random"],
        **more,
    }


RECORDS = [
    record("heun", "teacher", 35, 5.0, psnr=None),
    record("ipndm-3", "edm", 5, 30.0),
    record("ipndm-4", "logsnr", 5, 20.0),
    record("ipndm-4", "learned", 5, 6.0),
    record("unipc-bh1-3", "dpm-v3", 5, 18.0),
    record("dpmpp-2m", "calibrated", 5, 7.0),
]


def test_tables_show_the_better_choice_and_mark_the_best_without_training():
    table = comparison_tables.by_budget(RECORDS, "own")
    assert "| iPNDM | plain, better grid | – | – | 20.00 |" in table
    assert "| **calibrated** | – | – | **7.00** |" in table
    assert "| learned (training) | – | – | 6.00 |" in table
    assert "| DPM-Solver-v3 | DPM-Solver-v3, better order | – | – | 18.00 |" in table
    assert "many steps (35) | 5.00" in table
    assert "| many steps | heun | 5.00 | 6.00 | 5.00 | 0.800 | 0.500 | – | 1.000 |" in comparison_tables.others(RECORDS)
    assert (
        "| calibrated | no | no | 256 × 24 | 100 | – | 1.0 s | 10 MB (1.25 ×) | 5 of 5 | 7.00 |"
        in comparison_tables.costs(RECORDS)
    )


def test_each_table_chooses_by_its_own_measure_among_records_that_have_it():
    alone = {key: value for key, value in record("ipndm-4", "edm", 5, 0.0, fid=2.0).items() if key != "own"}
    records = [*RECORDS, record("ipndm-3", "logsnr", 5, 25.0, fid=3.0), alone]
    assert "| iPNDM | plain, better grid | – | – | 20.00 |" in comparison_tables.by_budget(records, "own")
    assert "| iPNDM | plain, better grid | – | – | **2.00** |" in comparison_tables.by_budget(records, "fid")


def test_two_yardsticks_stand_side_by_side():
    runs = [("logsnr", 5.0, 4.0), ("edm", 6.0, 3.0), ("calibrated-64", 5.5, 2.7)]
    found = [record("ddim", name, 15, own, own_limit=limit) for name, own, limit in runs]
    before = [record("ddim", name, 20, own) for name, own, _ in runs]
    *_, both, one = comparison_tables.late([*found, *before]).splitlines()
    own, fid = "5.00 → 5.50 | +10.0 %", "6.00 → 6.50 | +8.3 %"
    assert both == f"| DDIM | 15 | {own} | 3.00 → 2.70 | -10.0 % | {fid} |"
    assert one == f"| DDIM | 20 | {own} | – | – | {fid} |"


def test_shares_of_the_models_own_figures_leave_out_what_is_trained():
    runs = [("calibrated-64", 7.5), ("gits", 20.0), ("edm", 30.0), ("learned", 6.0), ("64 seeds, nth 1", 5.5)]
    found = [RECORDS[0], *(record("dpmpp-2m", name, 5, own) for name, own in runs)]
    many = [{**RECORDS[0], "fid": 4.0}, {**record("dpmpp-2m", "calibrated-64", 5, 0.0), "fid": 5.0}]
    known = found[0]
    head, _, *lines = comparison_tables.relative(found, many).splitlines()
    assert head.startswith("| over its own | method | 3 NFE |")

    def line(title: str, name: str, share: float) -> str:
        return f"| {title} | {name} | – | – | {share:.2f} | – | – | – |"

    assert lines == [
        line("FID", "**calibrated, 64 seeds**", found[1]["fid"] / known["fid"]),
        line("FID", "nearest rival", found[2]["fid"] / known["fid"]),
        line("FID, 50,000 samples", "**calibrated, 64 seeds**", 1.25),
        line("own", "**calibrated, 64 seeds**", 7.5 / known["own"]),
        line("own", "nearest rival", 20.0 / known["own"]),
    ]


def test_calibrations_from_other_seeds_stand_from_the_least_to_the_greatest():
    runs = [
        ("calibrated-64", 4, 7.0),
        ("64 seeds, nth 2", 4, 6.0),
        ("256 seeds, nth 1", 4, 1.0),
        ("few, 64 seeds, nth 3", 3, 5.0),
    ]
    _, _, *lines = comparison_tables.repeated([record("dpmpp-2m", *run) for run in runs]).splitlines()
    assert lines == [
        "| calibrated | 4 | 2 | 7.00 to 8.00 | 6.00 to 7.00 |",
        "| calibrated for few | 3 | 1 | 6.00 | 5.00 |",
    ]


def test_tables_go_between_marks_and_dry_runs_are_refused(tmp_path, monkeypatch):
    page, records = tmp_path / "page.md", tmp_path / "records.json"
    page.write_text("before\n<!-- table:comparison-cifar10-own -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["tables", "--records", str(records), "--pages", str(page)])
    records.write_text(json.dumps(RECORDS), encoding="utf-8")
    comparison_tables.main()
    once = page.read_text(encoding="utf-8")
    comparison_tables.main()
    assert page.read_text(encoding="utf-8") == once
    assert once.startswith("before")
    assert once.endswith("<!-- /table:comparison-cifar10-own -->\nafter\n")
    records.write_text(json.dumps([{**RECORDS[0], "features": ["random", "random"]}]), encoding="utf-8")
    with pytest.raises(SystemExit, match="dry run"):
        comparison_tables.main()
    with pytest.raises(SystemExit, match="need one of the method"):
        comparison_tables.teacher(RECORDS[1:])


def test_lpips_is_measured_where_its_weights_are_given(bench: Bench, monkeypatch):
    network = comparison.LPIPS([[4], [8]]).requires_grad_(False)
    monkeypatch.setattr(comparison.LPIPS, "load", lambda path, device: network.to(device))
    images = torch.rand(3, 1, 16, 16) * 2 - 1
    assert bench.yardstick.perceived(images, -images) is None
    measuring = replace(bench, lpips=Path("weights")).yardstick
    assert measuring.perceived(images, images) == 0.0
    expected = float(network(images, -images).mean())
    assert measuring.perceived(images, -images) == pytest.approx(expected, rel=1e-5)
