"""What `--model` takes beside the embedded models: pipelines, exported networks, Python objects."""

from __future__ import annotations

import json
import warnings

import pytest
import tiny
import torch

import steindiff as sd
from problems import Nonlinear
from steindiff.calibrating import Recipe
from steindiff.cli.subjects import subject
from steindiff.integrations import diffusers as host
from steindiff.integrations.diffusers.pipelines import pictures
from steindiff.solvers import SOLVERS
from steindiff.zoo import EDMPrecond, UNet, UNetConfig

QUICK = Recipe(seeds=range(10**6, 10**6 + 4), steps=4, search=None)


def test_compare_takes_a_pipeline_with_prompts(steindiff, tmp_path):
    tiny.stable_diffusion(prompts=True).save_pretrained(tmp_path / "pipe")
    line = f"compare --model {tmp_path / 'pipe'} --nfe 3 --num 2 --quick --json --out {tmp_path / 'out'}"
    lacking = steindiff(line)
    assert lacking.code == 1
    assert "needs prompts; add --prompt 'a red fox'" in lacking.err
    done = steindiff(f"{line} --prompt fox --prompt lake")
    assert done.code == 0, done.err
    assert "no calibration of pipe is at hand" in done.err
    found = json.loads(done.out)
    assert [(row["method"], row["nfe"]) for row in found["rows"]][2] == ("calibrated", 3)
    assert found["rows"][2]["network_calls"] == 3


def test_a_pipelines_calibration_goes_back_into_it(tmp_path):
    tiny.ddpm().save_pretrained(tmp_path / "pixels")
    found = subject(str(tmp_path / "pixels"), device="cpu", batch=4)
    assert (found.model.name, found.pictures, found.channels) == ("pixels", None, 3)
    made = found.calibrate([3], SOLVERS["dpmpp-2m"], QUICK, 4)[3]
    made.save(tmp_path / "c.json")
    again = sd.Calibration.load(tmp_path / "c.json")
    again.check(found.model)
    pipe = tiny.quiet(host.DiffusionPipeline.from_pretrained(tmp_path / "pixels"))
    with host.stabilize(pipe, again):
        assert len(pipe(batch_size=2, num_inference_steps=3).images) == 2


def test_latents_become_the_pipelines_own_pictures():
    pipe = tiny.stable_diffusion()
    call = {**tiny.embeddings(), "num_inference_steps": 2}
    same = {"generator": torch.Generator().manual_seed(0)}
    latents = pipe(**call, **same, output_type="latent").images
    same = {"generator": torch.Generator().manual_seed(0)}
    theirs = pipe(**call, **same, output_type="pt").images
    decode, channels = pictures(pipe, latents.shape[1:])
    assert channels == 3
    torch.testing.assert_close((decode(latents) / 2 + 0.5).clamp(0, 1), theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cannot be decoded here; use steindiff"):
        pictures(pipe, (4, 2, 8, 8))


def test_an_exported_network_of_the_zoo_by_label(tmp_path):
    config = UNetConfig((1, 8, 8), num_classes=3, channels=(32,), blocks=1, attention=(False,), head=32, embedding=32)
    host.export(EDMPrecond(UNet(config)).eval()).save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="needs class labels; add --prompt 0"):
        subject(str(tmp_path / "own"), device="cpu")
    found = subject(str(tmp_path / "own"), device="cpu", prompts=["0", "2"])
    assert found.model.shape == (1, 8, 8)
    assert found.model.condition_of(3) == 1


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x, t):
        return self.layer(x) + 1e-3 * t.reshape(-1, 1, 1, 1)


def test_an_exported_program(tmp_path):
    any_size = torch.export.Dim("batch")
    example = torch.randn(2, 1, 8, 8), torch.zeros(2)
    network = Rows().eval()
    program = torch.export.export(network, example, dynamic_shapes=({0: any_size}, {0: any_size}))
    torch.export.save(program, tmp_path / "net.pt2")
    model = subject(f"{tmp_path / 'net.pt2'}:epsilon:ddpm", device="cpu").model.trust()
    own = sd.Model(sd.Epsilon(network), sd.Discrete.linear(), (1, 8, 8)).trust()
    assert (model.shape, model.name) == ((1, 8, 8), "net")
    plain = sd.Sampler(nfe=3)
    torch.testing.assert_close(plain(model, range(3)).x, plain(own, range(3)).x, rtol=1e-4, atol=1e-5)
    for name, message in (
        ("net.pt2", "must say what it predicts and its schedule; write NET.pt2:epsilon:ddpm"),
        ("net.pt2:epsilom:ddpm", "'epsilom' is not known; did you mean 'epsilon'"),
        ("net.pt2:epsilon:ddmp", "'ddmp' is not known; did you mean 'ddpm'"),
    ):
        with pytest.raises(ValueError, match=message):
            subject(str(tmp_path / name), device="cpu")
    torch.export.save(torch.export.export(network, example), tmp_path / "two.pt2")
    with pytest.raises(ValueError, match="a batch of any size; export it with dynamic_shapes"):
        subject(f"{tmp_path / 'two.pt2'}:epsilon:ddpm", device="cpu")


