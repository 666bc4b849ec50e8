"""The search for levels and for what the network is told: residuals, fewer evaluations, never worse than plain."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import contract
import steindiff as sd
from networks.mixture import Mixture
from problems import FLOAT
from steindiff import search
from steindiff.bases import DCT, Identity
from steindiff.calibrating import Progress, judges
from steindiff.corrections.alignment import Groups
from steindiff.corrections.base import Transition
from steindiff.denoisers import Gaussian
from steindiff.grids.rules import Explicit, LogSNR, UniformTime
from steindiff.loop import Cancelled, State, advance
from steindiff.metrics import spread
from steindiff.reference import GaussianDensity
from steindiff.search import Coordinate, Mismatch, Probe, Trials, move, resampled

BASIS = DCT((1, 12))


def test_the_residuals_square_to_the_mismatch():
    """Without weights of bands or tails, all energies 1, every band wrong by a tenth: J = 0.01 + (log 1.22/1.01)²."""
    signs = torch.ones(500, 1, 12, dtype=FLOAT)
    signs[::2] = -1.0
    goal = BASIS.inverse(signs)
    objective = Mismatch(BASIS, goal, Groups.of([None] * 500), power=0.0, tail=0.0)
    assert objective(goal) == pytest.approx(0.0, abs=1e-12)
    assert objective(1.1 * goal) == pytest.approx(0.01 + math.log(1.22 / 1.01) ** 2, rel=1e-6)
    residuals = objective.residuals(1.1 * goal)
    assert float(residuals.dot(residuals)) == pytest.approx(objective(1.1 * goal))


def test_a_sample_near_zero_does_not_decide():
    """Every band has one coefficient: where it is 0 but for rounding, its logarithm says nothing of the others."""
    goal = torch.randn(60, 1, 12, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    goal -= goal.mean(0)
    goal[0], goal[1] = 1e-6, goal[0] + goal[1] - 1e-6
    objective = Mismatch(BASIS, BASIS.inverse(goal), Groups.of([None] * 60))
    moved = goal.clone()
    moved[0], moved[1] = 1e-3, goal[1] - 1e-3 + 1e-6
    assert float(objective.energies.gap(moved).abs().max()) < 1e-3


def test_an_end_that_is_not_finite_is_infinitely_far():
    goal = torch.randn(60, 1, 12, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    objective = Mismatch(BASIS, goal, Groups.of([None] * 60))
    assert 0.0 < objective(1.1 * goal) < math.inf
    for lost in (math.nan, math.inf):
        assert objective(torch.where(torch.arange(60)[:, None, None] == 3, lost, goal)) == math.inf


def test_bands_count_by_their_energy():
    goal = torch.randn(400, 1, 12, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    scale = torch.where(torch.arange(12) < 6, 10.0, 1.0).to(FLOAT)
    goal = BASIS.inverse(BASIS.forward(goal) * scale)
    wrong = BASIS.inverse(BASIS.forward(goal) * torch.where(torch.arange(12) < 6, 1.1, 1.0).to(FLOAT))
    groups = Groups.of([None] * 400)
    even, weighted = (Mismatch(BASIS, goal, groups, power)(wrong) for power in (0.0, 1.0))
    assert weighted == pytest.approx(2.0 * even * 100 / 101, rel=0.05)


def probe_of(denoiser: sd.Denoiser, x: Tensor, weight: float) -> Probe:
    """At σ = 0.5, with noise drawn for it."""
    noise = 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
    return Probe(denoiser, sd.EDM().at(math.log(2.0)), noise, weight)


def test_what_a_gaussians_denoiser_removes_is_known():
    """D = w x with w = v/(v + σ²): P = (w − 1) x + w σ n, whose energy is (1 − w)² E x² + w² σ²."""
    generator = torch.Generator().manual_seed(0)
    shape, groups, basis = (1, 4000), Groups.of([None] * 40), Identity((1, 4000))
    goal = torch.randn(40, *shape, generator=generator, dtype=FLOAT)
    probe = probe_of(Gaussian(torch.zeros(shape, dtype=FLOAT), torch.ones(shape, dtype=FLOAT)), goal, 3.0)
    plain, probed = Mismatch(basis, goal, groups), Mismatch(basis, goal, groups, probe=probe)
    assert probed(goal) == pytest.approx(0.0, abs=1e-12)
    w, s2 = 0.8, 0.25
    was, now = ((1.0 - w) ** 2 * scale**2 + w**2 * s2 for scale in (1.0, 1.3))
    gap = math.log((now + 0.01 * was) / (1.01 * was))
    assert probed(1.3 * goal) - plain(1.3 * goal) == pytest.approx(3.0 * gap**2, rel=0.02)


def test_a_probe_sees_what_energies_do_not():
    """Ends with noise among the points, each band's energy that of the fine ones: the network would remove it."""
    run = reference()
    goal = run.samples
    made = run.basis.forward(goal + 0.2 * torch.randn(goal.shape, generator=torch.Generator().manual_seed(1)))
    plain = Mismatch(run.basis, goal, run.groups())
    for _ in range(20):
        gain = (-0.5 * plain.energies.gap(made)).exp()
        made = run.groups().means(made) + (made - run.groups().means(made)) * run.basis.spread(gain).float()
    probed = Mismatch(run.basis, goal, run.groups(), probe=Probe.of(run, run.denoiser(), 1.0))
    energies, removed = probed.residuals(run.basis.inverse(made)).gaps.square().view(2, -1).sum(1)
    assert float(energies) < 1e-4 < 0.1 < float(removed)


