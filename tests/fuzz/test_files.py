"""Whatever a file holds, it is read or refused by the documented error, in bounded memory."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

import drills
from damage import EDITS, HOSTILE, JSON, LARGE, edited, mutated, refusal
from reference import save as save_statistics
from steindiff import _weights as weights
from steindiff._serialization import with_checksum
from steindiff.images import Archive, Folder
from steindiff.metrics import Moments, frechet_distance, references
from steindiff.production import Images, Manifest, verify
from steindiff.production.shards import sum_line

TENSORS = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bool)}, metadata={"by": "test"})
NAMES = json.dumps({f"{i:x}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(15_000)}).encode()
"""The header of very many tensors."""
DTYPES = ["F32", "F16", "BF16", "BOOL", "U8", "I64", "F64", "F8_E4M3", "F6_E2M3", "U16", "C64", "X"]
SIZES = st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63])
NOISE = st.none() | st.binary(max_size=80)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
FORMATS = {"PNG": ".png", "JPEG": ".jpg", "BMP": ".bmp", "TIFF": ".tif", "WEBP": ".webp"}


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    """What is written into a file."""
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


PICKLE = written(lambda file: torch.save({"a": torch.zeros(3)}, file))
PICTURES = {kind: written(lambda file, kind=kind: Image.fromarray(PIXELS[0]).save(file, kind)) for kind in FORMATS}
ARCHIVES = [written(lambda file, save=save: save(file, images=PIXELS)) for save in (np.savez, np.savez_compressed)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of images; `torn` is a copy to damage."""
    folder = tmp_path_factory.mktemp("set")
    drills.make(folder / "whole")
    shutil.copytree(folder / "whole", folder / "torn")
    return folder


def look_at(folder: Path) -> None:
    for look in (verify, lambda path: list(Images(path).batches(2))):
        said = refusal(lambda look=look: look(folder), ValueError)
        assert said is None or folder.name in said


@pytest.mark.reader("manifests")
@given(data=st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()))
@example(LARGE[0])
@example(LARGE[1])
def test_manifest_bytes(made: Path, data: bytes):
    (made / "torn" / "manifest.json").write_bytes(data)
    assert "manifest.json" in (refusal(lambda: verify(made / "torn"), ValueError) or "")


@pytest.fixture(scope="module")
def manifest(made: Path) -> tuple[Manifest, dict[str, Any]]:
    """What the set says of itself, and the content of that file without its checksum."""
    content = json.loads((made / "whole" / "manifest.json").read_text(encoding="utf-8"))
    del content["sha256"]
    return Manifest.load(made / "whole"), content


@pytest.mark.reader("manifests")
@given(data=st.data())
def test_manifest_fields_with_a_right_checksum(
    made: Path, manifest: tuple[Manifest, dict[str, Any]], data: st.DataObject
):
    known, content = manifest
    changed = data.draw(mutated(content))
    text = json.dumps(with_checksum(changed) if isinstance(changed, dict) else changed)
    (made / "torn" / "manifest.json").write_text(text)
    look_at(made / "torn")
    said = refusal(lambda: known.check(made / "torn"), ValueError)
    assert said is None or "manifest.json" in said or "other settings" in said


@pytest.mark.reader("shards")
@given(edits=EDITS, cut=st.integers(0, 700), resummed=st.booleans())
def test_shards(made: Path, edits: list[tuple[int, bytes]], cut: int, resummed: bool):
    whole, torn = made / "whole", made / "torn"
    name = "shard-00000.safetensors"
    shutil.copy(whole / "manifest.json", torn)
    original = (whole / name).read_bytes()
    data = edited(original, edits, cut if cut < 300 else 0)
    (torn / name).write_bytes(data)
    (torn / f"{name}.sha256").write_bytes(sum_line(torn, 0, data if resummed else original))
    assert resummed or (0 in verify(torn).damaged) == (data != original)
    look_at(torn)


@pytest.fixture(scope="module")
def statistics(place: Path) -> bytes:
    features = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    save_statistics(place / "whole.npz", Moments.of(features))
    return (place / "whole.npz").read_bytes()


def read_statistics(path: Path) -> None:
    found: list[Moments] = []
    said = refusal(lambda: found.append(references.read(path)), RuntimeError)
    assert said is None or said.startswith(f"reference statistics {path}: ")
    for moments in found:
        assert moments.count >= 2
        assert np.isfinite(frechet_distance(moments, moments))


@pytest.mark.reader("reference statistics")
@given(edits=EDITS, cut=st.integers(0, 900), noise=NOISE)
def test_statistics(place: Path, statistics: bytes, edits: list[tuple[int, bytes]], cut: int, noise: bytes | None):
    (place / "s.npz").write_bytes(edited(statistics, edits, cut) if noise is None else noise)
    read_statistics(place / "s.npz")


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
        np.ones(3, np.complex64),
    ]
)


