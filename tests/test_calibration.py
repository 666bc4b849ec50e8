"""Stein calibration against exact answers: Gaussian data with a known spectrum in the basis."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from problems import FLOAT, gaussian, mixture
from steindiff import GRIDS, SCHEDULES, SOLVERS, Levels, noise, sample
from steindiff._serialization import checksum
from steindiff.bases import DCT, Basis, Identity
from steindiff.calibrating import ByEnergy, Recipe, SteinEnergy, calibrate
from steindiff.calibration import Calibration
from steindiff.corrections.alignment import mismatch
from steindiff.corrections.balance import Balance, balance
from steindiff.corrections.replay import Replay
from steindiff.denoisers import Gaussian, Guided
from steindiff.denoisers.batched import Batched
from steindiff.grids.stein import Stein
from steindiff.levels import Level
from steindiff.reference_run import ReferenceRun, conditioned, reference_run
from steindiff.schedules import EDM, VP, Flow, Schedule
from steindiff.solvers import DDIM, DPMSolverMultistep, Solver
from steindiff.tableau import Step

BASIS = DCT((1, 12))
SPECTRUM = 1.0 / (1.0 + torch.arange(12, dtype=FLOAT)) ** 2


class Spectral(Gaussian):
    """Gaussian data whose covariance is diagonal in a basis, one variance per band."""

    def __init__(self, basis: Basis = BASIS, spectrum: Tensor = SPECTRUM) -> None:
        super().__init__(torch.zeros(basis.shape, dtype=FLOAT), basis.spread(spectrum))
        self.basis = basis

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        return self.basis.inverse(super().denoise(self.basis.forward(x), level))

    def draw(self, num: int, level: Level, seed: int = 0) -> Tensor:
        """States of the exact marginal at a level."""
        generator = torch.Generator().manual_seed(seed)
        clean = self.basis.inverse(self.sample(num, generator))
        return level.alpha * clean + level.sigma * torch.randn(clean.shape, generator=generator, dtype=FLOAT)


def energies(x: Tensor, basis: Basis = BASIS) -> Tensor:
    return basis.average(basis.forward(x).square()).mean(0)


def surveyed(schedule: Schedule, num: int = 4000) -> ReferenceRun:
    return reference_run(
        Spectral(),
        schedule,
        (1, 12),
        seeds=range(num),
        steps=60,
        probe_samples=num,
        batch=num,
        basis=BASIS,
        dtype=FLOAT,
    )


MEASURED = {name: surveyed(SCHEDULES[name]) for name in ("edm", "vp", "flow")}
schedules = pytest.mark.parametrize("name", MEASURED)


@schedules
def test_clean_energy_is_the_true_spectrum_at_every_level(name: str):
    """M_f = E|D_f|² + (σ²/α) E J_ff: reference-free, whatever the level it is read at."""
    for station in MEASURED[name].probe_levels:
        values = station.clean_energy()
        error = values.std(0) / len(values) ** 0.5
        assert bool(((values.mean(0) - SPECTRUM).abs() < 5 * error + 0.03 * SPECTRUM).all()), station.level


@schedules
def test_self_energy_is_the_true_spectrum(name: str):
    torch.testing.assert_close(MEASURED[name].self_energy().mean(0), SPECTRUM, rtol=0.1, atol=0)


@schedules
def test_cost_is_sigma_squared_trace_of_the_squared_jacobian(name: str):
    for station in MEASURED[name].probe_levels:
        exact = float(Spectral().gain(station.level).square().sum())
        error = float(station.square.std()) / len(station.square) ** 0.5
        assert abs(float(station.square.mean()) - exact) < 5 * error + 1e-9
        assert station.cost() == pytest.approx(station.level.sigma**2 * exact, rel=0.02)


@schedules
def test_a_survey_counts_its_cost(name: str):
    measured = MEASURED[name]
    assert measured.network_calls == 60 + 10
    assert measured.backward_passes == 10 * 2
    assert measured.sigma_data == pytest.approx(math.sqrt(float(SPECTRUM.mean())), rel=0.05)


def test_a_guided_survey_counts_both_networks():
    guided = Guided(gaussian().denoiser, gaussian().denoiser, 2.0)
    size = gaussian().denoiser.mean.shape
    measured = reference_run(
        guided, EDM(), size, seeds=range(6), steps=5, probe_levels=2, probe_samples=4, batch=3, dtype=FLOAT
    )
    assert measured.network_calls == guided.calls == 2 * 2 * (5 + 2)  # networks, parts, steps and probed levels


def test_the_record_of_a_fit_is_the_same_in_every_process():
    assert repr(ByEnergy()) == "ByEnergy(energy=SelfEnergy(), below=2.0, bound=4.0, significance=2.0)"


@pytest.mark.parametrize("schedule", [EDM(), VP(), Flow()], ids=["edm", "vp", "flow"])
@pytest.mark.parametrize("h", [0.3, 1.5])
def test_rho_makes_the_energy_of_the_next_state_exact(schedule: Schedule, h: float):
    """From an exact marginal at s a balanced DDIM step lands on the energy α_t² M + σ_t² of the marginal at t."""
    s, t = schedule.at(-0.3), schedule.at(-0.3 + h)
    model = Spectral()
    x = model.draw(200_000, s)
    levels = Levels((s, t), schedule)
    step = Step(DDIM().tableau(levels, 0), model)
    correction = Balance(BASIS, SPECTRUM[None], significance=0.0)
    balanced = energies(correction(step, x, levels, 0).x)
    target = t.alpha**2 * SPECTRUM + t.sigma**2
    torch.testing.assert_close(balanced, target, rtol=0.015, atol=0)
    if h > 1:  # and the plain step was far from it
        assert float((energies(step(x).candidate) / target - 1).abs().max()) > 0.1


def test_rho_is_the_root_in_closed_form():
    """One Gaussian direction, expectations by hand: D = g x with g = αc/(α²c + σ²)."""
    s, t, c = VP().level(0.6), VP().level(0.3), 0.3
    v = s.alpha**2 * c + s.sigma**2
    g = s.alpha * c / v
    found = balance(*(torch.full((1, 1), value, dtype=FLOAT) for value in (g * g * v, g * v, c)), s, t)
    r = t.sigma / s.sigma
    b = t.alpha - r * s.alpha
    next_energy = v * (r + b * float(found.rho) * g) ** 2
    assert next_energy == pytest.approx(t.alpha**2 * c + t.sigma**2, rel=1e-12)


@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("dpmpp-2m", 2), ("unip-bh1-3", 3)])
def test_rho_tends_to_one_with_the_order_of_the_solver(solver: str, order: int):
    """|ρ − 1| of a step in the middle of a run, history from the solver's own steps, halves with h^order."""
    c = torch.tensor([[0.3]], dtype=FLOAT)
    model = Gaussian(torch.zeros(1, dtype=FLOAT), c[0])
    gaps = []
    for steps in (32, 64):
        levels = GRIDS["logsnr-min"](EDM(0.1, 5.0), steps)
        x = torch.full((1, 1), math.sqrt(0.3 + 25.0), dtype=FLOAT)  # one state of the marginal's own energy
        out = sample(model, x, levels, SOLVERS[solver], Balance(Identity((1,)), c, significance=0.0))
        gaps.append(abs(float(out.statistics[steps // 2]["rho"]) - 1.0))
    assert math.log2(gaps[0] / gaps[1]) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("solver", ["ddim", "dpmpp-2m", "dpmpp-3m", "unipc-bh2-2", "ipndm-3", "heun"])
@schedules
def test_calibrated_samples_have_the_true_spectrum(name: str, solver: str):
    """On seeds the calibration never saw, at 5 or 6 evaluations."""
    schedule, model = SCHEDULES[name], Spectral()
    nfe = 6 if (name, solver) == ("edm", "heun") else 5  # which ends at its smallest σ: two evaluations a step
    facts = {"measured": MEASURED[name], "batch": 4000, "dtype": FLOAT}
    found = calibrate(model, SOLVERS[solver], schedule, nfe, (1, 12), recipe=Recipe(tolerance=0), **facts)
    x = noise(range(10_000, 14_000), (1, 12), found.levels[0], FLOAT)
    plain = energies(sample(model, x, found.levels, SOLVERS[solver]).x)
    replayed = energies(sample(model, x, found.levels, SOLVERS[solver], Replay(found)).x)
    torch.testing.assert_close(replayed, SPECTRUM, rtol=0.15, atol=0)
    gap, before = ((x / SPECTRUM).log().abs().mean().item() for x in (replayed, plain))
    assert gap < max(0.5 * before, 0.04)


def test_reference_free_energy_serves_too():
    model = Spectral()
    found = calibrate(
        model,
        DDIM(),
        EDM(),
        5,
        (1, 12),
        recipe=Recipe(fit=ByEnergy(SteinEnergy(0.5))),
        measured=MEASURED["edm"],
        batch=4000,
        dtype=FLOAT,
    )
    x = noise(range(10_000, 14_000), (1, 12), found.levels[0], FLOAT)
    torch.testing.assert_close(
        energies(sample(model, x, found.levels, DDIM(), Replay(found)).x), SPECTRUM, rtol=0.2, atol=0
    )


def test_many_steps_are_left_all_but_alone():
    """Where the solver is as good as the survey, most bands are within their own error and none is far from 1."""
    found = calibrate(
        Spectral(),
        SOLVERS["unipc-bh2-3"],
        EDM(),
        40,
        (1, 12),
        recipe=Recipe(grid=GRIDS["edm"], fit=ByEnergy(), tolerance=0),
        measured=MEASURED["edm"],
        batch=4000,
        dtype=FLOAT,
    )
    touched = sum(value != 1.0 for row in found.rho for value in row)
    assert touched < 0.5 * 40 * BASIS.bands
    assert all(abs(value - 1.0) < 0.02 for row in found.rho for value in row)


@schedules
def test_a_solver_as_good_as_the_survey_is_kept_as_it_is(name: str):
    schedule, measured, model = SCHEDULES[name], MEASURED[name], Spectral()
    facts = {"measured": measured, "batch": 4000, "dtype": FLOAT}
    solver = SOLVERS["unipc-bh2-3"]
    kept, few, forced = (
        calibrate(model, solver, schedule, nfe, (1, 12), recipe=recipe, **facts)
        for nfe, recipe in ((20, Recipe()), (4, Recipe()), (20, Recipe(tolerance=0)))
    )
    assert not any(kept.rho)
    assert (kept.settings["fit"], kept.settings["grid"]) == ("Plain()", "Stein, power 0.0")
    assert kept.levels.levels == solver.levels(measured.grid(0.0), schedule, 20).levels
    assert any(few.rho)
    assert any(forced.rho)
    x = noise(measured.own, (1, 12), kept.levels[0], FLOAT)
    replayed = sample(model, x, kept.levels, solver, Replay(kept)).x
    assert mismatch(BASIS, replayed, measured.samples) <= 0.01
    # Both runs of the one that was corrected are counted, and the one run of the one that was not.
    spent = [made.settings["network_calls"] - measured.network_calls for made in (kept, few, forced)]
    assert spent == [20, 8, 20]


@schedules
def test_a_late_start_is_measured_in_root_energies_of_the_strongest_band(name: str, tmp_path):
    schedule, measured, model = SCHEDULES[name], MEASURED[name], Spectral()
    assert measured.peak_band_rms == pytest.approx(float(SPECTRUM.max().sqrt()), rel=0.1)
    facts = {"measured": measured, "batch": 4000, "dtype": FLOAT}
    found = calibrate(model, DDIM(), schedule, 4, (1, 12), recipe=Recipe(start=3.0, tolerance=0), **facts)
    assert found.levels[0].ratio == pytest.approx(3.0 * measured.peak_band_rms)
    assert (found.levels.schedule, found.nfe, found.settings["start"]) == (schedule, 4, 3.0)
    found.save(tmp_path / "late.json")
    assert Calibration.load(tmp_path / "late.json").levels == found.levels
    x = noise(range(10_000, 14_000), (1, 12), found.levels[0], FLOAT)
    replayed = energies(sample(model, x, found.levels, DDIM(), Replay(found)).x)
    torch.testing.assert_close(replayed, SPECTRUM, rtol=0.15, atol=0)
    with pytest.raises(ValueError, match=r"start = 1e-09: sigma/alpha = .* is below the schedule's smallest"):
        calibrate(model, DDIM(), schedule, 4, (1, 12), recipe=Recipe(start=1e-9), **facts)
    if math.isfinite(schedule.ratio_max):  # beyond the schedule's own first level there is nothing to begin with
        whole = calibrate(model, DDIM(), schedule, 4, (1, 12), recipe=Recipe(start=1e9, tolerance=0), **facts)
        assert (whole.levels[0], whole.settings["start"]) == (schedule.level(schedule.t_max), None)


def test_energy_alone_needs_no_trajectory_to_the_end_of_its_grid():
    """The survey ends at the smallest σ and the grid at 0: there is nothing to compare the plain run with."""
    facts = {"measured": MEASURED["edm"], "batch": 4000, "dtype": FLOAT}
    assert MEASURED["edm"].path.levels[-1].sigma > 0.0
    found = calibrate(Spectral(), DDIM(), EDM(), 4, (1, 12), recipe=Recipe(grid=GRIDS["edm"], fit=ByEnergy()), **facts)
    assert any(found.rho)


def test_mismatch_is_a_share_of_energy_and_a_gap_in_its_logarithm():
    goal = torch.randn(500, 1, 12, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    assert mismatch(BASIS, goal, goal) == 0.0
    # Every band of every sample is wrong by a tenth: 0.01 |y|²/(|y|² + tail E|y|²), and without a tail 0.01 itself.
    gap = math.log(1.21) ** 2
    assert mismatch(BASIS, 1.1 * goal, goal, tail=0.0) == pytest.approx(0.01 + gap)
    assert gap < mismatch(BASIS, 1.1 * goal, goal) < 0.01 + gap
    # Other samples of the same energy are wrong by twice it, and nothing is missing.
    other = goal.roll(1, 0) * torch.where(torch.arange(500) % 2 == 0, 1.0, -1.0).reshape(-1, 1, 1)
    assert mismatch(BASIS, other, goal, tail=1e6) * 1e6 == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
def test_an_empty_calibration_is_the_plain_solver_to_the_bit(solver: Solver):
    levels = GRIDS["edm"](EDM(), 5)
    x = noise(range(6), (1, 12), levels[0])
    model = Gaussian(torch.zeros(1, 12), SPECTRUM.float()[None])
    plain = sample(model, x, levels, solver, capture=True)
    replayed = sample(model, x, levels, solver, Replay(Calibration.empty(solver, levels, BASIS)), capture=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.trajectory, replayed.trajectory, strict=True))
    assert (replayed.nfe, replayed.network_calls, replayed.backward_passes) == (plain.nfe, plain.network_calls, 0)


@pytest.fixture(scope="module")
def found() -> Calibration:
    model = Spectral()
    return calibrate(
        model,
        DPMSolverMultistep(2),
        EDM(),
        5,
        (1, 12),
        measured=MEASURED["edm"],
        batch=4000,
        dtype=FLOAT,
        settings={"guidance": 1.0},
    )


def test_replay_does_not_tie_a_sample_to_its_batch(found: Calibration):
    x = noise(range(9), (1, 12), found.levels[0], FLOAT)
    together = sample(Spectral(), x, found.levels, found.solver, Replay(found)).x
    for k in (0, 4, 8):
        alone = sample(Spectral(), x[k : k + 1], found.levels, found.solver, Replay(found)).x
        torch.testing.assert_close(alone[0], together[k], rtol=1e-12, atol=1e-12)


def test_replay_applies_gamma(found: Calibration):
    half = Calibration(found.solver, found.levels, BASIS, ((),) * 5, (1.0, 0.5, 1.0, 1.0, 1.0))
    x = noise([1], (1, 12), found.levels[0], FLOAT)
    plain = sample(Spectral(), x, found.levels, found.solver, capture=True).trajectory
    damped = sample(Spectral(), x, found.levels, found.solver, Replay(half), capture=True).trajectory
    torch.testing.assert_close(damped[2], 0.5 * plain[1] + 0.5 * plain[2])


def test_replay_refuses_other_levels_and_shapes(found: Calibration):
    other = GRIDS["edm"](EDM(), 5)
    with pytest.raises(ValueError, match="levels: not those of the calibration"):
        sample(Spectral(), noise([1], (1, 12), other[0], FLOAT), other, found.solver, Replay(found))
    with pytest.raises(ValueError, match=r"samples of shape \(2, 12\), calibrated for \(1, 12\)"):
        sample(
            Gaussian(torch.zeros(2, 12), torch.ones(2, 12)),
            noise([1], (2, 12), other[0]),
            found.levels,
            found.solver,
            Replay(found),
        )


def test_the_file_round_trips_and_is_small(found: Calibration, tmp_path):
    path = tmp_path / "c.json"
    found.save(path)
    again = Calibration.load(path)
    assert again.to_dict() == found.to_dict()
    assert (again.solver, again.levels, again.basis, again.nfe) == (found.solver, found.levels, found.basis, 5)
    assert path.stat().st_size < 10_000
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    x = noise([1, 2], (1, 12), found.levels[0], FLOAT)
    a, b = (sample(Spectral(), x, c.levels, c.solver, Replay(c)).x for c in (found, again))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def resign(content: dict) -> dict:
    body = {k: v for k, v in content.items() if k != "sha256"}
    return {**body, "sha256": checksum(body)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {}, "'format' is missing"),
        (lambda c: resign({**c, "format": 99}), "format = 99: this version reads 2 only"),
        (lambda c: {**c, "nfe": 6}, "altered or is damaged"),
        (lambda c: resign({**c, "nfe": 6}), "nfe = 6: solver and levels make 5"),
        (lambda c: resign({k: v for k, v in c.items() if k != "rho"}), "fields missing: rho"),
        (lambda c: resign({**c, "solver": {"kind": "os.system"}}), "solver: kind = 'os.system', allowed are DDIM"),
        (lambda c: resign({**c, "solver": {"kind": "DDIM", "cmd": 1}}), r"solver: unknown fields \['cmd'\]"),
        (lambda c: resign({**c, "solver": {"kind": "DPMSolverMultistep", "nominal_order": 9}}), "order = 9"),
        (lambda c: resign({**c, "levels": c["levels"][::-1]}), "must strictly decrease|does not lie below"),
        (lambda c: resign({**c, "rho": c["rho"][:2]}), "2 and 5 entries for 5 steps"),
        (lambda c: resign({**c, "tau": c["tau"][:2]}), "tau: 2 entries for 5 steps"),
        (lambda c: resign({**c, "tau": [[[1.0]]] * 5}), r"tau\[0\]: need rows of 12 finite numbers"),
        (lambda c: resign({**c, "rho": [[]] * 5}), r"tau\[\d\]: given for a step without rho"),
        (lambda c: resign({**c, "rho": [[1.0]] * 5}), r"rho\[0\]: need 12 finite numbers"),
        (lambda c: resign({**c, "gamma": ["x"] * 5}), "x"),
        (lambda c: [], "'format' is missing"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(found: Calibration, tmp_path, change, message: str):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(change(found.to_dict())))
    with pytest.raises(ValueError, match=message) as refused:
        Calibration.load(path)
    assert str(path) in str(refused.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(data=st.data())
def test_no_file_does_more_than_be_refused(found: Calibration, tmp_path, data):
    """Truncated, flipped and reshaped files end in the documented error, never in another or in success."""
    path = tmp_path / "c.json"
    text = json.dumps(found.to_dict()).encode()
    cut = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(text[:cut])
    else:
        content = copy.deepcopy(found.to_dict())
        key = data.draw(st.sampled_from(sorted(content)))
        content[key] = data.draw(
            st.none()
            | st.integers()
            | st.floats()
            | st.text(max_size=5)
            | st.lists(st.none() | st.floats(), max_size=3)
        )
        path.write_text(json.dumps(resign(content) if key != "sha256" else content))
    try:
        Calibration.load(path)
    except ValueError:
        pass
    else:  # only a change that means nothing may pass: an empty list of errors or fingerprints, equal settings
        assert key in {"error", "model", "settings"} or content == found.to_dict()


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none.json")


def test_check_names_everything_that_differs(found: Calibration):
    found.check(denoiser=Spectral(), solver=DPMSolverMultistep(2), nfe=5, shape=(1, 12), settings={"guidance": 1.0})
    with pytest.raises(
        ValueError, match=r"solver: measured with .*; nfe: measured for 5, asked for 6; shape: .*; guidance"
    ):
        found.check(solver=DDIM(), nfe=6, shape=(3, 12), settings={"guidance": 7.5})
    with pytest.raises(ValueError, match=r"model: fingerprint differs by \d+"):
        found.check(denoiser=Spectral(spectrum=0.1 * SPECTRUM))


def test_the_stein_grid_follows_its_density():
    schedule = EDM(0.01, 100.0)
    flat = Stein(((-4.0, 3.0), (4.0, 3.0)), power=1.0, to_zero=False)(schedule, 8)
    even = GRIDS["logsnr-min"](schedule, 8)
    assert [level.lam for level in flat] == pytest.approx([level.lam for level in even], abs=1e-6)
    peaked = Stein(((-4.0, 1e-3), (0.0, 1.0), (4.0, 1e-3)), power=1.0)(schedule, 8)
    lams = [level.lam for level in peaked[:-1]]
    assert sum(abs(lam) < 1.0 for lam in lams) > sum(abs(level.lam) < 1.0 for level in even)
    assert peaked[-1].sigma == 0.0
    assert peaked[-2].sigma > schedule.t_min  # no evaluation is spent at the smallest noise


@pytest.mark.parametrize("name", ["edm", "vp", "flow"])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("power", [0.0, 0.2, 1.0])
def test_the_stein_grid_works_for_every_schedule_and_budget(name: str, steps: int, power: float):
    levels = MEASURED[name].grid(power)(SCHEDULES[name], steps)
    assert levels.steps == steps
    assert levels[0] == SCHEDULES[name].level(SCHEDULES[name].t_max)


def test_parts_of_a_batch_go_to_their_own_denoisers():
    a, b = Gaussian(torch.zeros(2), torch.ones(2)), Gaussian(torch.ones(2), torch.ones(2))
    x, level = torch.zeros(5, 2), EDM().level(1.0)
    out = Batched([a, b, a], [2, 1, 2])(x, level)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0])[:, None].expand(5, 2))
    whole = Batched([a, a], [3, 2])
    whole(x, level)
    assert whole.calls == 4  # two parts here, two before
    assert [part.tolist() for part in conditioned(lambda seeds: a, range(5), 2)(x, level)] == [[0.0, 0.0]] * 5
    with pytest.raises(ValueError, match="a batch of 5, but the parts hold 3 samples"):
        Batched([a], [3])(x, level)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Batched([gaussian().denoiser], [0]), "sizes"),
        (lambda: Stein(((0.0, 1.0),)), "at least two"),
        (lambda: Stein(((0.0, 1.0), (0.0, 1.0))), "strictly increasing"),
        (lambda: Stein(((0.0, 1.0), (1.0, -1.0))), "cost finite and > 0"),
        (lambda: Stein(((0.0, 1.0), (1.0, 1.0)), power=-1), "power = -1"),
        (lambda: Recipe(tolerance=-1), "within = -1: allowed are numbers >= 0"),
        (lambda: Recipe(start=0.0), "start = 0.0: allowed are finite numbers > 0, and None"),
        (lambda: Recipe(start=math.inf), "start = inf: allowed are finite numbers"),
        (lambda: Recipe(tolerance=math.nan), "within = nan"),
        (lambda: Balance(BASIS, torch.ones(3)), r"energy: shape \(3,\)"),
        (lambda: Balance(BASIS, torch.ones(1, 12), bound=0.5), "bound = 0.5"),
        (lambda: Balance(BASIS, torch.ones(1, 12), below=-1), "below = -1"),
        (lambda: Balance(BASIS, torch.ones(1, 12), significance=-1), "significance = -1"),
        (
            lambda: reference_run(mixture().denoiser, EDM(), (1,), probe_levels=1),
            "probe_levels = 1: allowed are 0, and 2 to",
        ),
        (lambda: reference_run(mixture().denoiser, EDM(), (1,), probe_samples=100), "probe_samples = 100"),
        (lambda: reference_run(mixture().denoiser, EDM(), (1,), batch=0), "batch = 0"),
        (
            lambda: reference_run(mixture().denoiser, EDM(), (1,), solver=SOLVERS["heun"]),
            r"solver = Heun\(\): allowed are",
        ),
        (lambda: reference_run(mixture().denoiser, EDM(), (1,), solver=SOLVERS["unipc-bh2-2"]), "solver = UniPCBh2"),
        (
            lambda: SteinEnergy()(reference_run(mixture().denoiser, EDM(), (1,), probe_levels=0, dtype=FLOAT)),
            "probe_levels = 0",
        ),
    ],
)
def test_bad_settings_are_named(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
