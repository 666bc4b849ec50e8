"""The script that runs the paper's experiments: its cells, its records, and the networks it takes."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import paper
from recording import Records
from steindiff.denoisers import EDMDenoiser
from steindiff.metrics import Moments
from steindiff.schedules import EDM, Discrete


def features(images: torch.Tensor) -> torch.Tensor:
    """Ten numbers an image: means of parts of it."""
    return images.double().flatten(1)[:, :190].unflatten(1, (10, 19)).mean(2) / 64.0


def bench_of(subject: paper.Subject, samples: int = 24, batch: int = 8) -> paper.Bench:
    bench = paper.Bench(subject, Path("none"), None, "cpu", samples, batch)
    bench.features = features
    return bench


class TinyEDM(torch.nn.Module):
    """With the attributes of NVIDIA's networks."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.img_channels, self.img_resolution, self.label_dim = 3, 8, classes
        self.sigma_min, self.sigma_max = 0.0, float("inf")
        self.convolution = torch.nn.Conv2d(3, 3, 3, padding=1).requires_grad_(False)

    def forward(self, x, sigma, labels=None):
        sigma = sigma.reshape(-1, 1, 1, 1)
        f = self.convolution(x / (sigma**2 + 0.25).sqrt()).sin() + (
            0.0 if labels is None else labels.sum(1)[:, None, None, None]
        )
        return 0.25 / (sigma**2 + 0.25) * x + 0.5 * sigma / (sigma**2 + 0.25).sqrt() * f


