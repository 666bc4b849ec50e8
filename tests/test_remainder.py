"""What few calls lack: the oracle's goal, what convolutions can and cannot learn, and every record on a toy."""

from __future__ import annotations

import math

import pytest
import torch

import comparison_tables
from comparison import OTHER_SEED
from networks.mixture import Mixture
from remainder import BUDGETS, ByFeatures, Remainder, led_on
from steindiff import Model
from steindiff.schedules import EDM
from stepping import digits


@pytest.fixture(scope="module")
def remainder() -> Remainder:
    """Slightly noisy digits, 8×8, whose denoiser is exact, and a random smooth feature map."""
    data = digits()[:100].float().reshape(-1, 1, 8, 8)
    model = Model(Mixture(data, torch.full((100,), 0.02), torch.ones(100)), EDM(), (1, 8, 8))
    directions = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    return Remainder(model, lambda x: (x.flatten(1) @ directions).tanh(), samples=24, batch=12)


def test_the_oracle_measures_the_mean_square_distance_of_features():
    x, goal = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    by_features = ByFeatures(lambda x: 2.0 * x, goal)
    expected = (2.0 * (x - goal)).square().sum(1).mean()
    assert by_features.residuals(x).mismatch == pytest.approx(float(expected), rel=1e-6)
    assert by_features.residuals(goal).mismatch == 0.0


def test_the_fine_ends_lack_nothing(remainder: Remainder):
    assert remainder.judge(remainder.fine.samples) == {"features": 0.0, "shift": 0.0, "psnr": math.inf}


def test_every_method_is_judged_by_seeds_nothing_was_learned_from(remainder: Remainder):
    learned, judging = remainder.fine.seeds[: remainder.learned], remainder.fine.seeds[remainder.learned :]
    assert len(learned) == 16
    assert not {*learned, *remainder.recipe.seeds} & set(judging)
    assert max(remainder.fine.seeds) < min(remainder.recipe.seeds) < OTHER_SEED
    found = {record["method"]: record for record in remainder.records(3)}
    assert list(found) == ["calibrated", "convolutions", "all differences", "searched by features"]
    for record in found.values():
        assert 0.0 < record["shift"] < record["features"] < math.inf
        assert len(record["sigmas"]) == len(record["told"]) + 1 == 4
    same = [found[name]["sigmas"] for name in ("calibrated", "convolutions", "all differences")]
    assert same[0] == same[1] == same[2]
    # On a network of formulas, far from the limit, a search by the measure itself must find something.
    assert found["searched by features"]["features"] < found["calibrated"]["features"]


def test_runs_know_their_end_the_state_before_it_and_all_denoised_images(remainder: Remainder):
    made = remainder.calibrated(BUDGETS[0])
    ran = remainder.run(made)
    assert ran.known.shape == (24, 2 + made.nfe, 8, 8)
    assert torch.equal(ran.known[:, :1], ran.ends)
    sampled = made.sampler()(remainder.model, remainder.fine.seeds, batch=12).x
    assert torch.allclose(ran.ends, sampled, atol=1e-5)


def test_convolutions_learn_what_is_known_and_nothing_else():
    generator = torch.Generator().manual_seed(2)
    ends, lack, noise = torch.randn(3, 96, 2, 6, 6, generator=generator)
    known = torch.cat([ends, lack], 1)
    judging = slice(64, None)

    def error(goal: torch.Tensor) -> float:
        """Over that of the ends as they are, on seeds nothing was learned from."""
        made = led_on(ends, known, goal, learned=64)
        return float((made - goal)[judging].square().mean() / (ends - goal)[judging].square().mean())

    assert error(ends + lack) < 0.3
    assert error(ends + noise) > 0.9
    assert torch.equal(led_on(ends, known, ends, learned=64), ends)


def test_the_table_has_a_row_a_method_and_a_column_a_budget():
    found = [
        {"method": method, "nfe": nfe, "features": 10.0 * nfe, "shift": 0.5, "psnr": 25.04}
        for nfe in (4, 3)
        for method in comparison_tables.REMAINDER
    ]
    head, _, first, *rest = comparison_tables.remainder(found).splitlines()
    assert head == "| distance, shift, PSNR | 3 NFE | 4 NFE |"
    assert first == "| calibrated | 30.00, 0.50, 25.0 | 40.00, 0.50, 25.0 |"
    assert len(rest) == len(comparison_tables.REMAINDER) - 1
