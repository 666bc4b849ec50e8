"""Runs that begin at a later level, as in img2img: their first steps have weights of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from networks.mixture import Mixture
from steindiff._serialization import with_checksum
from steindiff.calibrating import Progress, Recipe, calibrate, with_restarts
from steindiff.calibration import Calibration
from steindiff.corrections.replay import StepWeights
from steindiff.denoisers import Denoiser, Gaussian
from steindiff.levels import Levels
from steindiff.loop import sample
from steindiff.model import Model
from steindiff.reference import ReferenceRun, reference_run
from steindiff.schedules import EDM
from steindiff.solvers import SOLVERS, Solver

SHAPE = (1, 8, 8)
SCHEDULE = EDM(0.02, 20.0)


def gaussian() -> Denoiser:
    """Smooth to rough, a variance for every pixel."""
    return Gaussian(torch.zeros(SHAPE), torch.logspace(0.5, -2.5, 64).reshape(SHAPE))


def digits() -> Denoiser:
    """Many sharp modes: early on a run that strays ends at another digit, so only later starts can be judged."""
    data = torch.tensor(load_digits().images, dtype=torch.float32)[:500, None] / 8 - 1
    return Mixture(data, torch.full((len(data),), 0.02), torch.ones(len(data)))


def made(denoiser: Denoiser, solver: Solver, nfe: int) -> tuple[Calibration, ReferenceRun]:
    model = Model(denoiser, SCHEDULE, SHAPE)
    reference = reference_run(model, range(48), steps=48, to_zero=True)
    recipe = Recipe(search=None, rivals=(), to_zero=True)
    plain = calibrate(model, nfe, solver, recipe=recipe, reference=reference)
    return with_restarts(plain, reference), reference


def errors(calibration: Calibration, goal: ReferenceRun, denoiser: Denoiser, *, restarted: bool) -> list[float]:
    """Distance of runs begun at levels 1, 2, … of the fine trajectory from its end, as a host runs them."""
    replay, found = calibration.replay(), []
    for j in range(1, calibration.levels.steps):
        tail = Levels(calibration.levels[j:], SCHEDULE)
        steps = tuple(replay.weights(i, j if restarted else 0) for i in range(j, calibration.levels.steps))
        rest = replace(calibration, levels=tail, steps=tuple(replace(step, restarted=()) for step in steps))
        x = goal.trajectory(tail[0])
        ends = [sample(denoiser, x, tail, calibration.solver, c).x for c in (rest.replay(), None)]
        found.append(min(float((end - goal.samples).norm()) for end in (ends[:1] if restarted else ends)))
    return found


@pytest.mark.parametrize("name", ["dpmpp-2m", "dpmpp-3m", "unipc-bh2-2", "heun"])
@pytest.mark.parametrize("problem", [gaussian, digits])
def test_a_later_start_ends_nearer_to_the_fine_trajectory(name: str, problem: Callable[[], Denoiser]) -> None:
    """On seeds that were not fitted; against the plain solver, or the weights of a whole run where they are better."""
    denoiser, solver = problem(), SOLVERS[name]
    calibration, _ = made(denoiser, solver, 9 if name == "heun" else 8)
    goal = reference_run(Model(denoiser, SCHEDULE, SHAPE), range(1000, 1064), steps=48, to_zero=True)
    before = errors(calibration, goal, denoiser, restarted=False)
    after = errors(calibration, goal, denoiser, restarted=True)
    assert after[-1] < 1.03 * before[-1], "one step: an affine function of x and D, there is little to gain"
    if problem is gaussian:
        assert all(a < b for a, b in zip(after[:-1], before[:-1], strict=True))
        assert sum(after[:-1]) < 0.8 * sum(before[:-1])
    late = len(before) // 2
    assert sum(after[late:-1]) < 0.9 * sum(before[late:-1])


def without(calibration: Calibration) -> Calibration:
    return replace(calibration, steps=tuple(replace(step, restarted=()) for step in calibration.steps))


def test_they_survive_the_file(tmp_path: Path) -> None:
    calibration, _ = made(gaussian(), SOLVERS["dpmpp-2m"], 5)
    calibration.save(tmp_path / "c.json")
    again = Calibration.load(tmp_path / "c.json")
    assert [len(step.restarted) for step in again.steps] == [0, 1, 2, 3, 4]
    assert again.steps[2].restarted[1].rho == pytest.approx(calibration.steps[2].restarted[1].rho, abs=1e-6)
    assert again.steps[2].restarted[1].tau == (), "a run that begins at level 2 has one denoised image there"
    assert "restarted" not in json.dumps(without(calibration).to_dict())


def damage(index: int, restarted: Callable[[StepWeights], object]) -> Callable[[Calibration], Calibration]:
    def damaged(calibration: Calibration) -> Calibration:
        steps = list(calibration.steps)
        steps[index] = replace(steps[index], restarted=restarted(steps[index]))
        return replace(calibration, steps=tuple(steps))

    return damaged


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage(1, lambda w: w.restarted * 2), r"steps\[1\].restarted must hold at most 1 entries, got 2"),
        (damage(1, lambda w: (replace(w, rho=(1.0,)),)), r"steps\[1\].restarted\[0\].rho must hold"),
    ],
)
def test_weights_that_do_not_fit_are_refused(spoil: Callable[[Calibration], Calibration], message: str) -> None:
    calibration, _ = made(gaussian(), SOLVERS["dpmpp-2m"], 5)
    with pytest.raises(ValueError, match=message):
        spoil(calibration)


def test_a_file_cannot_nest_them() -> None:
    calibration, _ = made(gaussian(), SOLVERS["dpmpp-2m"], 5)
    content = calibration.to_dict()
    del content["sha256"]
    content["steps"][1]["restarted"][0]["restarted"] = [StepWeights().__dict__]
    with pytest.raises(ValueError, match=r"steps\[1\].restarted\[0\] must have no restarted weights of its own"):
        Calibration.from_dict(with_checksum(content))


def test_stopping_keeps_the_calibration_as_it_was() -> None:
    calibration, reference = made(gaussian(), SOLVERS["dpmpp-2m"], 5)
    bare, seen = without(calibration), []

    def told(progress: Progress) -> bool:
        seen.append(progress)
        return progress.done < 2

    assert with_restarts(bare, reference, callback=told) is bare
    assert [(p.stage, p.done, p.total) for p in seen] == [("later starts", 1, 4), ("later starts", 2, 4)]

    def interrupted(progress: Progress) -> None:
        raise KeyboardInterrupt

    assert with_restarts(bare, reference, callback=interrupted) is bare


def test_a_calibration_that_corrects_nothing_has_none() -> None:
    calibration, reference = made(gaussian(), SOLVERS["dpmpp-2m"], 5)
    bare = Calibration.empty(calibration.solver, calibration.levels, calibration.basis)
    assert with_restarts(bare, reference) is bare
