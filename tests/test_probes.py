"""Probes: derivatives that are right, counted, and available on every kind of host."""

from __future__ import annotations

import functools
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paper_only.probes import JVP, Exact, Normal, OnPart
from problems import FLOAT, Nonlinear, random_unet
from steindiff import GRIDS, SOLVERS, Model, Recipe, calibrate, noise, sample
from steindiff.corrections.relaxation import Relaxation
from steindiff.denoisers import X0, DynamicThreshold, EDMDenoiser, Gaussian, Guided, StaticThreshold
from steindiff.denoisers.wrappers import Batched
from steindiff.levels import Level
from steindiff.probes import (
    VJP,
    Adaptive,
    Analytic,
    Antithetic,
    Directions,
    FiniteDifference,
    Rademacher,
    check_gradient,
    memory_per_sample,
    pullback,
    pushforward,
)
from steindiff.probes.hutchinson import forward_mode
from steindiff.schedules import EDM, VP
from steindiff.solvers import Solver
from steindiff.stein import SteinDensity
from steindiff.tableau import HERE, Evaluation, Row, Stage, Step, Tableau
from stepping import step_at


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_pullback_gives_the_output_and_transposed_jacobian_products_from_one_call(context):
    network, calls = Nonlinear(), []

    def function(z: torch.Tensor) -> torch.Tensor:
        calls.append(len(z))
        return network(z, torch.zeros(len(z), dtype=FLOAT))

    x = torch.linspace(-1, 1, 18, dtype=FLOAT).reshape(3, 6)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda z: network(z[None], torch.zeros(1, dtype=FLOAT))[0]))(x)
    with context():
        output, pull = pullback(function, x.clone())
        pulled = [pull(v.clone()) for v in (torch.ones_like(x), x)]
    assert calls == [3]
    assert torch.equal(output, network(x, torch.zeros(3, dtype=FLOAT)))
    assert not output.requires_grad
    for v, row in zip((torch.ones_like(x), x), pulled, strict=True):
        torch.testing.assert_close(row, torch.einsum("bij,bi->bj", jacobian, v), atol=1e-13, rtol=0)
        assert not row.requires_grad


