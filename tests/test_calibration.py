"""Stein calibration against exact answers: Gaussian data with a known spectrum in the basis."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import problems
from problems import FLOAT, gaussian
from steindiff import (
    EDM,
    GRIDS,
    SCHEDULES,
    SOLVERS,
    VP,
    Calibration,
    Flow,
    Levels,
    Model,
    Recipe,
    ReferenceRun,
    Schedule,
    Solver,
    StepWeights,
    calibrate,
    noise,
    reference_run,
    sample,
)
from steindiff._serialization import checksum
from steindiff.bases import DCT, Basis, Identity
from steindiff.denoisers import Gaussian, Guided
from steindiff.denoisers.wrappers import Batched, DynamicThreshold, StaticThreshold
from steindiff.grids.rules import LogSNR
from steindiff.grids.stein import Stein
from steindiff.solvers import DDIM, DPMSolverMultistep
from steindiff.stein import Balance, ByEnergy, ProbedLevel, SteinDensity, SteinEnergy, SteinProbes, balance
from steindiff.tableau import Step

BASIS = DCT((1, 12))
SPECTRUM = 1.0 / (1.0 + torch.arange(12, dtype=FLOAT)) ** 2
Spectral = partial(problems.Spectral, basis=BASIS, spectrum=SPECTRUM)


def energies(x: Tensor, basis: Basis = BASIS) -> Tensor:
    return basis.average(basis.forward(x).square()).mean(0)


def model(schedule: Schedule) -> Model:
    return Model(Spectral(), schedule, (1, 12), dtype=FLOAT)


def fine(schedule: Schedule, num: int = 4000) -> ReferenceRun:
    return reference_run(model(schedule), range(num), steps=60, batch=num, basis=BASIS)


REFERENCES = {name: fine(SCHEDULES[name]) for name in ("edm", "vp", "flow")}
PROBED: dict[str, tuple[ProbedLevel, ...]] = {name: SteinProbes(samples=4000)(r) for name, r in REFERENCES.items()}
schedules = pytest.mark.parametrize("name", REFERENCES)
FITTED = Recipe(search=None, rivals=())


@schedules
def test_clean_energy_is_the_true_spectrum_at_every_level(name: str):
    """M_f = E|D_f|² + (σ²/α) E J_ff: reference-free, whatever the level it is read at."""
    for probed in PROBED[name]:
        values = probed.clean_energy()
        error = values.std(0) / len(values) ** 0.5
        assert bool(((values.mean(0) - SPECTRUM).abs() < 5 * error + 0.03 * SPECTRUM).all()), probed.level


@schedules
def test_self_energy_is_the_true_spectrum(name: str):
    torch.testing.assert_close(REFERENCES[name].self_energy().mean(0), SPECTRUM, rtol=0.1, atol=0)
    torch.testing.assert_close(REFERENCES[name].variances(), SPECTRUM, rtol=0.1, atol=0)


@schedules
def test_cost_is_sigma_squared_trace_of_the_squared_jacobian(name: str):
    for probed in PROBED[name]:
        exact = float(Spectral().gain(probed.level).square().sum())
        error = float(probed.square.std()) / len(probed.square) ** 0.5
        assert abs(float(probed.square.mean()) - exact) < 5 * error + 1e-9
        assert probed.cost() == pytest.approx(probed.level.sigma**2 * exact, rel=0.02)


@schedules
def test_a_reference_run_counts_its_cost(name: str):
    reference = REFERENCES[name]
    assert reference.network_calls == 60
    assert reference.sigma_data == pytest.approx(math.sqrt(float(SPECTRUM.mean())), rel=0.05)


def test_a_guided_reference_run_counts_both_networks():
    guided = Guided(gaussian().denoiser, gaussian().denoiser, 2.0)
    subject = Model(guided, EDM(), tuple(gaussian().denoiser.mean.shape), dtype=FLOAT).trust()
    assert reference_run(subject, range(6), steps=5, batch=3).network_calls == guided.calls == 2 * 2 * 5


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
        levels = LogSNR(to_zero=False)(EDM(0.1, 5.0), steps)
        x = torch.full((1, 1), math.sqrt(0.3 + 25.0), dtype=FLOAT)  # one state of the marginal's own energy
        out = sample(model, x, levels, SOLVERS[solver], Balance(Identity((1,)), c, significance=0.0))
        gaps.append(abs(float(out.statistics[steps // 2]["rho"]) - 1.0))
    assert math.log2(gaps[0] / gaps[1]) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("solver", ["ddim", "dpmpp-2m", "dpmpp-3m", "unipc-bh2-2", "ipndm-3", "heun"])
@schedules
def test_calibrated_samples_have_the_true_spectrum(name: str, solver: str):
    """On seeds the calibration never saw, at 5 or 6 evaluations."""
    nfe = 6 if solver == "heun" and name != "vp" else 5  # which ends at its smallest σ: two evaluations a step
    found = calibrate(model(SCHEDULES[name]), nfe, solver, recipe=FITTED, reference=REFERENCES[name], batch=4000)
    x = noise(range(10_000, 14_000), (1, 12), found.levels[0], FLOAT)
    plain = energies(sample(Spectral(), x, found.levels, SOLVERS[solver]).x)
    replayed = energies(sample(Spectral(), x, found.levels, SOLVERS[solver], found.replay()).x)
    torch.testing.assert_close(replayed, SPECTRUM, rtol=0.15, atol=0)
    gap, before = ((x / SPECTRUM).log().abs().mean().item() for x in (replayed, plain))
    assert gap < max(0.5 * before, 0.04)


def test_reference_free_energy_and_the_stein_grid_serve_too():
    recipe = Recipe(
        fit=ByEnergy(SteinEnergy(0.5, SteinProbes(samples=4000))), grid=SteinDensity(), search=None, rivals=()
    )
    found = calibrate(model(EDM()), 5, DDIM(), recipe=recipe, reference=REFERENCES["edm"], batch=4000)
    x = noise(range(10_000, 14_000), (1, 12), found.levels[0], FLOAT)
    made = energies(sample(Spectral(), x, found.levels, DDIM(), found.replay()).x)
    torch.testing.assert_close(made, SPECTRUM, rtol=0.2, atol=0)


def test_many_steps_are_left_all_but_alone():
    """Where the solver is as good as the reference, most bands are within their own error and none is far from 1."""
    recipe = Recipe(grid=GRIDS["edm"], fit=ByEnergy(), search=None, rivals=())
    found = calibrate(model(EDM()), 40, "unipc-bh2-3", recipe=recipe, reference=REFERENCES["edm"], batch=4000)
    touched = sum(value != 1.0 for step in found.steps for value in step.rho)
    assert touched < 0.5 * 40 * BASIS.bands
    assert all(abs(value - 1.0) < 0.02 for step in found.steps for value in step.rho)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
def test_an_empty_calibration_is_the_plain_solver_to_the_bit(solver: Solver):
    levels = GRIDS["edm-to-zero"](EDM(), 5)
    x = noise(range(6), (1, 12), levels[0])
    exact = Gaussian(torch.zeros(1, 12), SPECTRUM.float()[None])
    plain = sample(exact, x, levels, solver, capture=True)
    replayed = sample(exact, x, levels, solver, Calibration.empty(solver, levels, BASIS).replay(), capture=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.trajectory, replayed.trajectory, strict=True))
    assert (replayed.nfe, replayed.network_calls, replayed.backward_passes) == (plain.nfe, plain.network_calls, 0)


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrate(model(EDM()), 5, recipe=FITTED, reference=REFERENCES["edm"], batch=4000)


def test_replay_does_not_tie_a_sample_to_its_batch(found: Calibration):
    x = noise(range(9), (1, 12), found.levels[0], FLOAT)
    together = sample(Spectral(), x, found.levels, found.solver, found.replay()).x
    for k in (0, 4, 8):
        alone = sample(Spectral(), x[k : k + 1], found.levels, found.solver, found.replay()).x
        torch.testing.assert_close(alone[0], together[k], rtol=1e-12, atol=1e-12)


def test_replay_applies_gamma(found: Calibration):
    steps = tuple(StepWeights(gamma=gamma) for gamma in (1.0, 0.5, 1.0, 1.0, 1.0))
    half = Calibration(solver=found.solver, levels=found.levels, basis=BASIS, steps=steps)
    x = noise([1], (1, 12), found.levels[0], FLOAT)
    plain = sample(Spectral(), x, found.levels, found.solver, capture=True).trajectory
    damped = sample(Spectral(), x, found.levels, found.solver, half.replay(), capture=True).trajectory
    torch.testing.assert_close(damped[2], 0.5 * plain[1] + 0.5 * plain[2])


def test_replay_refuses_other_levels_and_shapes(found: Calibration):
    other = GRIDS["edm"](EDM(), 5)
    with pytest.raises(ValueError, match="levels must be those of the calibration"):
        sample(Spectral(), noise([1], (1, 12), other[0], FLOAT), other, found.solver, found.replay())
    with pytest.raises(ValueError, match=r"samples of shape \(1, 12\), got \(2, 12\)"):
        sample(
            Gaussian(torch.zeros(2, 12), torch.ones(2, 12)),
            noise([1], (2, 12), other[0]),
            found.levels,
            found.solver,
            found.replay(),
        )


@pytest.mark.parametrize("other", ["dpmpp-3m", "heun", "ddim"])
def test_replay_refuses_another_solver(found: Calibration, other: str):
    x = noise([1], (1, 12), found.levels[0], FLOAT)
    with pytest.raises(ValueError, match="solver must be the one the steps were fitted with, DPMSolverMultistep"):
        sample(Spectral(), x, found.levels, SOLVERS[other], found.replay())


def test_a_sampler_refuses_another_model_guidance_or_shape_unless_told_not_to(found: Calibration):
    assert found.sampler()(model(EDM()), range(2)).nfe == 5
    weaker = Model(Spectral(spectrum=0.1 * SPECTRUM), EDM(), (1, 12), dtype=FLOAT)
    with pytest.raises(ValueError, match=r"network: its answer differs by \d+"):
        found.sampler()(weaker, range(2))
    assert found.sampler(check=False)(weaker, range(2)).nfe == 5
    guided = Model(Guided(Spectral(), Spectral(), 2.0), EDM(), (1, 12), dtype=FLOAT)
    with pytest.raises(ValueError, match=r"guidance: measured with 1.0, asked for 2.0"):
        found.sampler()(guided, range(2))
    for threshold in (StaticThreshold(Spectral()), DynamicThreshold(Spectral())):
        with pytest.raises(ValueError, match="threshold: measured with None, asked for"):
            found.sampler()(Model(threshold, EDM(), (1, 12), dtype=FLOAT), range(2))
    rescaled = replace(found, conditions={"guidance_rescale": 0.3})
    with pytest.raises(ValueError, match=r"guidance_rescale: measured with 0.3, asked for 0.0"):
        rescaled.sampler()(model(EDM()), range(2))
    with pytest.raises(ValueError, match="schedule: measured on EDM, the model has VP"):
        found.sampler()(model(VP()), range(2))


def test_the_model_is_recognised_by_one_evaluation_once(found: Calibration):
    subject = model(EDM()).trust()
    first = found.sampler()(subject, range(2))
    assert subject.denoiser.calls == first.network_calls + 1
    found.sampler()(subject, range(2))
    assert subject.denoiser.calls == 2 * first.network_calls + 1


def test_the_file_round_trips_and_is_small(found: Calibration, tmp_path):
    path = tmp_path / "c.json"
    found.save(path)
    again = Calibration.load(path)
    assert again.to_dict() == found.to_dict()
    assert (again.solver, again.levels, again.basis, again.nfe) == (found.solver, found.levels, found.basis, 5)
    assert path.stat().st_size < 10_000
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    x = noise([1, 2], (1, 12), found.levels[0], FLOAT)
    a, b = (sample(Spectral(), x, c.levels, c.solver, c.replay()).x for c in (found, again))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def resign(content: dict) -> dict:
    body = {k: v for k, v in content.items() if k != "sha256"}
    return {**body, "sha256": checksum(body)}


def with_step(content: dict, **changes) -> dict:
    first, *rest = content["steps"]
    first = {**first, "tau": [first["rho"]], **changes}
    return {**content, "steps": [first, *rest]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {}, "must be a JSON object with 'format'"),
        (lambda c: resign({**c, "format": 99}), "format = 99: this version reads calibrations of format 2 and 3"),
        (lambda c: {**c, "nfe": 6}, "altered or is damaged"),
        (lambda c: resign({**c, "nfe": 6}), "nfe must be 5"),
        (lambda c: resign({k: v for k, v in c.items() if k != "steps"}), r"lacks the fields \['steps'\]"),
        (lambda c: resign({**c, "solver": {"kind": "os.system"}}), "os.system"),
        (lambda c: resign({**c, "solver": {"kind": "DDIM", "cmd": 1}}), "cmd"),
        (lambda c: resign({**c, "solver": {"kind": "DPMSolverMultistep", "nominal_order": 9}}), "9"),
        (lambda c: resign({**c, "levels": c["levels"][::-1]}), "must lie below"),
        (lambda c: resign({**c, "levels": [[*row[:3], 0.0] for row in c["levels"]]}), "told must be finite and > 0"),
        (lambda c: resign({**c, "steps": c["steps"][:2]}), "must hold 5 entries, one a step, got 2"),
        (lambda c: resign(with_step(c, tau=[[1.0]])), r"steps\[0\].tau\[0\] must hold 12 finite numbers, got 1"),
        (lambda c: resign(with_step(c, rho=[])), r"steps\[0\].tau needs a rho|must hold"),
        (lambda c: resign(with_step(c, rho=[1.0])), r"steps\[0\].rho must hold 12 finite numbers, got 1"),
        (lambda c: resign(with_step(c, rho=["1.0"] * 12)), r"steps\[0\].rho\[0\] must be a finite number"),
        (lambda c: resign(with_step(c, gamma=True)), r"steps\[0\].gamma must be a finite number"),
        (lambda c: [], "must be a JSON object with 'format'"),
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
    else:  # only a change that means nothing may pass: an empty fingerprint, other facts
        assert key in {"fingerprint", "conditions", "provenance"} or content == found.to_dict()


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none.json")


def test_differences_name_everything(found: Calibration):
    assert found.differences(solver=DPMSolverMultistep(2), nfe=5, shape=(1, 12), conditions={"guidance": 1.0}) == []
    told = found.differences(solver=DDIM(), nfe=6, shape=(3, 12), conditions={"guidance": 7.5})
    assert [text.split(":")[0] for text in told] == ["solver", "nfe", "shape", "guidance"]


def test_a_file_of_format_2_is_read(found: Calibration, tmp_path):
    """Parallel lists and one `settings`, as version 0.1 wrote them."""
    new = found.to_dict()
    old = {name: new[name] for name in ("solver", "nfe", "schedule", "basis")}
    old |= {"format": 2, "levels": [row[:3] for row in new["levels"]], "gamma": [1.0] * 5, "model": new["fingerprint"]}
    old |= {name: [step[name] for step in new["steps"]] for name in ("rho", "tau", "error")}
    old["settings"] = {"guidance": 1.0, "samples": 64}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(resign(old)))
    read = Calibration.load(path)
    again = Calibration.from_dict(new)
    assert (read.steps, read.levels, read.fingerprint) == (again.steps, again.levels, again.fingerprint)
    assert (read.conditions, read.provenance) == ({"guidance": 1.0}, {"samples": 64})


def test_the_stein_grid_follows_its_density():
    schedule = EDM(0.01, 100.0)
    flat = Stein(((-4.0, 3.0), (4.0, 3.0)), power=1.0, to_zero=False)(schedule, 8)
    even = LogSNR(to_zero=False)(schedule, 8)
    assert [level.lam for level in flat] == pytest.approx([level.lam for level in even], abs=1e-6)
    peaked = Stein(((-4.0, 1e-3), (0.0, 1.0), (4.0, 1e-3)), power=1.0, to_zero=True)(schedule, 8)
    lams = [level.lam for level in peaked[:-1]]
    assert sum(abs(lam) < 1.0 for lam in lams) > sum(abs(level.lam) < 1.0 for level in even)
    assert peaked[-1].sigma == 0.0
    assert peaked[-2].sigma > schedule.t_min  # no evaluation is spent at the smallest noise


@pytest.mark.parametrize("name", ["edm", "vp", "flow"])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
@pytest.mark.parametrize("power", [0.0, 0.2, 1.0])
def test_the_stein_grid_works_for_every_schedule_and_budget(name: str, steps: int, power: float):
    knots = tuple((probed.level.lam, probed.cost()) for probed in PROBED[name])
    levels = Stein(knots, power)(SCHEDULES[name], steps)
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
    subject = Model(lambda seeds: a, EDM(), (2,))
    assert [part.tolist() for part in subject.denoiser_for(range(5), 2)(x, level)] == [[0.0, 0.0]] * 5
    with pytest.raises(ValueError, match="a batch of 5, but the parts hold 3 samples"):
        Batched([a], [3])(x, level)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Batched([gaussian().denoiser], [0]), "sizes"),
        (lambda: Stein(((0.0, 1.0),)), "at least two"),
        (lambda: Stein(((0.0, 1.0), (0.0, 1.0))), "strictly increasing"),
        (lambda: Stein(((0.0, 1.0), (1.0, -1.0))), "cost finite and > 0"),
        (lambda: Stein(((0.0, 1.0), (1.0, 1.0)), power=-1), "power must be >= 0"),
        (lambda: Recipe(steps=1), "steps must be a whole number >= 2, got 1"),
        (lambda: Recipe(seeds=range(2)), "seeds must hold at least 3"),
        (lambda: SteinProbes(levels=1), "levels must be a whole number >= 2, got 1"),
        (lambda: SteinProbes(samples=0), "samples must be"),
        (lambda: Balance(BASIS, torch.ones(3)), r"energy: shape \(3,\)"),
        (lambda: Balance(BASIS, torch.ones(1, 12), bound=0.5), "bound must be >= 1, got 0.5"),
        (lambda: Balance(BASIS, torch.ones(1, 12), below=-1), "below must be >= 0, got -1"),
        (lambda: Balance(BASIS, torch.ones(1, 12), significance=-1), "significance must be >= 0, got -1"),
        (lambda: reference_run(model(EDM()), range(4), batch=0), "batch must be a whole number >= 1, got 0"),
        (lambda: reference_run(model(EDM()), range(4), steps=1), "steps must be a whole number >= 2"),
        (lambda: calibrate(model(EDM()), 0), "nfe must be a whole number >= 1, got 0"),
        (lambda: calibrate(model(EDM()), 5, "heun"), "nfe must be one Heun"),
    ],
)
def test_bad_settings_are_named(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