def test_some_rows_are_judged_as_if_they_were_all():
    run = reference()
    goal, x = run.samples, 1.1 * run.samples + 0.05
    rows, groups = run.rows(lambda place: place % 3 == 0), run.groups(lambda place: place % 3 == 0)
    some = Mismatch(run.basis, goal, groups, rows=rows)
    assert some(x) == pytest.approx(Mismatch(run.basis, goal[rows], groups)(x[rows]))
    probe = Probe.of(run, run.denoiser(), 2.0)
    part = Probe(run.model.denoiser_for(run.seeds[::3]), probe.level, probe.noise[::3], 2.0)
    probed = Mismatch(run.basis, goal, groups, rows=rows, probe=probe)(x)
    assert probed == pytest.approx(Mismatch(run.basis, goal[rows], groups, probe=part)(x[rows]), rel=1e-5)


def test_a_probes_noise_is_no_runs_own():
    run = reference()
    probe = Probe.of(run, run.denoiser(), 1.0)
    assert probe.level.ratio == pytest.approx(0.6 * run.sigma_data)
    begun = run.model.noise(run.seeds, probe.level)
    assert abs(float((probe.noise * begun).mean() / begun.square().mean())) < 0.2


@cache
def reference(name: str = "edm") -> sd.ReferenceRun:
    return sd.reference_run(MODELS[name](), range(10**6, 10**6 + 48), steps=24, batch=999)


def network(x: Tensor, sigma: Tensor) -> Tensor:
    """The exact denoiser of a few points, as a network that can be told another level than the state's."""
    level = sd.Level(float(sigma[0]), 1.0, float(sigma[0]))
    return points()(x, level)


@cache
def points() -> Mixture:
    centres = torch.randn(40, 1, 12, generator=torch.Generator().manual_seed(3))
    centres = BASIS.inverse(BASIS.forward(centres) * (1.0 + torch.arange(12.0)) ** -1.0)
    return Mixture(centres, torch.full((40,), 0.01), torch.ones(40))


def edm() -> sd.Model:
    return sd.Model(sd.EDMDenoiser(network), sd.EDM(), (1, 12))


MODELS = {"edm": edm}


def test_a_trial_repeats_only_what_changed():
    run = reference()
    solver = sd.SOLVERS["dpmpp-2m"]
    objective = Mismatch(run.basis, run.samples, run.groups())
    trials = Trials(run, run.denoiser(), solver, sd.ByAlignment()(run, 5), objective)
    levels = GaussianDensity()(run)(sd.EDM(), 5)
    first = trials(levels)
    for i in range(5):
        moved = move(levels, {Coordinate(i, False): -0.02})
        before = trials.denoiser.calls
        cheap = trials(moved, first)
        assert trials.denoiser.calls - before == 5 - i
        assert cheap.mismatch == pytest.approx(trials(moved).mismatch, rel=1e-6)
    before = trials.denoiser.calls
    assert trials(levels, first).mismatch == pytest.approx(first.mismatch)
    assert trials.denoiser.calls == before


