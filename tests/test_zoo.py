"""The shipped networks: what they compute, how they load, and what a bad file says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from steindiff import SOLVERS, load, zoo
from steindiff import _weights as weights
from steindiff.calibration import Calibration
from steindiff.denoisers import EDMDenoiser
from steindiff.levels import Level
from steindiff.models import CALIBRATIONS, ByLabel, shipped_calibration, shipped_path
from steindiff.schedules import EDM, Discrete
from steindiff.solvers import DPMSolverMultistep
from steindiff.zoo import EDMPrecond, UNet, UNetConfig, VPNoise

TINY = UNetConfig(
    shape=(3, 8, 8), num_classes=4, channels=(8, 16), blocks=1, attention=(False, True), head=8, embedding=16, groups=4
)


def tiny() -> UNet:
    torch.manual_seed(0)
    net = UNet(TINY)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return net


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 3, 8, 8, generator=generator), torch.tensor([0.3, 1.0, 5.0]), torch.tensor([0, 3, 4])


def test_edm_preconditioning_is_the_formula(batch):
    x, sigma, labels = batch
    net = EDMPrecond(tiny(), sigma_data=0.5)
    s = sigma[:, None, None, None]
    f = net.network(x / (s**2 + 0.25).sqrt(), sigma.log() / 4, labels)
    expected = 0.25 / (s**2 + 0.25) * x + s * 0.5 / (s**2 + 0.25).sqrt() * f
    torch.testing.assert_close(net(x, sigma, labels), expected)


def test_fresh_network_is_the_gaussian_denoiser(batch):
    """The output layer starts at zero, so D is the linear denoiser of data N(0, σ_d²)."""
    x, sigma, _ = batch
    s = sigma[:, None, None, None]
    torch.testing.assert_close(EDMPrecond(UNet(TINY))(x, sigma), 0.25 / (0.25 + s**2) * x)


def test_null_label_is_no_label(batch):
    x, sigma, labels = batch
    net = EDMPrecond(tiny())
    plain, conditional = net(x, sigma), net(x, sigma, labels)
    torch.testing.assert_close(plain[2], conditional[2])
    assert not torch.allclose(plain[0], conditional[0])


def test_samples_do_not_see_each_other(batch):
    x, sigma, labels = batch
    net = EDMPrecond(tiny())
    torch.testing.assert_close(net(x[1:2], sigma[1:2], labels[1:2]), net(x, sigma, labels)[1:2])


def test_half_precision_network_combines_in_float32(batch):
    x, sigma, labels = batch
    net = EDMPrecond(tiny())
    full = net(x, sigma, labels)
    half = net.bfloat16()(x, sigma, labels)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, atol=0.1, rtol=0.05)


def test_noise_level_is_embedded_in_full_precision_whatever_the_weights(batch):
    seen = []
    net = EDMPrecond(tiny())
    net.network.noise.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].float()))
    net(*batch)
    net.half()(*batch)
    torch.testing.assert_close(seen[1], seen[0], atol=1e-3, rtol=0)


def test_float64_state_stays_float64(batch):
    x, sigma, labels = batch
    net = EDMPrecond(tiny().double())
    assert net(x.double(), sigma, labels).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_vjp_jvp_vmap_and_the_jacobian_agree(batch):
    x, sigma, labels = (b[:1] for b in batch)
    net = EDMPrecond(tiny().double()).requires_grad_(False)
    x = x.double()
    v, w = torch.randn_like(x), torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has neither forward mode nor a vectorised backward
        _, pull = torch.func.vjp(lambda z: net(z, sigma, labels), x)
        _, pushed = torch.func.jvp(lambda z: net(z, sigma, labels), (x,), (v,))
    torch.testing.assert_close((pull(w)[0] * v).sum(), (pushed * w).sum())
    several = torch.func.vmap(lambda u: pull(u)[0])(torch.stack([v, w]))
    torch.testing.assert_close(several[1], pull(w)[0])
    h = 1e-5
    difference = (net(x + h * v, sigma, labels) - net(x - h * v, sigma, labels)) / (2 * h)
    torch.testing.assert_close(pushed, difference, atol=1e-6, rtol=1e-5)


def test_traces_into_one_graph(batch):
    net = EDMPrecond(tiny())
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*batch), net(*batch))


def test_vp_process_is_the_product_of_its_steps():
    net = VPNoise(tiny())
    alpha = 1.0
    for beta in torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64).tolist():
        alpha *= (1 - beta) ** 0.5
    schedule = Discrete.linear(*net.betas, net.steps)
    assert schedule.alphas_cumprod[-1] == pytest.approx(alpha**2, rel=1e-12)
    assert schedule == load("fashion").schedule
    assert net(torch.randn(2, 3, 8, 8), torch.tensor([0, 999])).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": (True,)}, "one entry per level"),
        ({"shape": (3, 7, 8)}, "divisible by 2"),
        ({"groups": 3}, "groups=3"),
        ({"head": 5}, "head=5"),
    ],
)
def test_bad_configuration_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_wrong_image_shape_is_named():
    with pytest.raises(ValueError, match=r"x has shape \(2, 1, 8, 8\).*\(3, 8, 8\)"):
        EDMPrecond(tiny())(torch.randn(2, 1, 8, 8), torch.ones(2))


@pytest.mark.parametrize(
    ("name", "shape", "limit"), [("cifar10", (3, 32, 32), 20_000_000), ("fashion", (1, 28, 28), 5_000_000)]
)
def test_shipped_model_loads_fast_small_and_frozen(name, shape, limit):
    zoo.load(name)
    net = zoo.load(name)
    assert (net.shape, net.num_classes, net.config.shape) == (shape, 10, shape)
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())
    file = Path(zoo.__file__).parent / "weights" / f"{name}.safetensors"
    assert file.stat().st_size <= limit


def test_cifar10_denoises_better_than_a_linear_map():
    """At σ = 0.2 the network must beat the best scaling c x of any noised image by far (colour gradients as data)."""
    net = zoo.load("cifar10")
    ramp = torch.linspace(-0.8, 0.8, 32)
    clean = torch.stack([ramp.expand(32, 32), ramp[:, None].expand(32, 32), 0.5 * ramp.expand(32, 32)])[None]
    noised = clean + 0.2 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    error = (net(noised, torch.tensor([0.2])) - clean).square().mean()
    assert error < 0.15 * 0.2**2


def test_fashion_predicts_the_noise():
    net = zoo.load("fashion")
    clean = -torch.ones(2, 1, 28, 28)
    clean[:, :, 8:20, 8:20] = 0.5
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([300, 600])
    levels = [load("fashion").schedule.level(float(time)) for time in t]
    alpha, sigma = (torch.tensor(v)[:, None, None, None] for v in zip(*(level[1:3] for level in levels), strict=True))
    assert (net(alpha * clean + sigma * noise, t) - noise).square().mean() < 0.2


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"name = 'imagenet'.*cifar10, fashion"):
        zoo.load("imagenet")
    with pytest.raises(ValueError, match="cifar10, fashion"):
        zoo.load("imagenet")


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A copy of the shipped Fashion files that may be damaged."""
    source = Path(zoo.__file__).parent / "weights"
    (tmp_path / "weights").mkdir()
    for suffix in (".safetensors", ".json"):
        shutil.copy(source / f"fashion{suffix}", tmp_path / "weights")
    monkeypatch.setattr(zoo, "_FOLDER", tmp_path)
    return tmp_path / "weights" / "fashion.safetensors"


