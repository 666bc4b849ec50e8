"""Descriptions in files: solvers, schedules, grids, bases, networks. Each is revived whole or refused by name."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from damage import HOSTILE, JSON, edited, mutated, refusal
from steindiff import _weights as weights
from steindiff import bases, grids, schedules, solvers
from steindiff._checks import Within
from steindiff._serialization import decode, from_config, parse_json, to_config
from steindiff.bases import DCT, OPPONENT, Basis, Identity
from steindiff.grids.stein import Stein
from steindiff.integrations import edm
from steindiff.integrations.identity import check_identity, identify
from steindiff.levels import Level
from steindiff.schedules.base import Schedule

TABLES = {
    "solver": solvers.SOLVERS.classes(),
    "schedule": schedules.SCHEDULES.classes(),
    "grid": grids.GRIDS.classes(),
    "basis": bases.BASES.classes(),
}
THINGS = {
    "solver": list(solvers.SOLVERS.values()),
    "schedule": [
        schedules.EDM(),
        schedules.VP(),
        schedules.Flow(),
        schedules.Cosine(),
        schedules.Discrete((0.9, 0.5, 0.1)),
    ],
    "grid": [grids.Karras(), grids.LogSNR(), Stein(((-1.0, 1.0), (1.0, 2.0)))],
    "basis": [DCT((3, 4, 4), OPPONENT, 2), DCT((1, 8)), Identity((5,))],
}


def described(thing: Any) -> Any:
    return json.loads(json.dumps(to_config(thing)))


@pytest.mark.parametrize("name", TABLES)
def test_what_is_written_is_read(name: str):
    for thing in THINGS[name]:
        again = from_config(name, described(thing), TABLES[name])
        assert again == thing
        assert all(type(a) is type(b) for a, b in zip(vars(again).values(), vars(thing).values(), strict=True))


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
def test_configs(name: str, data: st.DataObject):
    description = data.draw(mutated(described(data.draw(st.sampled_from(THINGS[name])))) | JSON)
    found: list[Any] = []
    said = refusal(lambda: found.append(from_config(name, description, TABLES[name])), ValueError)
    assert said is None or len(said) < 1000
    for thing in found:
        assert from_config(name, described(thing), TABLES[name]) == thing
        if isinstance(thing, Schedule):
            assert all(map(math.isfinite, (*thing.level(thing.t_min), *thing.level(thing.t_max))))
        if isinstance(thing, Basis) and math.prod(thing.shape) < 10_000:
            assert thing.index().max() < thing.bands


class Pair(NamedTuple):
    left: int
    right: float


@dataclass(frozen=True)
class Record:
    count: Annotated[int, Within(1, 9)]
    names: tuple[str, ...]
    pair: Pair
    flag: bool = False
    mode: Literal["a", "b"] = "a"
    maybe: float | None = None
    table: dict[str, tuple[float, ...]] | None = None


GOOD = {
    "count": 3,
    "names": ["x"],
    "pair": [1, 2.5],
    "flag": True,
    "mode": "b",
    "maybe": 1,
    "table": {"k": [1.0, 2]},
}


def test_decode_keeps_types():
    record = decode("r", GOOD, Record)
    assert record == Record(3, ("x",), Pair(1, 2.5), True, "b", 1.0, {"k": (1.0, 2.0)})
    assert isinstance(record.maybe, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "r.count must be >= 1, got 0"),
        ({"count": 2.0}, "r.count must be a whole number, got 2.0"),
        ({"count": True}, "r.count must be a whole number, got True"),
        ({"count": 10**400}, "r.count must be <= 9223372036854775807, got a whole number of 1329 bits"),
        ({"names": "x"}, "r.names must be a list, got 'x'"),
        ({"names": [1]}, r"r.names\[0\] must be text, got 1"),
        ({"pair": [1]}, "r.pair must have 2 entries, got 1"),
        ({"pair": [1, "2"]}, r"r.pair\[1\] must be a finite number, got '2'"),
        ({"pair": [1, 10**400]}, r"r.pair\[1\] must be a finite number"),
        ({"flag": "false"}, "r.flag must be true or false, got 'false'"),
        ({"mode": "c"}, "r.mode must be one of 'a', 'b', got 'c'"),
        ({"table": {"k": None}}, r"r.table.k must be a list, got None"),
        ({"more": 1}, r"r has unknown fields \['more'\]; Record takes"),
    ],
)
def test_decode_names_the_field(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        decode("r", {**GOOD, **change}, Record)
    with pytest.raises(ValueError, match=r"r lacks the fields \['names'\] of Record"):
        decode("r", {"count": 1, "pair": [1, 1.0]}, Record)


@given(data=st.data())
def test_decode(data: st.DataObject):
    refusal(lambda: decode("r", data.draw(mutated(GOOD) | JSON), Record), ValueError)


@given(
    data=st.binary(max_size=60)
    | st.sampled_from([b"[" * 100_000, b"NaN", b"1e999", b"9" * 5000, b"\xff", b'"\\ud800"'])
)
def test_json(data: bytes):
    refusal(lambda: parse_json(data), ValueError)


def test_nan_is_not_json():
    for text in ("NaN", "[Infinity]", '{"a": -Infinity}'):
        with pytest.raises(ValueError, match="every number must be finite"):
            parse_json(text)


CLONE = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width=2, depth=1, names=()):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("scale", torch.ones(len(names)))
"""


@pytest.fixture(scope="module")
def clone(place: Path):
    folder = place / "clone"
    (folder / "training").mkdir(parents=True)
    (folder / "training" / "__init__.py").write_text("")
    (folder / "training" / "networks.py").write_text(CLONE)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "training"]:
        del sys.modules[name]


STATE = {"layers.0.weight": torch.eye(2), "layers.0.bias": torch.zeros(2), "scale": torch.ones(1)}
ARGUMENTS = {"width": 2, "depth": 1, "names": ["x"]}


@given(
    arguments=mutated(ARGUMENTS) | st.just(ARGUMENTS),
    width=st.sampled_from([2, 10**5, 10**9]),
    depth=st.sampled_from([1, 10**4, 10**12]),
    name=st.sampled_from(["Net", "torch", "os", "", "Nonesuch"]),
    edits=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6)), max_size=2),
)
def test_edm_headers(place: Path, clone: Path, arguments: Any, width: int, depth: int, name: str, edits):
    """Before, the network a header describes was built before it was compared with the tensors."""
    if isinstance(arguments, dict) and arguments.get("width") == 2:
        arguments = {**arguments, "width": width, "depth": depth}
    path = place / "net.safetensors"
    weights.write(path, STATE, {"class": name, "arguments": json.dumps(arguments)})
    path.write_bytes(edited(path.read_bytes(), edits, 0))
    said = refusal(lambda: edm.load(path, source=clone), (ValueError, RuntimeError))
    assert said is not None or (name, width, depth) == ("Net", 2, 1)


NETWORK = torch.nn.Linear(3, 3)


@given(known=mutated(identify(NETWORK)) | JSON | HOSTILE)
def test_identities_of_networks(known: Any):
    refusal(lambda: check_identity(known, NETWORK), ValueError)


def test_levels_are_decoded():
    assert decode("levels", [[1, 1.0, 2.0]], tuple[Level, ...]) == (Level(1.0, 1.0, 2.0),)
    with pytest.raises(ValueError, match=r"levels\[0\] must have 3 entries, got 2"):
        decode("levels", [[1, 1.0]], tuple[Level, ...])
