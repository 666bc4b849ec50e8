"""What every schedule and every grid must keep, for every variant found in the folders."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steindiff import GRIDS, SCHEDULES
from steindiff.grids import Explicit, Grid, Karras, LogSNR, UniformTime
from steindiff.levels import Level, Levels
from steindiff.schedules import EDM, VP, Discrete, Flow, Schedule

schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
grids = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())


@schedules
@given(share=st.floats(0.0, 1.0))
def test_noise_grows_with_time_and_the_inverse_inverts(schedule: Schedule, share: float):
    t = schedule.t_min + share * (schedule.t_max - schedule.t_min)
    level = schedule.level(t)
    assert 0.0 <= level.alpha <= 1.0
    assert level.sigma > 0.0
    earlier = schedule.level(schedule.t_min + 0.9 * share * (schedule.t_max - schedule.t_min))
    assert earlier.ratio <= level.ratio
    if level.alpha > 1e-12:
        again = schedule.at(level.lam)
        assert again.t == pytest.approx(t, abs=1e-6 * schedule.t_max)
        assert again.lam == pytest.approx(level.lam, abs=1e-9 * (1.0 + abs(level.lam)))


@schedules
def test_ends_clean(schedule: Schedule):
    assert schedule.clean() == Level(0.0, 1.0, 0.0)


@pytest.mark.parametrize("name", ["vp", "cosine", "ddpm"])
def test_variance_is_preserved(name: str):
    schedule = SCHEDULES[name]
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        level = schedule.level(schedule.t_min + share * (schedule.t_max - schedule.t_min))
        assert level.alpha**2 + level.sigma**2 == pytest.approx(1.0, abs=1e-12)


def test_known_values():
    vp = VP().level(1.0)
    assert vp.alpha == pytest.approx(math.exp(-0.25 * 19.9 - 0.05), rel=1e-15)
    assert SCHEDULES["sub-vp"].level(0.5).sigma == pytest.approx(1.0 - VP().level(0.5).alpha ** 2, rel=1e-12)
    assert SCHEDULES["ve"].level(0.5).sigma == pytest.approx(math.sqrt(0.01 * 50.0), rel=1e-12)
    assert Flow().level(0.25) == Level(0.25, 0.75, 0.25)
    bars = Discrete.linear().alphas_cumprod
    assert bars[0] == pytest.approx(1 - 1e-4, rel=1e-15)
    assert Discrete.linear().level(999).alpha == pytest.approx(math.sqrt(bars[999]), rel=1e-12)


@schedules
@grids
@pytest.mark.parametrize("steps", [1, 2, 5, 40])
@pytest.mark.parametrize("to_zero", [False, True])
def test_grids_span_the_schedule(schedule: Schedule, grid: Grid, steps: int, to_zero: bool):
    grid = type(grid)(**{**vars(grid), "to_zero": to_zero})
    if math.isinf(schedule.ratio_max) and isinstance(grid, Karras | LogSNR):
        with pytest.raises(ValueError, match="alpha = 0"):
            grid(schedule, steps)
        return
    levels = grid(schedule, steps)
    assert levels.steps == steps
    assert levels[0] == schedule.level(schedule.t_max)
    assert levels[-1] == (schedule.clean() if to_zero else schedule.level(schedule.t_min))
    if to_zero and steps > 1:
        assert levels[-2] == schedule.level(schedule.t_min)


def test_known_grids():
    karras = Karras(7.0, to_zero=True)(EDM(), 18)
    assert karras[1].sigma == pytest.approx((80 ** (1 / 7) + (0.002 ** (1 / 7) - 80 ** (1 / 7)) / 17) ** 7, rel=1e-12)
    logsnr = LogSNR(to_zero=False)(EDM(0.01, 100.0), 4)
    assert [level.sigma for level in logsnr] == pytest.approx([100.0, 10.0, 1.0, 0.1, 0.01])
    assert [level.t for level in UniformTime(1.0, to_zero=False)(Flow(0.2, 1.0), 4)] == pytest.approx(
        [1, 0.8, 0.6, 0.4, 0.2]
    )
    quadratic = UniformTime(2.0, to_zero=False)(EDM(1.0, 9.0), 2)
    assert [level.t for level in quadratic] == pytest.approx([9.0, 4.0, 1.0])
    assert [level.t for level in Explicit((5.0, 2.0))(EDM(), 2)] == [5.0, 2.0, 0.0]


@pytest.mark.parametrize("steps", [0, -3, 2.5, True, "4"])
@grids
def test_grids_refuse_a_bad_number_of_steps(grid: Grid, steps: object):
    with pytest.raises(ValueError, match="steps must be a whole number >= 1"):
        grid(EDM(), steps)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([Level(1, 1, 1)], "must hold at least 2 levels"),
        ([Level(1, 1, 1), Level(2, 1, 2)], r"levels\[1\] must lie below levels\[0\] in sigma/alpha, got 2 and 1"),
        ([Level(1, 1, 1), Level(1, 1, 1)], "must lie below"),
        ([Level(1, 1, math.nan), Level(0, 1, 0)], r"levels\[0\]"),
        ([Level(1, 1, math.inf), Level(0, 1, 0)], r"levels\[0\]"),
        ([Level(1, 1, 1), Level(0, -1, 0.1)], r"levels\[1\]"),
        ([Level(1, 0, 0), Level(0, 1, 0)], "must not both be 0"),
    ],
)
def test_levels_refuse_what_is_not_a_way_from_noise_to_data(levels: list[Level], message: str):
    with pytest.raises(ValueError, match=message):
        Levels(tuple(levels), EDM())


def test_levels_between():
    levels = GRIDS["edm"](EDM(), 6)
    assert levels.between(0, 0.0).sigma == pytest.approx(80.0)
    assert levels.between(0, 0.5).sigma == pytest.approx(math.sqrt(80.0 * levels[1].sigma))
    told = levels.tell([0.9]).between(0, 0.5)
    assert (told.sigma, told.t) == pytest.approx((levels.between(0, 0.5).sigma, 0.9 * levels.between(0, 0.5).sigma))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Karras(rho=0), "rho must be > 0, got 0"),
        (lambda: UniformTime(power=-1), "power must be > 0, got -1"),
        (lambda: Discrete((0.5,)), "alphas_cumprod must hold two or more"),
        (lambda: Discrete((0.5, 0.6)), "strictly decreasing"),
        (lambda: Explicit((5.0, 2.0))(EDM(), 3), "makes 2 steps only"),
    ],
)
def test_bad_settings_are_named(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