def test_a_search_keeps_no_more_on_the_device_than_a_run_does(monkeypatch: pytest.MonkeyPatch):
    run = reference()
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    parked: list[Tensor] = []

    def park(tensor: Tensor) -> Tensor:
        parked.append(tensor.clone())
        return parked[-1]

    def watched(*args: Any) -> tuple[State, Transition]:
        alive.append(sum(ref() is not None for ref in made))
        state, transition = advance(*args)
        found = (state.x, *(e.d for e in transition.evaluations))
        made.extend(weakref.ref(tensor) for tensor in found if not any(tensor is other for other in parked))
        return state, transition

    # On a CPU main memory is the device: what is parked there is made a copy, and the original must go.
    monkeypatch.setattr(Tensor, "cpu", park)
    monkeypatch.setattr(search, "advance", watched)
    sd.calibrate(edm(), 6, recipe=sd.Recipe(seeds=run.seeds), reference=run)
    assert len(alive) > 100
    assert max(alive) <= 2 * sd.ByAlignment()(run, 6).memory + 1  # states and denoised images of the history


def test_the_fine_trajectory_is_finer_than_what_it_judges():
    assert [sd.Recipe().reference_steps([nfe]) for nfe in (3, 8, 10, 20)] == [24, 24, 30, 60]
    assert sd.Recipe().reference_steps([5, 20]) == 60
    assert sd.Recipe(steps=7).reference_steps([20]) == 7
    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 6), search=None)
    assert sd.calibrate(edm(), 12, recipe=recipe).provenance["reference_steps"] == 36


def test_a_coarse_reference_of_the_callers_own_is_named(caplog: pytest.LogCaptureFixture):
    run, quick = reference(), sd.Recipe(search=None)
    sd.calibrate(run.model, 8, "ddim", recipe=quick, reference=run, batch=999)
    assert not caplog.records
    sd.calibrate(run.model, 9, "ddim", recipe=quick, reference=run, batch=999)
    assert "the reference takes 24 steps, and 9 evaluations want 27" in caplog.text


def test_moves_stay_in_order_and_in_range():
    levels = sd.GRIDS["logsnr"](sd.EDM(), 5)
    wild = {Coordinate(i, True): 9.0 * (-1) ** i for i in range(5)} | {Coordinate(1, False): 5.0}
    moved = move(levels, wild)
    assert moved.steps == 5
    assert moved[0].ratio <= 80.0 + 1e-9
    assert moved[1].told == pytest.approx(1.4)
    assert move(levels, {}) == levels
    assert resampled(levels, 8).steps == 8
    assert [level.ratio for level in resampled(levels, 5)] == pytest.approx([level.ratio for level in levels])


@pytest.mark.parametrize("schedule", [sd.Discrete.linear(), sd.EDM(), sd.Flow()])
def test_the_network_is_told_times_of_its_schedule_only(schedule: sd.Schedule):
    start = schedule.finite_start()
    levels = sd.Levels(sd.GRIDS["logsnr"](start, 4).levels, schedule)
    for far in (5.0, -5.0):
        moved = move(levels, {Coordinate(i, False): far for i in range(4)})
        assert all(start.t_min - 1e-9 <= level.t <= start.t_max + 1e-9 for level in moved)
    assert move(levels, {Coordinate(1, False): 0.1})[1].told == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("steps", [4, 6, 12])
@pytest.mark.parametrize("schedule", [sd.Discrete.linear(), sd.EDM()])
def test_a_flat_end_can_be_resampled(schedule: sd.Schedule, steps: int):
    """A schedule's own grid to σ = 0 has its last level where the curve ends."""
    few = replace(sd.GRIDS["logsnr"], to_zero=True)(schedule, 3)
    assert resampled(few, steps).steps == steps


@pytest.mark.parametrize("below", [0.0, 0.001, 0.01, 0.04, 0.2])
def test_slopes_near_a_bound_are_of_what_was_moved(below: float):
    levels = sd.GRIDS["logsnr"](sd.EDM(), 4)
    levels = move(levels, {Coordinate(0, True): -below})
    moved, width = search.nudged(levels, Coordinate(0, True))
    assert math.log(moved[0].ratio / levels[0].ratio) == pytest.approx(width)
    assert abs(width) == pytest.approx(search.LEVEL_STEP)