def halved(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Half of it is cut from the graph, silently."""
    return torch.sin(x) + torch.sin(x).detach()


SILENT = {
    "no_grad": torch.no_grad()(Nonlinear()),
    "inference_mode": torch.inference_mode()(Nonlinear()),
    "detached": lambda x, t: Nonlinear()(x, t).detach(),
    "outside torch": lambda x, t: torch.from_numpy(np.sin(x.detach().numpy())),
}


@pytest.mark.parametrize("network", SILENT.values(), ids=SILENT.keys())
def test_a_network_without_a_gradient_is_refused_and_not_taken_for_a_constant(network):
    """A step r x + b D has a gradient even where D has none: alone, in a step and in a run."""
    level, denoiser = LEVELS[2], X0(network)
    x = noise(range(2), (6,), level, FLOAT)
    words = r"network gives no gradient \(no_grad or detached output\): .*FiniteDifference\(\)"
    with pytest.raises(RuntimeError, match=words):
        pullback(lambda z: denoiser(z, level), x)
    step = Step(SOLVERS["ddim"].tableau(LEVELS, 2), denoiser)
    for probe in (VJP(1), Exact()):
        with pytest.raises(RuntimeError, match=words):
            probe(step, x, level, torch.Generator())
    with pytest.raises(RuntimeError, match=words):
        sample(denoiser, noise(range(2), (6,), LEVELS[0], FLOAT), LEVELS, SOLVERS["heun"], Relaxation(VJP()))
    FiniteDifference()(step, x, level, torch.Generator())  # needs none
    recipe = Recipe(seeds=range(2), steps=4, grid=SteinDensity(), search=None)
    with pytest.raises(RuntimeError, match=words):  # once a grid without a word
        calibrate(Model(denoiser, EDM(), (6,), dtype=FLOAT).trust(), 3, "ddim", recipe=recipe)


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_what_torch_says_of_its_own_scripting_is_not_passed_on(category):
    with forward_mode():
        warnings.warn("`torch.jit.script` is deprecated. Please switch to `torch.compile`.", category, stacklevel=1)


def test_a_gradient_that_is_cut_in_part_is_found_by_a_difference():
    level = LEVELS[2]
    x = noise(range(2), (6,), level, FLOAT)
    for network in (Nonlinear(), Attending()):
        check_gradient(functools.partial(X0(network), level=level), x, 0.02 * level.sigma)
    with pytest.raises(RuntimeError, match=r"network gives a wrong gradient: v'Jv is .* by derivative and .* by diff"):
        check_gradient(lambda z: X0(halved)(z, level), x, 0.02 * level.sigma)
    with pytest.raises(RuntimeError, match="network gives no gradient"):
        check_gradient(lambda z: X0(SILENT["detached"])(z, level), x, 0.02 * level.sigma)


def test_forward_mode_takes_expanded_states():
    step, _, level = middle(SOLVERS["dpmpp-2m"], 0)
    x = torch.linspace(-1, 1, 6, dtype=FLOAT).expand(4, 6)
    forward, backward = (probe(step, x, level, torch.Generator().manual_seed(0)) for probe in (JVP(), VJP()))
    torch.testing.assert_close(forward.divergence, backward.divergence, atol=1e-12, rtol=0)
    v = torch.ones(1, dtype=FLOAT).expand(4, 6)
    torch.testing.assert_close(pushforward(torch.sin, x, v), x.cos())


LEVELS = GRIDS["logsnr-to-zero"](VP(), 6)
solvers = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())


def middle(solver: Solver, i: int = 3, batch: int = 4):
    step, x = step_at(solver, X0(Nonlinear()), LEVELS, i, noise(range(batch), (6,), LEVELS[0], FLOAT))
    return step, x, LEVELS[i]


def jacobian(step: Step, x: torch.Tensor) -> torch.Tensor:
    """∂T/∂x of every sample, `(B, d, d)`, by the reverse mode of a function of one sample."""

    def one(z: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        history = tuple(Evaluation(a[None], b[None], e.level) for (a, b), e in zip(past, step.history, strict=True))
        return Step(step.tableau, step.denoiser, history)(z[None]).candidate[0]

    return torch.stack(
        [
            torch.func.jacrev(lambda z, k=k: one(z, [(e.x[k], e.d[k]) for e in step.history]))(x[k])
            for k in range(len(x))
        ]
    )


@solvers
@pytest.mark.parametrize("i", [0, 3, 5])
def test_every_probe_agrees_with_the_exact_jacobian_of_every_solver(solver: Solver, i: int):
    step, x, level = middle(solver, i)
    trace = jacobian(step, x).diagonal(dim1=1, dim2=2).sum(1)
    exact = Exact()(step, x, level, torch.Generator())
    torch.testing.assert_close(exact.divergence, trace, atol=1e-12, rtol=0)
    assert torch.equal(exact.error, torch.zeros(4, dtype=FLOAT))
    assert exact.backward_passes == 6 * len(step.tableau.stages)
    # Along the coordinate axes the quadratic forms sum to the trace, so every probe must give it without noise.
    axes = torch.eye(6, dtype=FLOAT)[:, None].expand(6, 4, 6)
    pairs = torch.stack([axes, -axes], 1).flatten(0, 1)
    for probe, v, share in (
        (VJP(), axes, 1.0),
        (JVP(), axes, 1.0),
        (FiniteDifference(relative=1e-4), pairs, 0.5),
    ):
        forms = probe.along(step, x, level, v)[1].sum(0) * share
        torch.testing.assert_close(forms, trace, atol=1e-6, rtol=0)


@solvers
def test_vjp_equals_jvp_for_equal_probes(solver: Solver):
    step, x, level = middle(solver)
    for directions in (Rademacher(), Normal()):
        results = [
            probe(step, x, level, torch.Generator().manual_seed(5))
            for probe in (VJP(3, directions), JVP(3, directions))
        ]
        for other in results[1:]:
            torch.testing.assert_close(other.divergence, results[0].divergence, atol=1e-12, rtol=1e-12)
            assert other.backward_passes == results[0].backward_passes == 3 * len(step.tableau.stages)


@pytest.mark.parametrize("solver", ["ddim", "dpmpp-3m", "unipc-bh2-3", "heun"])
@pytest.mark.parametrize("directions", [Rademacher(), Normal(), Antithetic(Rademacher())], ids=repr)
def test_is_unbiased_within_the_standard_error_it_reports(solver: str, directions: Directions):
    step, x, level = middle(SOLVERS[solver], batch=1)
    probed = VJP(1200, directions)(step, x, level, torch.Generator().manual_seed(1))
    exact = Exact()(step, x, level, torch.Generator()).divergence
    assert abs(float(probed.divergence - exact)) < 4 * float(probed.error)
    # And the error is the one theory gives, linear part excluded: the variance of a quadratic form.
    j = jacobian(step, x)[0] - step.slope * torch.eye(6, dtype=FLOAT)
    square = (0.5 * (j + j.T)).square()
    variance = 2 * square.sum() - (0 if isinstance(directions, Normal) else 2 * square.diagonal().sum())
    expected = float((variance * directions.group / 1200).sqrt())
    assert float(probed.error) == pytest.approx(expected, rel=0.15)


def test_antithetic_pairs_gain_nothing_for_derivatives_and_one_order_for_differences():
    step, x, level = middle(SOLVERS["heun"])
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    single, pairs = VJP(3)(step, x, level, generators[0]), VJP(6, Antithetic())(step, x, level, generators[1])
    torch.testing.assert_close(pairs.divergence, single.divergence, atol=1e-13, rtol=0)
    assert pairs.backward_passes == 2 * single.backward_passes
    torch.testing.assert_close(pairs.error, single.error, atol=1e-13, rtol=0)

    def error(directions: Directions, num: int, relative: float) -> float:
        found = FiniteDifference(num, directions, relative=relative)(step, x, level, torch.Generator().manual_seed(2))
        return float((found.divergence - single.divergence).abs().max())

    assert error(Rademacher(), 3, 0.1) / error(Rademacher(), 3, 0.05) == pytest.approx(2, rel=0.2)
    assert error(Antithetic(), 6, 0.1) / error(Antithetic(), 6, 0.05) == pytest.approx(4, rel=0.2)


def test_a_single_group_has_no_standard_error_and_says_so():
    step, x, level = middle(SOLVERS["ddim"])
    assert bool(VJP(1)(step, x, level, torch.Generator()).error.isnan().all())
    assert bool(VJP(2, Antithetic())(step, x, level, torch.Generator()).error.isnan().all())
    assert bool(Analytic()(step, x, level, torch.Generator()).error.isnan().all())


def test_analytic_leaves_out_exactly_the_network():
    step, x, level = middle(SOLVERS["ddim"])
    found = Analytic()(step, x, level, torch.Generator())
    assert torch.equal(found.divergence, torch.full((4,), 6 * step.slope, dtype=FLOAT))
    weight = step.tableau.output.d[0]
    network = Exact()(Step(Tableau(step.tableau.stages, Row(d=(1.0,))), step.denoiser), x, level, torch.Generator())
    exact = Exact()(step, x, level, torch.Generator())
    torch.testing.assert_close(exact.divergence - found.divergence, weight * network.divergence, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("sigma", "cost"), [(2.0, 0), (1.0, 0), (0.99, 5)])
def test_adaptive_changes_over_at_its_threshold(sigma: float, cost: int):
    level = Level(sigma, 1.0, sigma)
    step = Step(Tableau((Stage(HERE, level),), Row(x=0.5, d=(0.5,))), X0(Nonlinear()))
    x = noise([0], (6,), level, FLOAT)
    assert Adaptive(threshold=1.0)(step, x, level, torch.Generator()).backward_passes == cost


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: VJP(0), r"probes must be a positive multiple of 1 .*, got 0"),
        (lambda: VJP(3, Antithetic()), r"probes must be a positive multiple of 2 with Antithetic.*, got 3"),
        (lambda: VJP(chunk=0), r"chunk must be a whole number >= 1, got 0"),
        (lambda: VJP(memory=0), r"memory must be a whole number >= 1, got 0"),
        (lambda: VJP(together=0), r"together must be a whole number >= 1, got 0"),
        (lambda: FiniteDifference(relative=0.0), r"relative must be > 0, got 0.0"),
        (lambda: Adaptive(threshold=-1.0), r"threshold must be >= 0, got -1.0"),
        (lambda: Normal().draw(0, torch.zeros(1, 2), torch.Generator()), r"probes must be a positive multiple"),
    ],
)
def test_refuses_bad_arguments(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_exact_refuses_dimensions_it_would_take_forever_on():
    step, x, level = middle(SOLVERS["ddim"])
    with pytest.raises(ValueError, match=r"x must have at most limit = 5 dimensions, got 6"):
        Exact(limit=5)(step, x, level, torch.Generator())


class Attending(torch.nn.Module):
    """A network with fused attention: it has no forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Nonlinear()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        q = torch.stack([x, torch.roll(x, 1, 1), x.square()], 1)[:, None]
        return self.base(x, t) + torch.nn.functional.scaled_dot_product_attention(q, q, q)[:, 0, 0]


class NoTransform(torch.autograd.Function):
    """Like the attention of NVIDIA's EDM networks: a backward, but neither jvp nor setup_context."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def test_a_custom_backward_without_transforms_is_pulled_back():
    level = Level(1.0, 1.0, 1.0)
    x = noise(range(3), (6,), level, FLOAT)
    step = Step(Tableau((Stage(HERE, level),), Row(x=0.3, d=(0.7,))), X0(lambda x, t: NoTransform.apply(x)))
    found = VJP(6)(step, x, level, torch.Generator().manual_seed(0))
    fine = FiniteDifference(6, Rademacher(), relative=1e-5)(step, x, level, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.divergence, fine.divergence, atol=1e-3, rtol=0)


def test_forward_mode_needs_the_unfused_attention_and_gets_it():
    level = Level(1.0, 1.0, 1.0)
    step = Step(Tableau((Stage(HERE, level),), Row(x=0.3, d=(0.7,))), X0(Attending()))
    x = noise(range(3), (6,), level, FLOAT)
    found = [probe(step, x, level, torch.Generator().manual_seed(0)).divergence for probe in (VJP(), JVP())]
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=0)


class Recording(torch.nn.Module):
    """Remembers how many samples each forward pass saw, and how many samples and directions each backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.forwards, self.backwards = Nonlinear(), [], []

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.forwards.append(len(x))
        out = self.base(x, t) + labels[:, None] * x
        if out.requires_grad:
            out.register_hook(lambda grad: self.backwards.append(tuple(grad.shape)))
        return out


def conditioned(network: Recording, labels: torch.Tensor, limit: int | None = None, **options):
    level = Level(1.0, 1.0, 1.0)
    denoiser = X0(functools.partial(network, labels=labels))
    step = Step(Tableau((Stage(HERE, level),), Row(x=0.3, d=(0.7,))), denoiser)
    x = noise(range(len(labels)), (6,), level, FLOAT)
    probe = VJP(**options) if limit is None else VJP(memory=limit * memory_per_sample(step, x), **options)
    network.forwards, network.backwards = [], []
    return probe(step, x, level, torch.Generator().manual_seed(0)), denoiser


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (6, 6), (7, 7), (100, 7)])
def test_a_memory_limit_bounds_the_samples_of_every_pass_and_changes_no_number(limit: int, most: int):
    labels, network = torch.linspace(-1, 1, 7, dtype=FLOAT), Recording()
    whole, _ = conditioned(network, labels)
    parted, denoiser = conditioned(network, labels, limit)
    torch.testing.assert_close(parted.divergence, whole.divergence, atol=1e-12, rtol=0)
    torch.testing.assert_close(parted.candidate, whole.candidate, atol=1e-14, rtol=0)
    # Measuring takes one sample and two; then the batch, cut together with its labels.
    parts = [most] * (7 // most) + [7 % most] * bool(7 % most)
    assert network.forwards == [2, 1, *parts]
    assert [shape[0] for shape in network.backwards] == [n for n in parts for _ in range(5)]
    assert denoiser.calls == 2 + 2 + len(parts)
    network.forwards = []
    conditioned_again = VJP(memory=limit * 10**9)
    level = Level(1.0, 1.0, 1.0)
    step = Step(Tableau((Stage(HERE, level),), Row(x=0.3, d=(0.7,))), denoiser)
    conditioned_again(step, noise(range(7), (6,), level, FLOAT), level, torch.Generator())
    assert network.forwards == [7]  # what was measured is remembered


@pytest.mark.parametrize(("together", "passes"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_directions_pulled_back_together_give_the_same_numbers(together: int, passes: int):
    labels, network = torch.linspace(-1, 1, 4, dtype=FLOAT), Recording()
    single, _ = conditioned(network, labels)
    found, _ = conditioned(network, labels, together=together)
    torch.testing.assert_close(found.divergence, single.divergence, atol=1e-12, rtol=0)
    assert len(network.backwards) == passes
    assert found.backward_passes == single.backward_passes == 5


def test_more_directions_together_leave_room_for_fewer_samples():
    labels, network = torch.linspace(-1, 1, 7, dtype=FLOAT), Recording()
    conditioned(network, labels, 6, together=5)
    assert max(network.forwards) == 3  # one direction: graph and a quarter; five: graph and five quarters


def test_a_part_of_a_denoiser_takes_its_conditions_and_counts_with_the_whole():
    network, level = Recording(), Level(1.0, 1.0, 1.0)
    labels, x = torch.linspace(-1, 1, 5, dtype=FLOAT), noise(range(5), (6,), level, FLOAT)
    conditional = X0(functools.partial(network, labels=labels))
    unconditional = X0(functools.partial(network, labels=torch.zeros(5, dtype=FLOAT)))
    plain = X0(Nonlinear())
    for whole in (
        conditional,
        Guided(conditional, unconditional, 2.0),
        StaticThreshold(conditional, 0.5),
        DynamicThreshold(conditional, 0.9),
        Batched([X0(functools.partial(network, labels=labels[:2])), plain], [2, 3]),
    ):
        for part in (slice(0, 1), slice(1, 4), slice(3, 9)):
            before = whole.calls
            smaller = whole.subset(part, 5)
            torch.testing.assert_close(smaller(x[part], level), whole(x, level)[part], atol=1e-14, rtol=0)
            assert whole.calls > before + 1 or smaller.calls == whole.calls
    assert plain.subset(slice(0, 1), 5)(x[:1], level).shape == (1, 6)


class Allocations(TorchDispatchMode):
    """Follows the bytes of all tensors made inside: their present sum and its peak. Views of `weights` are not made."""

    def __init__(self, weights) -> None:
        super().__init__()
        self.alive = {weight.untyped_storage()._cdata: 0 for weight in weights}
        self.peak = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        out = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
                self.peak = max(self.peak, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("resolution", [16, 64])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_the_peak_of_a_bounded_probe_stays_within_its_limit(resolution: int, samples: int):
    network, level = random_unet(resolution), Level(1.0, 1.0, 1.0)
    step = Step(Tableau((Stage(HERE, level),), Row(x=0.3, d=(0.7,))), EDMDenoiser(network))
    x = noise(range(5), (3, resolution, resolution), level)
    limit = samples * memory_per_sample(step, x)
    probe = VJP(2, memory=limit)
    probe(step, x, level, torch.Generator())  # the first step also measures
    held = 10 * x.numel() * x.element_size()  # directions and results of the whole batch
    with Allocations(network.parameters()) as bounded:
        probe(step, x, level, torch.Generator())
    assert bounded.peak <= limit + held
    with Allocations(network.parameters()) as whole:
        VJP(2)(step, x, level, torch.Generator())
    assert whole.peak > limit + held
    assert bounded.peak > 0.6 * limit  # and the room given is used


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.5, 3), (0.6, 3), (0.61, 4), (1.0, 5)])
def test_on_part_steps_all_samples_and_probes_the_first(share: float, count: int):
    step, x = step_at(SOLVERS["unipc-bh2-3"], X0(Nonlinear()), LEVELS, 3, noise(range(5), (6,), LEVELS[0], FLOAT))
    plain, probe = step(x), VJP(3)
    calls = step.denoiser.calls
    found = OnPart(share, probe)(step, x, LEVELS[3], torch.Generator().manual_seed(0))
    assert step.denoiser.calls - calls == len(plain.evaluations) * (1 if count == 5 else 2)
    torch.testing.assert_close(found.candidate, plain.candidate)
    for a, b in zip(found.evaluations, plain.evaluations, strict=True):
        torch.testing.assert_close(a.d, b.d)
    assert (len(found.divergence), found.backward_passes) == (count, 3 * len(plain.evaluations))
    expected = Exact()(step, x, LEVELS[3], torch.Generator()).divergence[:count]
    assert ((found.divergence - expected).abs() <= 6 * found.error + 1e-9).all()


def test_on_part_is_unbiased_for_the_mean_and_refused_where_every_sample_needs_its_own():
    """On Gaussian data of one covariance the divergence is the same for all samples: part and whole agree exactly."""
    levels = GRIDS["edm-to-zero"](EDM(), 4)
    model, x = Gaussian(torch.zeros(6), torch.ones(6)), noise(range(8), (6,), levels[0])
    whole, part = (
        sample(model, x, levels, SOLVERS["ddim"], Relaxation(probe)) for probe in (VJP(1), OnPart(0.25, VJP(1)))
    )
    torch.testing.assert_close(whole.x, part.x)
    assert (whole.nfe, part.nfe, part.backward_passes) == (4, 4, whole.backward_passes)
    with pytest.raises(ValueError, match=r"per_sample needs a probe of every sample"):
        sample(model, x, levels, SOLVERS["ddim"], Relaxation(OnPart(), per_sample=True))
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got "):
            OnPart(share)
