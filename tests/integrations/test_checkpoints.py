"""Foreign checkpoints: EDM and EDM2 pickles (a stand-in clone with the same interface), and score-SDE networks."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from steindiff import _weights as weights
from steindiff import sample
from steindiff.denoisers import Gaussian
from steindiff.grids import Karras
from steindiff.integrations import edm
from steindiff.integrations.score_sde import ve_denoiser, vp_denoiser
from steindiff.probes.hutchinson import pullback
from steindiff.schedules import EDM, VE, VP, SubVP
from steindiff.solvers import Heun

CLONE = """
import torch


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class EDMPrecond(torch.nn.Module):
    def __init__(self, img_resolution, img_channels, label_dim=0, sigma_data=0.5):
        super().__init__()
        self.init_args, self.init_kwargs = (), dict(
            img_resolution=img_resolution, img_channels=img_channels, label_dim=label_dim, sigma_data=sigma_data
        )
        self.label_dim, self.sigma_min, self.sigma_max, self.sigma_data = label_dim, 0, float("inf"), sigma_data
        self.conv = torch.nn.Conv2d(img_channels, img_channels, 3, padding=1)
        self.embed = torch.nn.Linear(label_dim, img_channels) if label_dim else None
        self.register_buffer("filter", torch.ones(2))

    def forward(self, x, sigma, class_labels=None):
        sigma = sigma.reshape(-1, 1, 1, 1)
        total = sigma**2 + self.sigma_data**2
        f = Twice.apply(self.conv(x.float() / total.sqrt()))
        if self.embed is not None:
            f = f + self.embed(class_labels)[:, :, None, None]
        return self.sigma_data**2 / total * x + sigma * self.sigma_data / total.sqrt() * f
"""
MAKE = """
import pickle, sys, torch
sys.path.insert(0, sys.argv[1])
from training.networks import EDMPrecond
torch.manual_seed(0)
for name, classes in (("uncond", 0), ("cond", 4)):
    with open(f"{sys.argv[2]}/{name}.pkl", "wb") as file:
        pickle.dump({"ema": EDMPrecond(8, 3, classes), "augment_pipe": None}, file)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    (folder / "training").mkdir()
    (folder / "training" / "__init__.py").write_text("")
    (folder / "training" / "networks.py").write_text(textwrap.dedent(CLONE))
    return folder


@pytest.fixture(scope="module")
def files(clone: Path, tmp_path_factory) -> Path:
    """Pickles made in another process, so that this one has not imported the clone yet."""
    folder = tmp_path_factory.mktemp("checkpoints")
    subprocess.run([sys.executable, "-c", MAKE, str(clone), str(folder)], check=True)
    return folder


@pytest.fixture(autouse=True)
def _forget_clone():
    yield
    for name in [name for name in sys.modules if name == "training" or name.startswith("training.")]:
        del sys.modules[name]


def test_pickles_need_trust(files: Path, clone: Path):
    with pytest.raises(ValueError, match=r"trust_pickle = False: uncond\.pkl is a pickle, and unpickling runs"):
        edm.load(files / "uncond.pkl", source=clone)


def test_the_clone_is_named_if_missing(files: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"source: uncond\.pkl needs the module training; give the folder of a clone"):
        edm.load(files / "uncond.pkl", trust_pickle=True)
    with pytest.raises(ValueError, match="not a folder; give a clone of NVlabs/edm"):
        edm.load(files / "uncond.pkl", source=tmp_path / "nowhere", trust_pickle=True)


def test_other_files_are_refused(tmp_path: Path, clone: Path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        edm.load(tmp_path / "absent.pkl", trust_pickle=True)
    (tmp_path / "broken.pkl").write_bytes(b"\x80")
    with pytest.raises(ValueError, match="not a whole pickle"):
        edm.load(tmp_path / "broken.pkl", trust_pickle=True)
    (tmp_path / "other.pkl").write_bytes(pickle.dumps({"state": 1}))
    with pytest.raises(ValueError, match="holds no network under 'ema'"):
        edm.load(tmp_path / "other.pkl", trust_pickle=True)
    weights.write(tmp_path / "other.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"was not written by steindiff\.integrations\.edm\.convert"):
        edm.load(tmp_path / "other.safetensors", source=clone)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            {"module": "os", "class": "system", "arguments": '{"command": "touch SPRUNG"}'},
            "class must be a network of",
        ),
        ({"class": "torch", "arguments": "{}"}, "class must be a network of training.networks, got 'torch'"),
        ({"class": "EDMPrecond", "arguments": "["}, "does not fit training.networks.EDMPrecond"),
        ({"class": "EDMPrecond", "arguments": "[]"}, "does not fit"),
        ({"class": "EDMPrecond", "arguments": '{"img_resolution": 8, "img_channels": -1}'}, "does not fit"),
        ({"class": "EDMPrecond", "arguments": '{"img_resolution": 8, "img_channels": 3}'}, "does not fit"),
    ],
)
def test_a_converted_file_says_which_network_and_no_more(tmp_path: Path, clone: Path, facts: dict[str, str], says: str):
    sprung = tmp_path / "sprung"
    facts = {name: value.replace("SPRUNG", str(sprung)) for name, value in facts.items()}
    weights.write(tmp_path / "net.safetensors", {"a": torch.zeros(1)}, facts)
    with pytest.raises(ValueError, match=says):
        edm.load(tmp_path / "net.safetensors", source=clone)
    assert not sprung.exists()