def test_truncated_file_is_refused(shipped):
    shipped.write_bytes(shipped.read_bytes()[:-100])
    with pytest.raises(RuntimeError, match=r"fashion\.safetensors: truncated or altered"):
        zoo.load("fashion")


def test_altered_file_is_refused(shipped):
    data = bytearray(shipped.read_bytes())
    data[-1] ^= 1
    shipped.write_bytes(data)
    with pytest.raises(RuntimeError, match=r"fashion\.safetensors: truncated or altered"):
        zoo.load("fashion")


def test_missing_file_is_named(shipped):
    shipped.unlink()
    with pytest.raises(FileNotFoundError, match=r"fashion\.safetensors: no such file"):
        zoo.load("fashion")


def test_own_weights_round_trip(tmp_path):
    net = zoo.load("fashion")
    path = tmp_path / "mine.safetensors"
    weights.write(path, dict(net.named_parameters()), {"step": "7"})
    again = zoo.load("fashion", path=path)
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    assert weights.metadata(path) == {"step": "7"}
    assert [file.name for file in tmp_path.iterdir()] == ["mine.safetensors"]


def test_weights_of_another_network_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    tensors = {name: p for name, p in zoo.load("fashion").named_parameters()}
    tensors["network.enter.weight"] = torch.zeros(1, 2, 3)
    weights.write(path, tensors)
    with pytest.raises(RuntimeError, match=r"network\.enter\.weight is \(1, 2, 3\), the network needs \(64, 1, 3, 3\)"):
        zoo.load("fashion", path=path)
    del tensors["network.enter.weight"]
    weights.write(path, tensors)
    with pytest.raises(RuntimeError, match=r"network\.enter\.weight is nothing"):
        zoo.load("fashion", path=path)


