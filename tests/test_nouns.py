"""The main path from the top level: Model, Sampler, calibrate; names; what is refused and how."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import steindiff as sd
from problems import Nonlinear
from steindiff.corrections.base import Transition
from steindiff.denoisers import Denoiser, Gaussian
from steindiff.integrations.kdiffusion import sigmas_of
from steindiff.tableau import HERE, Stage, Step, Tableau

DATA = Path(__file__).parent / "data"
QUICK = sd.Recipe(seeds=range(10**6, 10**6 + 6), steps=6, search=sd.Search(iterations=1))


def test_the_embedded_model_in_four_lines(monkeypatch):
    monkeypatch.setattr("steindiff.calibrating.Recipe", lambda: QUICK)
    model = sd.load("fashion")
    sampler = sd.calibrate(model, nfe=3).sampler()
    images = sampler(model, seeds=range(2)).x
    assert (tuple(images.shape), sampler.nfe) == ((2, 1, 28, 28), 3)
    plain = sd.Sampler("dpmpp-2m", grid="logsnr", nfe=3)
    assert plain(model, seeds=range(2)).nfe == 3


def test_ones_own_network_in_four_lines():
    network = Nonlinear(6, torch.float32)
    model = sd.Model(sd.Epsilon(network), sd.Discrete.linear(), shape=(6,), device="cpu")
    sampler = sd.calibrate(model, nfe=4, recipe=QUICK).sampler()
    samples = sampler(model, seeds=range(16)).x
    assert samples.shape == (16, 6)


RECORDED = sorted(p.stem for p in DATA.glob("*-*.json"))


class Smooth(Denoiser):
    """Not a network: what is recorded must not depend on how a machine multiplies matrices."""

    calls = 0

    def __call__(self, x, level):
        scaled = level.alpha * x / (level.alpha**2 + level.sigma**2)
        return 0.5 * scaled + 0.1 * torch.sin(3.0 * scaled)


@pytest.mark.parametrize("name", RECORDED)
def test_no_number_changed_in_the_redesign(name: str):
    """Calibrations of format 2 end where the version before the two nouns ended, in float64."""
    calibration = sd.Calibration.load(DATA / f"{name}.json")
    levels = calibration.levels
    model = sd.Model(Smooth(), levels.schedule, calibration.shape, dtype=torch.float64)
    with np.load(DATA / "before.npz") as arrays:
        before = arrays[name]
    made = calibration.sampler(check=False)(model, seeds=[0]).x.numpy()
    belongs = calibration.sampler().check
    assert belongs is not None
    belongs(sd.load(name.split("-")[0]))
    assert len(RECORDED) >= 7
    np.testing.assert_allclose(made, before, rtol=0, atol=1e-9)


def test_the_whole_record_of_the_redesign():
    record = json.loads((Path(__file__).parents[1] / "benchmarks/results/redesign.json").read_text())
    assert len(record["calibrations"]) == 29
    assert max(entry["largest_difference"] for entry in record["calibrations"].values()) <= 1e-6
    assert record["seeds"] == 16


RESULTS = {"Comparison"}


def public() -> dict[str, object]:
    return {name: getattr(sd, name) for name in sd.__all__ if callable(getattr(sd, name))}


@pytest.mark.parametrize("name", sorted(public()))
def test_no_public_function_takes_more_than_seven_arguments(name: str):
    thing = public()[name]
    if name in RESULTS or (isinstance(thing, type) and issubclass(thing, Exception)):
        return  # nobody but the library makes one
    assert len(inspect.signature(thing).parameters) <= 7


def test_no_function_shadows_a_module():
    folder = Path(sd.__file__).parent
    modules = {p.stem for p in folder.glob("*.py")} | {p.name for p in folder.iterdir() if p.is_dir()}
    assert not {name for name in sd.__all__ if name in modules}


def test_the_api_page_lists_what_is_public():
    page = (Path(__file__).parents[1] / "docs/api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: steindiff\.(\w+)$", page, re.MULTILINE))
    assert listed - {"metrics", "production", "diagnostics", "probes", "corrections"} == set(sd.__all__) - {
        "__version__"
    }
    for host in ("diffusers", "kdiffusion", "edm"):
        assert f"::: steindiff.integrations.{host}" in page


GAUSSIAN = Gaussian(torch.zeros(3), torch.ones(3))
MODEL = sd.Model(GAUSSIAN, sd.EDM(), (3,))


RECORD = sd.Calibration.empty(sd.SOLVERS["ddim"], sd.GRIDS["logsnr"](sd.EDM(), 3), sd.Identity((3,)))


def labelled(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    return 0.1 * x + labels


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: sd.Model(nn.Linear(3, 3), sd.EDM(), (3,)),
            "denoiser must be a Denoiser, got Linear; wrap",
        ),
        (lambda: sd.Model(lambda x, t: x, sd.EDM(), (3,)), "denoiser must be a Denoiser or a function of seeds"),
        (lambda: sd.Model(sd.Epsilon, sd.EDM(), (3,)), r"got the class Epsilon; write Epsilon\(network\)"),
        (lambda: sd.Model(lambda seeds: 3, sd.EDM(), (3,)).denoiser_for([0]), "must return a Denoiser for given seeds"),
        (lambda: sd.Model(GAUSSIAN, sd.VP, (3,)), r"schedule must be an instance, got the class; write VP\(\)"),
        (lambda: sd.Model(GAUSSIAN, "vp", (3,)), r"schedule must be a Schedule such as VP\(\)"),
        (lambda: sd.Model(GAUSSIAN, sd.EDM(), (0,)), "shape must hold whole numbers >= 1"),
        (lambda: sd.Model(GAUSSIAN, sd.EDM(), (3,), dtype=torch.float16), "dtype must be torch.float32"),
        (lambda: sd.SOLVERS["dpmpp2m"], "did you mean 'dpmpp-2m'"),
        (lambda: sd.Sampler("dpmpp2m", nfe=5), "solver = 'dpmpp2m' is not known; did you mean 'dpmpp-2m'"),
        (lambda: sd.Sampler(grid="karras", nfe=5), "grid = 'karras' is not known; choose from"),
        (lambda: sd.Sampler(), "nfe must be given with a grid"),
        (lambda: sd.Sampler(nfe=0), "nfe must be a whole number >= 1, got 0"),
        (lambda: sd.Sampler("heun", nfe=5)(MODEL, range(2)), "nfe must be one Heun"),
        (lambda: sd.Sampler(correction="calibrated", nfe=4), "correction = 'calibrated' is not known"),
        (lambda: sd.Sampler(nfe=4)(GAUSSIAN, range(2)), "model must be a steindiff.Model, got Gaussian"),
        (
            lambda: sd.Sampler(nfe=4)(MODEL, 4),
            r"seeds must be a sequence, .* write range\(4\)",
        ),
        (lambda: sd.Sampler(nfe=4)(MODEL, []), "seeds must hold at least one"),
        (lambda: sd.Sampler(nfe=4)(MODEL, [1.5]), "seeds must be whole numbers from 0 to"),
        (lambda: sd.Sampler(nfe=4)(MODEL, [-1]), "seeds must be whole numbers from 0 to"),
        (lambda: sd.Sampler(nfe=4)(MODEL, range(4), batch=0), "batch must be a whole number >= 1, got 0"),
        (lambda: sd.noise(4, (3,), sd.Level(1.0, 1.0, 1.0)), "seeds must be a sequence"),
        (
            lambda: sd.Sampler(correction=RECORD, nfe=4),
            r"not be a calibration; write Calibration.load\(path\).sampler\(\)",
        ),
        (lambda: sd.Sampler(correction="mine.json", nfe=4), "correction must not be a calibration"),
        (lambda: sd.Sampler(correction=Path("mine.json"), nfe=4), "correction must not be a calibration"),
        (lambda: sigmas_of("mine.json"), r"a Calibration, got 'mine.json'; of a file write Calibration.load\(path\)"),
        (lambda: sd.Sampler(solver=RECORD, nfe=4), r"solver must be a Solver or its name, got Calibration\(.{,60}…$"),
        (
            lambda: sd.Sampler(nfe=2)(
                sd.Model(sd.X0(partial(labelled, labels=torch.ones(4, 1))), sd.EDM(), (3,)), range(6)
            ),
            "network failed on a batch of 6: .*where labels are bound to it, give Model a function of seeds",
        ),
        (lambda: sd.calibrate(GAUSSIAN, 4), "model must be a steindiff.Model"),
        (lambda: sd.calibrate(MODEL, 4, "dpm-2m"), "did you mean"),
        (lambda: sd.load("cifar"), "name = 'cifar' is not known; did you mean 'cifar10'"),
        (lambda: sd.load("cifar10", guidance=-1.0), "guidance must be >= 0"),
        (lambda: sd.register("mine", 3), "value must be one of"),
        (lambda: sd.register("ddim", sd.SOLVERS["heun"]), "the name 'ddim' is taken"),
    ],
)
def test_a_mistake_gets_a_sentence_with_the_nearest_right_thing(build, message: str):
    with pytest.raises((TypeError, ValueError, KeyError), match=message):
        build()


@pytest.mark.parametrize("wrong", ["denoiser", "levels", "solver", "correction"])
def test_the_tensor_level_names_what_is_not_of_its_kind(wrong: str):
    levels = sd.GRIDS["logsnr"](sd.EDM(), 3)
    given = {"denoiser": GAUSSIAN, "levels": levels, "solver": sd.SOLVERS["ddim"], "correction": None}
    given[wrong] = RECORD
    with pytest.raises(TypeError, match=f"{wrong} must be a {wrong.capitalize()}, got"):
        sd.sample(given["denoiser"], MODEL.noise([0], levels[0]), given["levels"], given["solver"], given["correction"])


@dataclass(frozen=True)
class Straight(sd.Solver):
    """A solver of somebody else's: one Euler step after the other."""

    @property
    def order(self) -> int:
        return 1

    @property
    def memory(self) -> int:
        return 0

    def tableau(self, levels: sd.Levels, i: int) -> Tableau:
        from steindiff.solvers.base import euler

        return Tableau((Stage(HERE, levels[i]),), euler(levels[i], levels[i + 1]))