def test_a_run_that_overflows_does_not_spoil_the_others():
    """Told much at the first level the network overflows: that slope is left out, and the search goes on."""

    def brittle(x: Tensor, sigma: Tensor) -> Tensor:
        return network(x, sigma) * (math.inf if float(sigma[0]) in asked else 1.0)

    asked: set[float] = set()
    model = sd.Model(sd.EDMDenoiser(brittle), sd.EDM(), (1, 12))
    run = sd.reference_run(model, range(10**6, 10**6 + 24), steps=12, batch=999)
    solver, objective = sd.SOLVERS["ddim"], Mismatch(run.basis, run.samples, run.groups())
    trials = Trials(run, run.denoiser(), solver, sd.ByAlignment()(run, 4), objective)
    first = trials(GaussianDensity()(run)(sd.EDM(), 4))
    asked.add(search.nudged(first.levels, Coordinate(0, False))[0][0].t)
    better = list(sd.Search(iterations=1)(trials, first))
    assert better[-1].mismatch < first.mismatch
    assert better[-1].levels[0].told == 1.0


def test_every_condition_is_on_both_sides_of_the_judges():
    for conditions in (1, 2, 3, 6, 10):
        labels = [k % conditions for k in range(60)]
        found = judges(labels)
        assert len(found) in range(12, 21)
        assert {labels[k] for k in found} == {labels[k] for k in set(range(60)) - found} == set(labels)
    assert judges(range(9)) == judges([None] * 9) == {2, 5, 8}


def test_rivals_of_one_class_are_all_met():
    worse, better = UniformTime(7.0), UniformTime(1.0)
    idle = sd.ByAlignment(bound=1.0, terms=0, ridge=1e12)
    for rivals in ((worse, better), (better, worse)):
        recipe = sd.Recipe(seeds=range(10**6, 10**6 + 48), grid=LogSNR(), fit=idle, search=None, rivals=rivals)
        found = sd.calibrate(edm(), 5, recipe=recipe, reference=reference())
        plain = {name: j for name, j in found.provenance["mismatch"].items() if name.startswith("plain")}
        assert len(plain) == 2
        best = sd.calibrate(edm(), 5, recipe=replace(recipe, rivals=(better,)), reference=reference())
        assert found.levels == best.levels


@pytest.mark.parametrize("shared", [True, False])
def test_calls_are_counted_once(shared: bool):
    denoiser = sd.EDMDenoiser(network)
    model = sd.Model(denoiser if shared else lambda seeds: denoiser, sd.EDM(), (1, 12))
    found = sd.calibrate(model, 3, "ddim", recipe=sd.Recipe(seeds=range(10**6, 10**6 + 12), steps=12), batch=6)
    assert found.provenance["network_calls"] == denoiser.calls - 3  # two to check the network, one to know it again


def test_a_reference_of_another_model_is_refused():
    other = sd.Model(sd.EDMDenoiser(lambda x, sigma: 0.5 * network(x, sigma)), sd.EDM(), (1, 12), name="other")
    with pytest.raises(ValueError, match="reference must be of the model other"):
        sd.calibrate(other, 3, reference=reference())


def test_a_rival_that_overflows_does_not_cost_the_file(tmp_path: Path):
    def overflowing(x: Tensor, sigma: Tensor) -> Tensor:
        return network(x, sigma) * (math.inf if 20.0 < float(sigma[0]) < 70.0 and UniformTime in tried else 1.0)

    class Marked(UniformTime):
        def __call__(self, schedule: sd.Schedule, steps: int) -> sd.Levels:
            tried.append(UniformTime)
            return super().__call__(schedule, steps)

    tried: list[type] = []
    model = sd.Model(sd.EDMDenoiser(overflowing), sd.EDM(), (1, 12))
    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 24), steps=12, search=None, rivals=(LogSNR(), Marked()))
    found = sd.calibrate(model, 4, "ddim", recipe=replace(recipe, grid=UniformTime(9.0)))
    assert found.provenance["mismatch"]["plain, Marked"] is None
    found.save(tmp_path / "kept.json")
    assert sd.Calibration.load(tmp_path / "kept.json").levels == found.levels