def test_garbage_is_no_safetensors(tmp_path):
    path = tmp_path / "garbage.safetensors"
    path.write_bytes(b"\x00" * 40)
    with pytest.raises(RuntimeError, match="not a whole safetensors file"):
        weights.read(path)
    with pytest.raises(RuntimeError, match="not a whole safetensors file"):
        weights.metadata(path)


def test_pickle_is_refused(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(RuntimeError, match="not a whole safetensors file"):
        weights.read(path)


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    weights.write(path, {"a": torch.ones(1)})

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(weights, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        weights.write(path, {"a": torch.zeros(1)})
    assert torch.equal(weights.read(path)["a"], torch.ones(1))
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5])
def test_label_of_a_seed_and_guidance(guidance):
    """D_u + w (D_c − D_u), labels seed mod 4; one call of the network for w = 1, two otherwise."""
    net = EDMPrecond(tiny()).requires_grad_(False)
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    sigma = torch.full((3,), 0.7)
    conditional, null = net(x, sigma, torch.tensor([1, 2, 0])), net(x, sigma)
    denoiser = ByLabel(net, EDMDenoiser, net.num_classes, guidance)([5, 6, 8])
    found = denoiser(x, Level(0.7, 1.0, 0.7))
    torch.testing.assert_close(found, null + guidance * (conditional - null), atol=1e-5, rtol=1e-5)
    assert denoiser.calls == (1 if guidance == 1.0 else 2)


load_model = cache(load)


@pytest.mark.parametrize("path", sorted(CALIBRATIONS.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_calibration_is_what_its_name_says(path):
    """Model, solver and budget of the name are those inside, and the model's own fingerprint fits."""
    made = Calibration.load(path)
    name = made.provenance["model"]
    assert shipped_path(name, made.solver, made.nfe) == path
    made.check(load_model(name))
    assert made.corrects
    assert shipped_calibration(load_model(name), made.solver, made.nfe) == made


def test_nothing_ships_for_a_guided_model_or_an_unnamed_solver():
    assert shipped_calibration(load("fashion", guidance=2.0), SOLVERS["dpmpp-2m"], 5) is None
    assert shipped_path("fashion", DPMSolverMultistep(2, lower_order_final=False), 5) is None


def test_a_compiled_model_calls_the_compiled_network(monkeypatch: pytest.MonkeyPatch):
    compiled = []

    def compile_it(network):
        def call(*inputs, **conditions):
            compiled.append(conditions)
            return network(*inputs, **conditions)

        return call

    monkeypatch.setattr(torch, "compile", compile_it)
    plain, fast = load("fashion"), load("fashion", compiled=True)
    x, level = torch.randn(2, *plain.shape), plain.schedule.level(500.0)
    assert torch.equal(plain.denoiser_for([3, 4])(x, level), fast.denoiser_for([3, 4])(x, level))
    assert [conditions["labels"].tolist() for conditions in compiled] == [[3, 4]]


def test_forward_only_is_the_same_model_in_another_layout():
    x, level = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)), load("fashion").schedule.at(0.0)
    plain, last = (load("fashion", forward_only=given).denoiser_for([0, 1])(x, level) for given in (False, True))
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-5)


def test_labels_lie_on_the_device():
    """A copy from main memory at every evaluation would make the host wait for the device each time."""
    seen = []

    def network(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels)
        return x

    denoiser = ByLabel(network, EDMDenoiser, 10, device="meta")([3, 14])
    level = EDM().at(0.0)
    for _ in range(2):
        denoiser(torch.zeros(2, 3, 8, 8, device="meta"), level)
    assert seen[0].device.type == "meta"
    assert seen[0] is seen[1]
