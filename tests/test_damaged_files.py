"""Weights and reference statistics: whatever the file holds, it is read or refused by the documented error."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from damage import EDITS, Trap, edited, refusal
from steindiff import _weights as weights
from steindiff.metrics import Moments, frechet_distance, references

TENSORS = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bool)}, metadata={"by": "test"})
DTYPES = ["F32", "F16", "BF16", "BOOL", "U8", "I64", "F64", "F8_E4M3", "F6_E2M3", "U16", "C64", "X"]
SIZES = st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63])


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def read_or_refuse_weights(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    for look in (weights.read, weights.metadata):
        said = refusal(lambda look=look: look(path), RuntimeError)
        assert said is None or said.startswith(f"weights {path}: not a whole")


@settings(max_examples=150, deadline=None)
@given(edits=EDITS, cut=st.integers(0, 200), noise=st.none() | st.binary(max_size=60))
def test_fuzzed_weights_are_read_or_refused(place: Path, edits, cut: int, noise: bytes | None):
    read_or_refuse_weights(place / "w.safetensors", edited(TENSORS, edits, cut) if noise is None else noise)


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(SIZES, max_size=3),
    size=st.sampled_from([0, 1, 4, 8, 24]),
    facts=st.sampled_from([{}, {"by": "test"}, {"by": 1}, None]),
)
def test_fuzzed_headers_of_weights_are_read_or_refused(place: Path, dtype: str, shape: list[int], size: int, facts):
    content = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}, "__metadata__": facts}
    header = json.dumps(content).encode()
    read_or_refuse_weights(place / "h.safetensors", len(header).to_bytes(8, "little") + header + bytes(size))


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=60))
def test_fuzzed_pickles_end_in_the_documented_error_even_if_trusted(place: Path, data: bytes):
    path = place / "w.pt"
    path.write_bytes(data)
    with pytest.raises(RuntimeError, match=r"w\.pt: not safetensors; unpickling runs code"):
        weights.read(path)
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, buffer)
    path.write_bytes(buffer.getvalue()[: -1 - len(data)])
    with pytest.raises(RuntimeError, match=r"w\.pt: not a whole pickle"):
        weights.read(path, trust_pickle=True)


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


@pytest.fixture(scope="module")
def statistics(place: Path) -> bytes:
    features = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    references.save(place / "whole.npz", Moments.of(features))
    return (place / "whole.npz").read_bytes()


def read_or_refuse_statistics(path: Path) -> None:
    found: list[Moments] = []
    said = refusal(lambda: found.append(references.read(path)), RuntimeError)
    assert said is None or said.startswith(f"reference statistics {path}: ")
    for moments in found:
        assert moments.count >= 2
        assert np.isfinite(frechet_distance(moments, moments))


@settings(max_examples=150, deadline=None)
@given(edits=EDITS, cut=st.integers(0, 900), noise=st.none() | st.binary(max_size=60))
def test_fuzzed_statistics_are_read_or_refused(place: Path, statistics: bytes, edits, cut: int, noise: bytes | None):
    path = place / "s.npz"
    path.write_bytes(edited(statistics, edits, cut) if noise is None else noise)
    read_or_refuse_statistics(path)


ARRAYS = st.sampled_from(
    [
        np.float32(1.0),
        np.zeros(0, np.float32),
        np.ones(1, np.float32),
        np.ones(3, np.float32),
        np.ones(6, np.float32),
        np.ones(6),
        np.ones((3, 3), np.float32),
        np.full(3, np.nan, np.float32),
        np.array(["a", "b", "c"]),
        np.ones(3, np.complex64),
    ]
)


@settings(max_examples=150, deadline=None)
@example(count=np.float64(2.0**64), mean=np.ones(1, np.float32), covariance=np.ones(1, np.float32))  # found by fuzzing
@given(count=ARRAYS | st.integers(-3, 5).map(np.int64) | st.floats().map(np.float64), mean=ARRAYS, covariance=ARRAYS)
def test_fuzzed_arrays_of_statistics_are_read_or_refused(place: Path, count, mean, covariance):
    path = place / "arrays.npz"
    np.savez(path, count=count, mean=mean, covariance=covariance)
    read_or_refuse_statistics(path)