@dataclass(frozen=True)
class Doubled(sd.Correction):
    """A correction of somebody else's that changes nothing."""

    def __call__(self, step: Step, x: Tensor, levels: sd.Levels, i: int) -> Transition:
        return Transition(*step(x))


@dataclass(frozen=True)
class Steeper(sd.EDM):
    """A schedule of somebody else's."""

    rho: float = 9.0


def test_things_of_others_are_found_by_name_saved_and_loaded(tmp_path, monkeypatch):
    for registry in (sd.SOLVERS, sd.CORRECTIONS):  # other tests list what there is
        monkeypatch.setattr(registry, "_found", dict(registry._found))
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    sd.register("straight", Straight())
    sd.register("doubled", Doubled())
    made = sd.calibrate(MODEL, 4, "straight", recipe=QUICK)
    made.save(tmp_path / "c.json")
    again = sd.Calibration.load(tmp_path / "c.json")
    assert again.solver == Straight()
    x = again.sampler()(MODEL, range(3)).x
    torch.testing.assert_close(x, made.sampler()(MODEL, range(3)).x, rtol=1e-4, atol=1e-5)
    assert sd.Sampler(nfe=3, correction="doubled")(MODEL, range(2)).nfe == 3
    from steindiff.comparison import default_methods

    for registry in (sd.SCHEDULES,):
        monkeypatch.setattr(registry, "_found", dict(registry._found))
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    steeper = sd.calibrate(sd.Model(GAUSSIAN, Steeper(), (3,)), 3, recipe=QUICK)
    with pytest.raises(
        ValueError, match=r"schedule = Steeper\(.*could not be loaded again; steindiff.register it first"
    ):
        steeper.save(tmp_path / "s.json")
    assert not (tmp_path / "s.json").exists()
    sd.register("steeper", Steeper())
    steeper.save(tmp_path / "s.json")
    assert sd.Calibration.load(tmp_path / "s.json").levels.schedule == Steeper()
    assert "doubled" in default_methods()


