"""Weights, statistics and pictures made to do harm: nothing runs, and nothing takes more memory than it should.

Random damage is in tests/fuzz.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from damage import Trap, refusal
from steindiff import _weights as weights
from steindiff.images import Archive, Folder
from steindiff.metrics import references


def test_neither_weights_nor_statistics_carry_code(tmp_path: Path):
    sprung = tmp_path / "sprung"
    pickled, array = io.BytesIO(), io.BytesIO()
    torch.save(Trap(sprung), pickled)
    objects = np.array([Trap(sprung)], dtype=object)
    np.savez(array, count=np.int64(3), mean=objects, covariance=objects)
    for data in (pickle.dumps(Trap(sprung)), pickled.getvalue(), array.getvalue()):
        for path, look in ((tmp_path / "w.safetensors", weights.read), (tmp_path / "s.npz", references.read)):
            path.write_bytes(data)
            with pytest.raises(RuntimeError, match=path.name):
                look(path)
    assert not sprung.exists()


def test_statistics_cannot_unpack_to_more_than_they_are(tmp_path: Path):
    """Before, 760 kB became 7.2 GB."""
    np.savez_compressed(
        tmp_path / "packed.npz", count=np.int64(9), mean=np.ones(1, np.float32), covariance=np.zeros(2**27, np.bool_)
    )
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(tmp_path / "claimed.npz", "w") as file:
        for name in ("count", "mean", "covariance"):
            file.writestr(f"{name}.npy", header.getvalue() + bytes(100))
    for name, says in (("packed", "count is compressed"), ("claimed", "need at most")):
        path = tmp_path / f"{name}.npz"
        assert path.stat().st_size < 2**20
        said = refusal(lambda path=path: references.read(path), RuntimeError)
        assert said is not None
        assert says in said


def test_pictures_cannot_unpack_to_more_than_an_image(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        header = io.BytesIO()
        shape = (1, 20_000, 20_000, 1)
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.writestr("images.npy", header.getvalue() + bytes(1000))
    (tmp_path / "png").mkdir()
    Image.new("1", (12_000, 12_000)).save(tmp_path / "png" / "a.png")
    for look in (
        lambda: next(Archive(tmp_path / "a.npz").batches(1)),
        lambda: next(Folder(tmp_path / "png").batches(1)),
    ):
        assert refusal(look, ValueError)