def test_numbers_of_numpy_are_seeds(tmp_path: Path):
    recipe = sd.Recipe(seeds=np.arange(1000, 1012), steps=12, search=None)
    sd.calibrate(edm(), 3, "ddim", recipe=recipe).save(tmp_path / "found.json")
    assert (tmp_path / "found.json").exists()


def test_a_model_in_double_precision_is_calibrated():
    layer = torch.nn.Linear(12, 12).double()
    model = sd.Model(sd.X0(lambda x, t: 0.01 * layer(x)), sd.EDM(), (1, 12), dtype=torch.float64).trust()
    recipe = sd.Recipe(seeds=range(1000, 1012), steps=12, search=None)
    found = sd.calibrate(model, 3, "ddim", recipe=recipe)
    assert found.sampler()(model, range(2)).x.dtype == torch.float64


def test_the_search_lowers_the_mismatch_and_is_deterministic():
    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 48))
    least: list[float | None] = []
    watch = lambda progress: least.append(progress.mismatch)  # noqa: E731
    found = sd.calibrate(edm(), 5, recipe=recipe, reference=reference(), callback=watch)
    again = sd.calibrate(edm(), 5, recipe=recipe, reference=reference())
    assert found.to_dict() == again.to_dict()
    judged = found.provenance["mismatch"]
    assert found.provenance["kept"] == "searched"
    assert judged["searched"] < judged["unsearched"]
    unsearched = least[len(recipe.rivals)]
    assert least[-1] < 0.6 * unsearched
    assert found.provenance["backward_passes"] == 0
    assert any(level.told != 1.0 for level in found.levels)


class Hills:
    """Trials of known J: no search leads anywhere from the `barren` nearest, and to 0.3 of J from the others."""

    def __init__(self, barren: int) -> None:
        grid = sd.GRIDS["logsnr"](sd.EDM(), 5)
        self.starts = [move(grid, {Coordinate(0, True): -0.2 * k}) for k in range(3)]
        self.heights = dict(zip(self.starts, (2.0, 1.0, 3.0), strict=True))
        self.barren = sorted(self.starts, key=self.heights.__getitem__)[:barren]
        self.run: list[float] = []
        self.solver = sd.SOLVERS["dpmpp-2m"]

    def __call__(self, levels: sd.Levels) -> search.Trial:
        self.run.append(self.heights[levels])
        return search.Trial(levels, (), (), search.Residuals(torch.zeros(0), torch.zeros(0)), self.heights[levels])

    def improved(self, trials: Hills, best: search.Trial) -> Iterator[search.Trial]:
        if best.levels not in self.barren:
            for height in (0.7, 0.3):
                yield replace(best, mismatch=height * best.mismatch)


@pytest.mark.parametrize(
    ("barren", "found", "run"),
    [
        (0, [(0, 2.0), (0, 1.0), (0, 0.7), (0, 0.3)], [2.0, 1.0, 3.0]),
        (1, [(0, 2.0), (0, 1.0), (1, 0.6)], [2.0, 1.0, 3.0, 2.0]),  # 0.7 × 2 is not nearer than the nearest start
        (2, [(0, 2.0), (0, 1.0), (2, 0.9)], [2.0, 1.0, 3.0, 2.0, 3.0]),
        (3, [(0, 2.0), (0, 1.0)], [2.0, 1.0, 3.0, 2.0, 3.0]),
    ],
)
def test_where_a_start_leads_nowhere_the_next_is_searched(
    monkeypatch: pytest.MonkeyPatch, barren: int, found: list[tuple[int, float]], run: list[float]
):
    hills = Hills(barren)
    monkeypatch.setattr(sd.Search, "__call__", lambda self, trials, best: hills.improved(trials, best))
    first = hills(hills.starts[0])
    better = sd.Search().from_nearest(hills, first, hills.starts[1:])
    assert [(place, round(trial.mismatch, 9)) for place, trial in better] == found
    assert hills.run == run