def test_batches_are_halved_where_memory_runs_out():
    class Hungry(Gaussian):
        def denoise(self, x: Tensor, level: sd.Level) -> Tensor:
            if len(x) > 3:
                raise torch.OutOfMemoryError("no room")
            return super().denoise(x, level)

    model = sd.Model(Hungry(torch.zeros(3), torch.ones(3)), sd.EDM(), (3,))
    calm = sd.Sampler(nfe=4)(MODEL, range(10)).x
    torch.testing.assert_close(sd.Sampler(nfe=4)(model, range(10), batch=10).x, calm)
    with pytest.raises(MemoryError, match="batch = 10 does not fit in memory; choose a smaller one"):
        list(sd.Sampler(nfe=4).batches(model, range(10), 10, shrink=False))


def test_a_sampler_captures_and_counts():
    result = sd.Sampler("heun", grid="edm", nfe=6)(MODEL, range(5), batch=2, capture=True)
    assert (result.nfe, result.network_calls, len(result.trajectory)) == (6, 6, 4)
    assert all(state.shape == (5, 3) for state in result.trajectory)
    assert torch.equal(result.trajectory[-1], result.x)


def test_float64_noise_is_the_float32_stream():
    level = sd.Level(1.0, 1.0, 2.0)
    assert torch.equal(sd.noise([3], (4,), level, torch.float64).float(), sd.noise([3], (4,), level))