@pytest.fixture(scope="module")
def tiny() -> paper.Subject:
    torch.manual_seed(0)
    network = TinyEDM(0)

    def denoisers(seeds):
        return EDMDenoiser(network)

    images = torch.randint(0, 255, (200, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    return paper.Subject("tiny", (3, 8, 8), EDM(), denoisers, denoisers, real=Moments.of(features(images)))


def test_every_plan_spends_the_budgets_of_table_2():
    """NFE = 2·steps − 1 for the paper's 3, 3.5, 4.5, 5.5, 6.5, 8, 10.5, 13 steps, Heun included."""
    assert {round(2 * steps - 1) for steps in (3, 3.5, 4.5, 5.5, 6.5, 8, 10.5, 13)} == set(paper.NFES)
    cells = {cell for plan in paper.PLANS.values() for cell in plan}
    for schedule in (EDM(), Discrete.linear()):
        for cell in {paper.replace(cell, mode="plain") for cell in cells}:
            levels = cell.levels(schedule)
            assert cell.host.calls(levels) == cell.nfe
            zero = levels[-1].sigma == 0.0
            assert zero == (cell.nfe % 2 == 1 if cell.solver == "heun" else cell.ending == "zero")
    assert {cell.mode for cell in cells} == set(paper.MODES)
    assert {cell.nfe for cell in paper.PLANS["core"]} == set(paper.NFES)
    assert all(paper.estimate(plan, 5000, compiled=True) > 0 for plan in paper.PLANS.values())


@pytest.mark.parametrize("mode", ["plain", "clamped", "per sample", "first 3", "literal", "consistency", "m = 5"])
def test_a_record_says_what_was_run_and_how_sure_it_is(tiny, mode: str):
    cell = paper.Cell("2m", "logsnr", "bare", 5, mode)
    record = bench_of(tiny).measure(cell)
    assert json.loads(json.dumps(record)) == record
    assert record["nfe"] == record["network_calls"] == 5
    assert record["backward_passes"] <= cell.passes
    assert record["against"] == "real images"
    assert record["fid"] > 0
    if mode != "plain":
        assert record["verdict"] in ("better", "equal", "worse")
        assert len(record["gamma"]) == (3 if mode == "first 3" else 5)


def test_a_second_opinion(tiny):
    """Score and distance by other features, the latter to the model's own samples and paired like the first."""

    class Second:
        def __call__(self, images):
            return features(images)

        def classify(self, seen):
            return seen

    bench = bench_of(tiny)
    bench.__dict__["classifier"] = Second()
    plain = bench.measure(paper.Cell("2m", "logsnr", "bare", 5))
    assert plain["second"] > 0
    assert plain["score"] >= 1.0
    assert "second_verdict" not in plain
    literal = bench.measure(paper.Cell("2m", "logsnr", "bare", 5, "literal"))
    assert literal["second_difference"] == pytest.approx(literal["second"] - plain["second"], abs=2e-4)
    assert literal["second_verdict"] in ("better", "equal", "worse")


def test_an_idle_cell_is_the_plain_one_and_costs_one_batch(tiny, monkeypatch):
    monkeypatch.setattr(paper, "MARGIN", -1e9)
    calls = []
    bench = bench_of(tiny)
    run = bench.run
    monkeypatch.setattr(bench, "run", lambda cell, *rest: calls.append(cell.mode) or run(cell, *rest))
    cell = paper.Cell("2m", "edm", "lowered", 5, "maximum 1.1")
    record = bench.measure(paper.replace(cell, mode="clamped"))
    if record["idle"]:
        assert calls == ["plain"] * 3 + ["clamped"]
        assert (record["difference"], record["verdict"]) == (0.0, "equal")
    assert not bench.measure(cell)["idle"]  # γ = 1.1 is not the plain solver


def test_a_run_goes_on_where_it_stopped(tiny, tmp_path: Path):
    cells = [paper.Cell("2m", "edm", "lowered", 5, mode) for mode in ("plain", "clamped", "analytical")]
    path = tmp_path / "out.json"
    first = bench_of(tiny)
    Records(path).measure(cells[:2], first.identity, first.measure, time.monotonic() + 1e6)
    second = bench_of(tiny)
    Records(path).measure(cells, second.identity, second.measure, time.monotonic() + 1e6)
    records = json.loads(path.read_text())
    assert [record["mode"] for record in records] == ["plain", "clamped", "analytical"]
    whole = bench_of(tiny).measure(cells[2])
    assert {k: v for k, v in records[2].items() if k != "seconds"} == {k: v for k, v in whole.items() if k != "seconds"}


def test_a_run_that_is_not_finite_is_a_record(tiny, monkeypatch):
    bench = bench_of(tiny)
    cell = paper.Cell("2m", "edm", "lowered", 5, "literal")
    bench.base(cell)

    def fail(*_):
        raise RuntimeError("step 2 of 5: the state became NaN or infinite\nmore")

    monkeypatch.setattr(bench, "run", fail)
    assert bench.measure(cell)["error"] == "step 2 of 5: the state became NaN or infinite"


def test_without_real_images_its_own_many_step_samples_are_compared_with(tiny):
    subject = paper.replace(tiny, real=None)
    record = bench_of(subject, 12, 6).measure(paper.Cell("2m", "edm", "lowered", 5))
    assert record["against"] == "own samples, Heun, 35 evaluations"


def test_figures_costs_and_constants(tiny, tmp_path: Path):
    bench = bench_of(tiny, 2, 2)
    figures = list(bench.images(tmp_path / "paper.json"))
    assert [figure["figure"] for figure in figures] == ["fig5", "fig10", "fig11", "fig12"]
    assert {path.name for path in tmp_path.iterdir()} == {figure["file"] for figure in figures}
    costs = {record["mode"]: record for record in bench.cost(1)}
    assert set(costs) == set(paper.MODES)
    assert costs["m = 5"]["backward_passes"] == 25
    assert costs["analytical"]["backward_passes"] == costs["plain"]["backward_passes"] == 0
    assert all(record["network_calls"] == 5 for record in costs.values())
    constants = bench.fig4((6, "edm"))
    assert bench.constants((6, "edm")).items() <= constants.items()  # an interrupted run finds it again
    assert (constants["nfe"], constants["measured"], len(constants["transition_max"])) == (6, 6, 6)


@pytest.mark.parametrize("classes", [0, 4])
def test_checkpoints_of_edm(classes: int, tmp_path: Path, monkeypatch):
    """From the command line to the records, real images from a file."""
    monkeypatch.setattr(paper.edm, "load", lambda path, **options: TinyEDM(classes))
    monkeypatch.setattr(paper.Bench, "features", property(lambda self: features))
    monkeypatch.setattr(paper, "PLANS", {"core": paper.PLANS["core"][:3]})
    monkeypatch.setattr(paper.datasets, "inception", lambda: Path("none"))
    np.savez(tmp_path / "real.npz", images=np.random.default_rng(0).integers(0, 255, (12, 3, 8, 8), dtype=np.uint8))
    out = tmp_path / "edm.json"
    arguments = ["paper.py", "core", "--edm", "net.pkl", "--samples", "12", "--batch", "6", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(out), "--real", str(tmp_path / "real.npz")])
    paper.main()
    records = json.loads(out.read_text())
    assert [record["mode"] for record in records] == ["plain", "clamped", "per sample"]
    assert {record["model"] for record in records} == {"net"}
    assert {record["against"] for record in records} == {"real images"}


def test_latent_pipelines(tmp_path: Path):
    pytest.importorskip("diffusers")
    hosts = importlib.import_module("integrations.hosts")
    hosts.latent_diffusion()[0].save_pretrained(tmp_path / "ldm")
    subject = paper.latent(tmp_path / "ldm", "cpu")
    bench = bench_of(paper.replace(subject, real=None), 4, 2)
    record = bench.measure(paper.Cell("2m", "logsnr", "lowered", 5, "consistency"))
    assert record["nfe"] == 5
    assert record["against"].startswith("own samples")
    (images,) = bench.pixels(torch.zeros(2, *subject.shape))
    assert images.shape[1] == 3


def test_unknown_plans_are_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paper.py", "--estimate", "nothing"])
    with pytest.raises(SystemExit):
        paper.main()
    assert "plans must be of core" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["paper.py", "--estimate", "--compile"])
    paper.main()
    assert "core: 192 cells" in capsys.readouterr().out
