"""Standard errors of Fréchet distances: against the distance itself, and against many repetitions."""

from __future__ import annotations

import pytest
import torch

from paper_only.verdicts import Difference, difference
from steindiff.metrics.frechet import Moments, bias, distance, frechet_distance


def draw(num: int, seed: int, stretch: float = 1.3) -> torch.Tensor:
    x = torch.randn(num, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x * torch.linspace(0.2, stretch, 6) + 0.3


REFERENCE = Moments.of(draw(5000, 0, 1.0) - 0.2)


def test_value_is_the_fréchet_distance():
    features = draw(500, 1)
    assert distance(features, REFERENCE).value == pytest.approx(frechet_distance(REFERENCE, Moments.of(features)))


def test_standard_errors_are_those_of_repetitions():
    found = [distance(draw(400, seed), REFERENCE) for seed in range(1, 201)]
    spread = float(torch.tensor([one.value for one in found]).std())
    assert sum(one.error for one in found) / len(found) == pytest.approx(spread, rel=0.15)


def test_pairs_from_the_same_seeds_cancel_what_they_share():
    pairs = [(distance(draw(400, s), REFERENCE), distance(draw(400, s, 1.35), REFERENCE)) for s in range(1, 201)]
    differences = [difference(b, a) for a, b in pairs]
    spread = float(torch.tensor([one.value for one in differences]).std())
    assert sum(one.error for one in differences) / 200 == pytest.approx(spread, rel=0.15)
    alone = pairs[0][0].error
    assert differences[0].error < 0.3 * alone
    assert differences[0].verdict(pairs[0][0].value) == "worse"


def test_a_verdict_needs_two_standard_errors_and_one_per_cent():
    assert Difference(-0.3, 0.1).verdict(10.0) == "better"
    assert Difference(-0.3, 0.2).verdict(10.0) == "equal"
    assert Difference(0.05, 0.01).verdict(10.0) == "equal"


def test_fewer_samples_than_features_are_no_error():
    found = distance(draw(4, 3), REFERENCE)
    assert found.value == pytest.approx(frechet_distance(REFERENCE, Moments.of(draw(4, 3))))
    assert found.error > 0


def test_samples_of_one_image_count_as_one():
    """Features of several places of an image depend on each other: repeated eightfold they say no more."""
    alone = distance(draw(400, 1), REFERENCE)
    repeated = distance(draw(400, 1).repeat_interleave(8, 0), REFERENCE, images=400)
    assert repeated.error == pytest.approx(alone.error, rel=0.01)
    assert len(repeated.influence) == 400


def test_the_bias_of_few_samples_is_that_of_repetitions():
    reference = Moments.of(draw(50_000, 0))
    found = [(distance(draw(60, seed), reference).value, bias(draw(60, seed), reference)) for seed in range(1, 101)]
    value, guessed = torch.tensor(found).mean(0).tolist()
    assert guessed == pytest.approx(value, rel=0.3)  # both sets have the same distribution: all of it is bias