def test_told_levels_reach_the_network_and_leave_the_mathematics_alone():
    seen = []

    def network(x: Tensor, t: Tensor) -> Tensor:
        seen.append(float(t[0]))
        return torch.zeros_like(x)

    schedule = sd.VP()
    levels = sd.GRIDS["logsnr"](schedule, 3)
    told = levels.tell([0.9, 1.0, 0.95])
    assert [(a.alpha, a.sigma) for a in told] == [(a.alpha, a.sigma) for a in levels]
    sd.sample(sd.Epsilon(network), MODEL.noise([0], told[0]), told, sd.SOLVERS["ddim"])
    assert seen == pytest.approx([level.t for level in told[:-1]])
    assert schedule.level(told[0].t).ratio == pytest.approx(0.9 * levels[0].ratio)
    assert told[1] == levels[1]
    del seen[:]
    sd.sample(sd.EDMDenoiser(network), MODEL.noise([0], told[0]), told, sd.SOLVERS["ddim"])
    assert seen == pytest.approx([level.told * level.ratio for level in told[:-1]], rel=1e-6)


@pytest.mark.parametrize("classes", [1, 3, 7, 10])
@pytest.mark.parametrize("seeds", [range(8), range(0, 60, 10), [3, 3 + 10, 2, 1]])
def test_a_model_is_compared_with_its_own_samples_of_the_same_conditions(classes: int, seeds: Sequence[int]):
    from steindiff.comparison import OTHER_SEEDS, other

    model = sd.Model(sd.EDMDenoiser(lambda x, sigma: x), sd.EDM(), (1,), condition=lambda seed: seed % classes)
    found = other(model, seeds)
    assert [seed % classes for seed in found] == [seed % classes for seed in seeds]
    assert len(set(found)) == len(seeds)
    assert min(found) >= OTHER_SEEDS
    lonely = sd.Model(sd.EDMDenoiser(lambda x, sigma: x), sd.EDM(), (1,), condition=lambda seed: seed)
    assert len(set(other(lonely, seeds))) == len(seeds)