@pytest.mark.parametrize("nothing", [sd.Search(iterations=0), sd.Search(levels=False, telling=False)])
def test_where_nothing_is_searched_no_start_is_run_twice(nothing: sd.Search):
    hills = Hills(0)
    better = list(nothing.from_nearest(hills, hills(hills.starts[0]), hills.starts[1:]))
    assert [trial.mismatch for _, trial in better] == [2.0, 1.0]
    assert hills.run == [2.0, 1.0, 3.0]


@pytest.mark.parametrize(("nfe", "iterations"), [(3, 3), (4, 2), (5, 2)])
def test_only_the_shortest_runs_are_searched_for_longer(nfe: int, iterations: int):
    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 48))
    found = sd.calibrate(edm(), nfe, recipe=recipe, reference=reference())
    given = sd.calibrate(
        edm(), nfe, recipe=sd.Recipe(seeds=recipe.seeds, search=sd.Search(iterations)), reference=reference()
    )
    assert found.levels == given.levels
    assert found.provenance["trials"] == given.provenance["trials"]


def test_few_calls_begin_where_the_recipe_says():
    run = reference()
    found = sd.calibrate(edm(), 3, recipe=replace(sd.FEW_CALLS, seeds=run.seeds), reference=run)
    assert 3.0 * run.sigma_data > 0.75 * run.peak_band_rms
    assert found.levels[0].ratio == pytest.approx(3.0 * run.sigma_data)
    judged = found.provenance["mismatch"]
    assert found.provenance["kept"] == "searched"
    assert judged["searched"] < judged["unsearched"] < min(judged[k] for k in judged if k.startswith("plain"))


def test_a_probe_costs_an_evaluation_a_trial():
    """And one for each of the two it judges and for the fine ends, twice: of all samples, and of those that judge."""
    run, spent = reference(), []
    for weight in (0.0, 3.0):
        few = replace(sd.FEW_CALLS, search=sd.Search(iterations=0, start=0.75, probe=weight))
        found = sd.calibrate(edm(), 3, recipe=few, reference=run).provenance
        assert (found["trials"], len(found["mismatch"])) == (4, 5)
        spent.append(found["network_calls"])
    assert spent[1] - spent[0] == 1 + 2 + 2


def test_a_search_leaves_a_start_that_is_given_alone():
    run = reference()
    for start in (5.0, 1):
        recipe = sd.Recipe(seeds=run.seeds, search=sd.Search(iterations=1, start=start))
        found = sd.calibrate(edm(), 3, recipe=recipe, reference=run)
        assert found.levels[0].ratio == pytest.approx(max(start * run.peak_band_rms, 3.0 * run.sigma_data))


@pytest.mark.parametrize("toy", contract.TOYS)
def test_few_calls_keep_the_contract(toy: str):
    """Without the bound of the start vectors do not: noise of 0.75 root energies does not pass for a state there."""
    cell = contract.Cell(toy, "dpmpp-2m", 4 if toy.startswith("vectors") else 3)
    found = contract.measure(cell, sd.FEW_CALLS)
    assert "broken" not in found, (cell, found)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: sd.Search(start=0.0), "start must be > 0, got 0.0"),
        (lambda: sd.Search(start="low"), "start must be a number, got 'low'"),
        (lambda: replace(sd.FEW_CALLS, grid=Explicit((3.0, 1.0))), "start must be True or False with an Explicit grid"),
        (lambda: sd.Search(probe=-1.0), "probe must be >= 0 and <= 1e+06, got -1.0"),
    ],
)
def test_a_start_or_a_probe_that_means_nothing_is_refused(wrong: Any, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        wrong()


def test_a_network_under_inference_mode_is_calibrated_by_the_same_call():
    @torch.inference_mode()
    def closed(x: Tensor, sigma: Tensor) -> Tensor:
        return network(x, sigma)

    model = sd.Model(sd.EDMDenoiser(closed), sd.EDM(), (1, 12))
    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 48))
    found = sd.calibrate(model, 4, recipe=recipe)
    judged = found.provenance["mismatch"]
    assert judged["searched"] < min(value for name, value in judged.items() if name.startswith("plain"))


def test_neighbouring_budgets_share_the_reference():
    model = edm()
    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 24), steps=12, search=sd.Search(iterations=1))
    made = sd.calibrate_budgets(model, [3, 4], "ddim", recipe=recipe)
    assert sorted(made) == [3, 4]
    assert [calibration.nfe for calibration in made.values()] == [3, 4]