@pytest.mark.reader("reference statistics")
@example(count=np.float64(2.0**64), mean=np.ones(1, np.float32), covariance=np.ones(1, np.float32))  # found by fuzzing
@given(count=ARRAYS | st.integers(-3, 5).map(np.int64) | st.floats().map(np.float64), mean=ARRAYS, covariance=ARRAYS)
def test_arrays_of_statistics(place: Path, count, mean, covariance):
    np.savez(place / "arrays.npz", count=count, mean=mean, covariance=covariance)
    read_statistics(place / "arrays.npz")


def read_weights(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    for look in (weights.read, weights.metadata, weights.shapes):
        said = refusal(lambda look=look: look(path), RuntimeError)
        assert said is None or said.startswith(f"weights {path}: not a whole")


@pytest.mark.reader("weights")
@given(edits=EDITS, cut=st.integers(0, 200), noise=NOISE)
@example([], 0, len(NAMES).to_bytes(8, "little") + NAMES)
def test_weights(place: Path, edits: list[tuple[int, bytes]], cut: int, noise: bytes | None):
    read_weights(place / "w.safetensors", edited(TENSORS, edits, cut) if noise is None else noise)


@pytest.mark.reader("weights")
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(SIZES, max_size=3),
    size=st.sampled_from([0, 1, 4, 8, 24]),
    facts=st.sampled_from([{}, {"by": "test"}, {"by": 1}, None]) | HOSTILE,
)
def test_headers_of_weights(place: Path, dtype: str, shape: list[int], size: int, facts):
    content = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}, "__metadata__": facts}
    header = json.dumps(content).encode()
    read_weights(place / "h.safetensors", len(header).to_bytes(8, "little") + header + bytes(size))


@pytest.mark.reader("weights")
@given(data=st.binary(max_size=60))
def test_pickles_are_refused(place: Path, data: bytes):
    path = place / "w.pt"
    for content in (data, PICKLE, PICKLE[: -1 - len(data)]):
        path.write_bytes(content)
        said = refusal(lambda: weights.read(path), RuntimeError)
        assert said is not None
        assert "w.pt: not a whole safetensors file" in said


@pytest.mark.reader("pictures")
@pytest.mark.filterwarnings("ignore::UserWarning")  # decoders warn about damaged metadata
@given(kind=st.sampled_from(list(FORMATS)), edits=EDITS, cut=st.integers(0, 200))
@example("TIFF", [(317, b"5"), (185, b""), (432, b"5")], 0)  # 5 × 3,473,412 pixels took 218 MB
def test_pictures(place: Path, kind: str, edits: list[tuple[int, bytes]], cut: int):
    folder = place / "pictures"
    folder.mkdir(exist_ok=True)
    path = folder / f"picture{FORMATS[kind]}"
    path.write_bytes(edited(PICTURES[kind], edits, cut))
    said = refusal(lambda: next(Folder(folder).batches(1)), ValueError)
    path.unlink()
    assert said is None or str(path) in said


@pytest.mark.reader("archives of images")
@given(edits=EDITS, cut=st.integers(0, 600), packed=st.booleans(), noise=NOISE)
def test_archives(place: Path, edits: list[tuple[int, bytes]], cut: int, packed: bool, noise: bytes | None):
    path = place / "a.npz"
    path.write_bytes(edited(ARCHIVES[packed], edits, cut) if noise is None else noise)
    said = refusal(lambda: list(Archive(path).batches(1)), ValueError)
    assert said is None or str(path) in said


SHAPES = st.lists(st.sampled_from([0, 1, 3, 5, 1000, 20_000, 2**31, 2**63, -1]), max_size=5).map(tuple)


@pytest.mark.reader("archives of images")
@given(
    header=st.text(max_size=60)
    | st.sampled_from(["(" * 4000, "{'descr': '|O', 'fortran_order': False, 'shape': ()}"])
    | SHAPES.map(lambda shape: repr({"descr": "|u1", "fortran_order": False, "shape": shape})),
    body=st.sampled_from([b"", bytes(100), bytes(2**22)]),
)
@example("{'descr': '|u1', 'fortran_order': False, 'shape': (9223372036854775808, 1, 1, 1)}", b"")
def test_array_headers(place: Path, header: str, body: bytes):
    """A sound archive around a header of one's own, its body packed two hundredfold."""
    text = header.encode() + b"\n"
    path = place / "h.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("images.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body)
    said = refusal(lambda: next(Archive(path).batches(1)), ValueError)
    assert said is None or str(path) in said
