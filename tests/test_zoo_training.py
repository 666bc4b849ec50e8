"""The training script: losses with closed forms, averages, schedule, checkpoint and resume."""

from __future__ import annotations

import json
import runpy
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import training_data
from steindiff import zoo
from steindiff.zoo import EDMPrecond, UNet, UNetConfig, VPNoise, weights

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "train.py"
TINY = UNetConfig(
    shape=(1, 8, 8), num_classes=4, channels=(8, 16), blocks=1, attention=(False, True), head=8, embedding=16, groups=4
)


@pytest.fixture
def train(monkeypatch):
    """The script's names, with a tiny model and a dataset of plain grey images in place of the real ones."""
    images = torch.arange(0, 256, 4, dtype=torch.uint8)[:, None, None, None].expand(64, 1, 8, 8)
    data = training_data.Dataset(images, torch.arange(64) % 4)
    monkeypatch.setattr(training_data, "load", lambda name, split: data)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setitem(zoo.ARCHITECTURES, "cifar10", lambda: EDMPrecond(UNet(TINY)))
    monkeypatch.setitem(zoo.ARCHITECTURES, "fashion", lambda: VPNoise(UNet(TINY)))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield SimpleNamespace(**runpy.run_path(str(SCRIPT)))
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(train, monkeypatch, *arguments):
    monkeypatch.setattr(
        sys, "argv", ["train.py", *map(str, arguments), "--no-compile", "--device", "cpu", "--batch", "16"]
    )
    train.main()


def test_fresh_networks_have_loss_one(train):
    """EDM: a fresh network is the exact denoiser of N(0, σ_d²): weighted error 1. VP: it predicts 0, and E ε² = 1."""
    torch.manual_seed(0)
    labels = torch.zeros(2000, dtype=torch.long)
    edm, vp = EDMPrecond(UNet(TINY)), VPNoise(UNet(TINY))
    with torch.no_grad():
        assert float(train.edm_loss(edm, edm, 0.5 * torch.randn(2000, 1, 8, 8), labels)) == pytest.approx(1, abs=0.02)
        assert float(train.vp_loss(vp, vp, torch.randn(2000, 1, 8, 8), labels)) == pytest.approx(1, abs=0.02)


def test_batches_are_scaled_flipped_and_sometimes_unlabelled(train):
    ramp = torch.arange(8, dtype=torch.uint8).mul(36).expand(64, 1, 8, 8)
    data = training_data.Dataset(ramp, torch.ones(64, dtype=torch.long))
    torch.manual_seed(0)
    seen = [next(train.batches(data, 64, 0.5, 10)) for _ in range(20)]
    x, labels = torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])
    assert float(x.min()) == -1.0
    assert float((x[:, 0, 0, 0] > x[:, 0, 0, 7]).float().mean()) == pytest.approx(0.5, abs=0.06)
    assert set(labels.tolist()) == {1, 10}
    assert float((labels == 10).float().mean()) == pytest.approx(0.1, abs=0.04)


def test_learning_rate_warms_up_holds_and_falls_to_zero(train):
    rate = train.learning_rate
    assert rate(1.0, 0, 0.0, 10, 0.4) == pytest.approx(0.1)
    assert rate(1.0, 50, 0.3, 10, 0.4) == 1.0
    assert rate(1.0, 50, 0.7, 10, 0.4) == pytest.approx(0.5)
    assert rate(1.0, 50, 1.0, 10, 0.4) == 0.0