@pytest.mark.parametrize(("name", "labels"), [("uncond", None), ("cond", [1, 3])])
def test_convert_and_sample(name: str, labels: list[int] | None, files: Path, clone: Path, tmp_path: Path):
    """The converted file gives the same network without any pickle, and carries the licence."""
    network = edm.load(files / f"{name}.pkl", source=clone, trust_pickle=True)
    assert not network.training
    assert str(clone) not in sys.path
    edm.convert(files / f"{name}.pkl", tmp_path / "net.safetensors", source=clone, trust_pickle=True)
    assert "CC BY-NC-SA 4.0" in weights.metadata(tmp_path / "net.safetensors")["licence"]
    again = edm.load(tmp_path / "net.safetensors", source=clone)
    levels = Karras()(edm.schedule_of(network), 4)
    assert levels[0].sigma == 80.0
    x = 80.0 * torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    ends = [sample(edm.denoiser(net, labels), x, levels, Heun()).x for net in (network, again)]
    assert torch.equal(*ends)
    assert ends[0].isfinite().all()


def test_networks_with_hand_written_backward_are_differentiated(files: Path, clone: Path):
    denoiser = edm.denoiser(edm.load(files / "uncond.pkl", source=clone, trust_pickle=True))
    level = EDM().level(1.0)
    x, v = torch.randn(2, 1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    _, pull = pullback(lambda z: denoiser(z, level), x)
    step = 1e-2
    slope = (denoiser(x + step * v, level) - denoiser(x - step * v, level)) / (2 * step)
    assert float((pull(v) * v).sum()) == pytest.approx(float((slope * v).sum()), rel=1e-2)


def test_labels_are_checked(files: Path, clone: Path):
    plain = edm.load(files / "uncond.pkl", source=clone, trust_pickle=True)
    with pytest.raises(ValueError, match=r"labels = \[1\]: the network has 0 classes"):
        edm.denoiser(plain, [1])
    conditional = edm.load(files / "cond.pkl", source=clone, trust_pickle=True)
    with pytest.raises(ValueError, match="labels = None: the network has 4 classes"):
        edm.denoiser(conditional)
    with pytest.raises(ValueError, match=r"labels must be from 0 to 3, got \[4\]"):
        edm.denoiser(conditional, [4])


@pytest.mark.parametrize("schedule", [VP(), SubVP()], ids=["vp", "sub-vp"])
def test_score_sde_vp(schedule):
    """A network that answers as theirs would on Gaussian data gives the exact denoiser."""
    exact = Gaussian(torch.full((5,), 0.3), torch.full((5,), 0.7))

    def network(x: Tensor, labels: Tensor) -> Tensor:
        level = schedule.level(float(labels[0]) / 999)
        score = -(x - level.alpha * exact.mean) / (level.alpha**2 * 0.7 + level.sigma**2)
        return -level.sigma * score

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t in (0.01, 0.3, 0.9):
        level = schedule.level(t)
        assert torch.allclose(vp_denoiser(network)(x, level), exact(x, level).double(), atol=1e-6)


def test_score_sde_ve():
    exact = Gaussian(torch.full((5,), 0.3), torch.full((5,), 0.7))

    def network(x: Tensor, labels: Tensor) -> Tensor:
        return -(x - exact.mean) / (0.7 + labels.reshape(-1, 1) ** 2)

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t in (0.1, 0.5, 0.9):
        level = VE().level(t)
        assert torch.allclose(ve_denoiser(network)(x, level), exact(x, level).double(), atol=1e-6)


def test_score_sde_steps_are_checked():
    with pytest.raises(ValueError, match="steps must be a whole number >= 2, got 1"):
        vp_denoiser(lambda x, t: x, steps=1)