def test_stopping_keeps_the_best_so_far():
    told: list[Progress] = []

    def stop(progress: Progress) -> bool:
        told.append(progress)
        return progress.stage == "reference" or progress.done < 8

    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 24), steps=12)
    found = sd.calibrate(edm(), 4, "ddim", recipe=recipe, callback=stop)
    assert found.provenance["stopped"] is True
    assert found.provenance["trials"] == 8
    assert found.corrects
    assert found.provenance["mismatch"].keys() >= {"unsearched", "searched"}
    with pytest.raises(Cancelled):
        sd.calibrate(edm(), 4, "ddim", recipe=recipe, callback=lambda progress: False)


@pytest.mark.parametrize("until", [1, 8])
def test_stopping_keeps_the_budgets_made_before(until: int):
    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 24), steps=12, search=sd.Search(iterations=1))
    made = sd.calibrate_budgets(
        edm(),
        [3, 4, 5],
        "ddim",
        recipe=recipe,
        callback=lambda progress: progress.stage != "4 evaluations" or progress.done < until,
    )
    assert sorted(made) == ([3] if until == 1 else [3, 4])
    assert [one.provenance["stopped"] for one in made.values()] == [False, True][: len(made)]


def conditional(seeds) -> Gaussian:
    """A strong condition: each of four means is ten times the spread within it."""
    means = torch.tensor([[10.0 * ((seed % 4) - 1.5)] * 6 for seed in seeds])
    return Shifted(means)


class Shifted(Gaussian):
    """A Gaussian whose mean belongs to the sample."""

    def __init__(self, means: Tensor) -> None:
        super().__init__(torch.zeros(6), torch.linspace(0.05, 1.0, 6))
        self.means = means

    def denoise(self, x: Tensor, level: sd.Level) -> Tensor:
        return self.means + super().denoise(x - level.alpha * self.means, level)


@pytest.mark.parametrize("nfe", [4, 5])
def test_spread_within_a_condition_is_kept(nfe: int):
    model = sd.Model(conditional, sd.EDM(0.002, 80.0), (6,), condition=lambda seed: seed % 4)
    recipe = sd.Recipe(seeds=range(10**6, 10**6 + 64))
    found = sd.calibrate(model, nfe, "ddim", recipe=recipe)
    seeds = range(1024)
    fine = sd.Sampler("dpmpp-2m", nfe=60)(model, seeds, batch=1024).x
    made = found.sampler()(model, seeds, batch=1024).x
    kept = spread(made, fine, [model.condition_of(seed) for seed in seeds])
    assert kept == pytest.approx(1.0, abs=0.05 if nfe == 5 else 0.1)


@pytest.mark.parametrize("toy", contract.TOYS)
def test_a_calibration_is_never_worse_than_the_best_plain_grid(toy: str):
    """On fresh seeds, by mismatch and by honest distance: some of the cells that benchmarks/contract.py measures."""
    for cell in contract.sampled():
        if cell.toy == toy:
            found = contract.measure(cell)
            assert "broken" not in found, (cell, found)


def test_a_band_of_one_coefficient_does_not_break_the_contract():
    """A cell that was lost while the sample nearest to 0 could decide."""
    assert "broken" not in contract.measure(contract.Cell("signals, EDM", "deis-4", 10))


def test_the_sample_meets_every_solver_and_budget():
    sample = contract.sampled()
    assert len(set(sample)) == 30
    for place, every in enumerate((contract.TOYS, sd.SOLVERS, contract.BUDGETS)):
        assert {cell[place] for cell in sample} == set(every)


def test_the_contract_can_be_broken():
    """Two per cent worse in every block is worse; two per cent here and there is chance."""
    plain = torch.linspace(1.0, 2.0, contract.BLOCKS, dtype=FLOAT)
    chance = torch.tensor([0.9, 1.1] * (contract.BLOCKS // 2), dtype=FLOAT)
    assert contract.broken(1.02 * plain, plain)
    assert not contract.broken(1.005 * plain, plain)
    assert not contract.broken(1.02 * plain * chance, plain)