def test_average_has_its_half_life(train):
    """A parameter that jumps from 0 to 1: after one half-life of images the average is ½."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    averages = train.Averages(net, [1])
    torch.nn.init.ones_(net.weight)
    for _ in range(10):
        averages.update(100, 10**9)
    assert float(averages.state(1)["weight"]) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("model", ["cifar10", "fashion"])
def test_training_lowers_the_loss_and_writes_loadable_weights(train, model, tmp_path, monkeypatch, capsys):
    run(train, monkeypatch, model, "--steps", 60, "--warmup", 5, "--log-every", 10, "--out", tmp_path)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["images_per_s"] > 0
    assert {file.name for file in tmp_path.iterdir()} == {
        "log.jsonl",
        "checkpoint.safetensors",
        "raw-1of1.safetensors",
        "ema-250-1of1.safetensors",
        "ema-1000-1of1.safetensors",
    }
    raw = weights.read(tmp_path / "raw-1of1.safetensors")
    assert all(tensor.dtype == torch.float16 for tensor in raw.values())
    net = zoo.load(model, path=tmp_path / "ema-250-1of1.safetensors")
    assert net(torch.randn(2, 1, 8, 8), torch.ones(2)).isfinite().all()
    assert json.loads(capsys.readouterr().out)["step"] == 60


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_resume_continues_from_every_state(train, kind, tmp_path, monkeypatch):
    run(train, monkeypatch, "fashion", "--steps", 6, "--optimizer", kind, "--out", tmp_path)
    net = zoo.ARCHITECTURES["fashion"]()
    averages = train.Averages(net, [250, 1000])
    methods = train.optimizers(net, kind, 1e-3, 0.02)
    assert train.load_checkpoint(tmp_path / "checkpoint.safetensors", net, averages, methods) == 6
    train.save_checkpoint(tmp_path / "again.safetensors", net, averages, methods, 6)
    first, again = (weights.read(tmp_path / f"{name}.safetensors") for name in ("checkpoint", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    run(train, monkeypatch, "fashion", "--steps", 8, "--resume", "--optimizer", kind, "--out", tmp_path)
    assert weights.metadata(tmp_path / "checkpoint.safetensors") == {"step": "8"}


def test_sigterm_saves_and_stops(train, tmp_path, monkeypatch):
    def terminated(peak, step, *others):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return 1e-3

    monkeypatch.setitem(train.main.__globals__, "learning_rate", terminated)
    run(train, monkeypatch, "fashion", "--minutes", 5, "--out", tmp_path)
    assert weights.metadata(tmp_path / "checkpoint.safetensors") == {"step": "4"}
    assert (tmp_path / "raw-1of1.safetensors").is_file()


def test_a_foreign_checkpoint_is_named(train, tmp_path, monkeypatch):
    weights.write(tmp_path / "checkpoint.safetensors", {"other": torch.ones(1)}, {"step": "1"})
    with pytest.raises(RuntimeError, match=r"checkpoint\.safetensors: holds no tensor"):
        run(train, monkeypatch, "fashion", "--steps", 2, "--resume", "--out", tmp_path)


def test_weights_alone_can_be_started_from(train, tmp_path, monkeypatch):
    run(train, monkeypatch, "fashion", "--steps", 6, "--out", tmp_path)
    raw = tmp_path / "raw-1of1.safetensors"
    run(train, monkeypatch, "fashion", "--steps", 6, "--init", raw, "--out", tmp_path / "b")
    assert (tmp_path / "b" / "raw-1of1.safetensors").is_file()


def test_a_budget_is_required(train, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(train, monkeypatch, "fashion", "--out", tmp_path)
    assert "--minutes or --steps" in capsys.readouterr().err


def test_what_a_guided_network_says_is_learned(train, tmp_path, monkeypatch):
    """One that meets its goal has loss 0; fitted to itself beyond a worse one, it comes nearer to that goal."""
    torch.manual_seed(0)
    net, guide = (train.zoo.ARCHITECTURES["cifar10"]() for _ in range(2))
    for one in (net, guide):
        for p in one.parameters():
            torch.nn.init.normal_(p, std=0.1)
    x, labels = torch.randn(64, 1, 8, 8), torch.arange(64) % 4
    with torch.no_grad():
        assert float(train.edm_loss(net, net, x, labels, goal=net)) == 0.0
        assert float(train.edm_loss(net, guide, x, labels, goal=net)) > 0.01

    weights.write(tmp_path / "begun.safetensors", dict(net.named_parameters()))
    monkeypatch.setattr(zoo, "load", lambda name: guide)
    options = ("--init", tmp_path / "begun.safetensors", "--guide", "cifar10", "--guidance", 2.0)
    run(train, monkeypatch, "cifar10", *options, "--steps", 100, "--warmup", 5, "--lr", 3e-3, "--out", tmp_path)
    learned = train.zoo.ARCHITECTURES["cifar10"]()
    train.weights.assign(learned, weights.read(tmp_path / "raw-1of1.safetensors"), "raw")
    sigma = torch.full((64,), 0.5)
    with torch.no_grad():
        goal = 2 * net(x, sigma, labels) - guide(x, sigma, labels)
        before, after = ((one(x, sigma, labels) - goal).square().mean() for one in (net, learned))
    assert float(after) < 0.7 * float(before)


def test_another_network_than_the_one_trained_may_be_guided(train, tmp_path, monkeypatch):
    """One begins as a network, the goal is another beyond the guide."""
    torch.manual_seed(0)
    net, guided, guide = (train.zoo.ARCHITECTURES["cifar10"]() for _ in range(3))
    for one, name in ((net, "begun"), (guided, "guided"), (guide, "guide")):
        for p in one.parameters():
            torch.nn.init.normal_(p, std=0.1)
        weights.write(tmp_path / f"{name}.safetensors", dict(one.named_parameters()))
    monkeypatch.setattr(zoo, "load", lambda name: guide)
    paths = ("--init", tmp_path / "begun.safetensors", "--guided", tmp_path / "guided.safetensors")
    options = (*paths, "--guide", "cifar10", "--guidance", 2.0)
    run(train, monkeypatch, "cifar10", *options, "--steps", 100, "--warmup", 5, "--lr", 3e-3, "--out", tmp_path)
    learned = train.zoo.ARCHITECTURES["cifar10"]()
    train.weights.assign(learned, weights.read(tmp_path / "raw-1of1.safetensors"), "raw")
    x, labels, sigma = torch.randn(64, 1, 8, 8), torch.arange(64) % 4, torch.full((64,), 0.5)
    with torch.no_grad():
        goal = 2 * guided(x, sigma, labels) - guide(x, sigma, labels)
        before, after = ((one(x, sigma, labels) - goal).square().mean() for one in (net, learned))
    assert float(after) < 0.7 * float(before)


def test_weights_to_guide_need_a_guide(train, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(train, monkeypatch, "cifar10", "--guided", tmp_path, "--steps", 1, "--out", tmp_path)
    assert "--guided needs --guide" in capsys.readouterr().err


def test_a_guide_needs_weights_to_guide(train, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(train, monkeypatch, "cifar10", "--guide", "cifar10", "--steps", 1, "--out", tmp_path)
    assert "--init" in capsys.readouterr().err