def test_an_object_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(
        "import torch, steindiff as sd\n"
        "from steindiff.denoisers import Gaussian\n"
        "def points(device='cpu'):\n"
        "    return sd.Model(Gaussian(torch.zeros(1, 4, 4), torch.ones(1, 4, 4)), sd.EDM(), (1, 4, 4), device=device)\n"
        "ready = points()\n"
        "number = 3\n"
    )
    assert subject("my_models:points", device="cpu").model.shape == (1, 4, 4)
    assert subject("my_models:ready").channels == 1
    for name, message in (
        ("my_models:number", "must be a steindiff.Model or return one, got int"),
        ("my_models:nothing", "has no attribute 'nothing'"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("cifar", "did you mean 'cifar10'"),
    ):
        with pytest.raises(ValueError, match=message):
            subject(name)
    with pytest.raises(ValueError, match="--guidance does nothing for model = 'my_models:ready'; leave it out"):
        subject("my_models:ready", 2.0)
    with pytest.raises(ValueError, match="--prompt does nothing for model = 'fashion'"):
        subject("fashion", prompts=["fox"])


def test_a_pipeline_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="diffusers cannot load it"):
        subject(str(tmp_path), device="cpu")


def warned(model: sd.Model) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.check_once(range(8))
        model.check_once(range(8))  # once
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


@pytest.fixture(scope="module")
def fashion():
    return sd.load("fashion")


def wrapped(fashion: sd.Model, wrap, schedule: sd.Schedule, **options) -> sd.Model:
    network = fashion.denoiser.network
    return sd.Model(wrap(network, **options), schedule, fashion.shape)


@pytest.mark.parametrize("schedule", [sd.VP(), sd.Cosine(), sd.Flow(), sd.EDM()], ids=lambda s: type(s).__name__)
def test_a_ddpm_network_on_another_schedule_is_named(fashion, schedule):
    said = warned(wrapped(fashion, sd.Epsilon, schedule))
    assert "a DDPM network takes Discrete.linear(), not VP()" in said


@pytest.mark.parametrize("wrap", [sd.Velocity, sd.X0, sd.Score, sd.EDMDenoiser])
def test_a_network_that_predicts_something_else_is_named(fashion, wrap):
    said = warned(wrapped(fashion, wrap, sd.Discrete.linear()))
    assert "the network does not fit its wrapper and schedule" in said
    assert ("takes Epsilon" in said) == (wrap is not sd.Score)


def test_right_models_pass(fashion):
    assert warned(fashion) == ""
    assert warned(sd.load("cifar10")) == ""
    assert warned(sd.load("fashion", guidance=4.0)) == ""
    assert warned(wrapped(fashion, sd.Epsilon, sd.VP(), time=lambda level: 999 * level.t)) == ""


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("name", sorted(sd.SCHEDULES))
def test_exact_models_of_any_scale_pass(name: str, scale: float):
    from networks.mixture import Mixture
    from steindiff.denoisers import Gaussian

    schedule = sd.SCHEDULES[name]
    assert warned(sd.Model(Gaussian(torch.zeros(3), torch.full((3,), scale**2)), schedule, (3,))) == ""
    modes = scale * torch.tensor([[1.0, -1.0], [-1.0, 1.0], [3.0, 0.0]])
    mixture = Mixture(modes, torch.full((3,), 1e-4 * scale), torch.ones(3))
    assert warned(sd.Model(mixture, schedule, (2,))) == ""


def test_the_check_runs_once_before_sampling_and_can_be_left_out():
    asked = []

    def network(x, t):
        asked.append(len(x))
        return Nonlinear(6, torch.float32)(x, t)

    model = sd.Model(sd.Epsilon(network), sd.VP(), (6,))
    with pytest.warns(UserWarning, match="model.trust"):
        result = sd.Sampler(nfe=3)(model, range(4))
    assert result.network_calls == 3
    sd.Sampler(nfe=3)(model, range(4))
    assert len(asked) == 2 + 3 + 3
    with pytest.warns(UserWarning, match="does not fit"):
        sd.calibrate(sd.Model(sd.Epsilon(network), sd.VP(), (6,)), 3, recipe=QUICK)
    trusted = sd.Model(sd.Epsilon(network), sd.VP(), (6,)).trust()
    del asked[:]
    sd.Sampler(nfe=3)(trusted, range(4))
    assert len(asked) == 3
