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
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from damage import HOSTILE, JSON, LARGE, edited, mutated, refusal
from steindiff import bases, grids, sample, schedules, solvers
from steindiff._checks import Within
from steindiff._serialization import decode, from_config, parse_json, to_config, with_checksum
from steindiff.bases import DCT, OPPONENT, Basis, Identity
from steindiff.calibration import Calibration
from steindiff.corrections.replay import StepWeights
from steindiff.denoisers import Gaussian
from steindiff.grids.stein import Stein
from steindiff.integrations import edm
from steindiff.integrations.diffusers.networks import check_identity, identify
from steindiff.levels import Level
from steindiff.sampler import levels_for
from steindiff.schedules.base import Schedule
from steindiff.seeding import noise

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


NETWORK = torch.nn.Linear(3, 3)


def described(thing: Any) -> Any:
    return json.loads(json.dumps(to_config(thing)))


@pytest.mark.parametrize("name", TABLES)
def test_what_is_written_is_read(name: str):
    for thing in THINGS[name]:
        again = from_config(name, described(thing), TABLES[name])
        assert again == thing
        assert all(type(a) is type(b) for a, b in zip(vars(again).values(), vars(thing).values(), strict=True))


@pytest.mark.reader("descriptions")
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
        ({"count": 0}, "r.count must be >= 1 and <= 9, got 0"),
        ({"count": 2.0}, r"r.count must be a whole number below 2\*\*63, got 2.0"),
        ({"count": True}, r"r.count must be a whole number below 2\*\*63, got True"),
        ({"count": 10**400}, r"r.count must be a whole number below 2\*\*63, got a whole number of 1329 bits"),
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


@pytest.mark.reader("descriptions")
@given(data=st.data())
def test_decode(data: st.DataObject):
    value = data.draw(mutated(GOOD) | JSON)
    refusal(lambda: decode("r", value, Record), ValueError)


@pytest.mark.reader("descriptions")
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


def calibration() -> Calibration:
    """Small, with all there can be in it."""
    solver, basis = solvers.SOLVERS["dpmpp-2m"], DCT((1, 4))
    weights = StepWeights((1.0, 1.1, 0.9, 1.0), ((0.1, 0.0, 0.0, 0.2),), (0.01, 0.02, 0.01, 0.01), 0.5)
    return Calibration(
        solver=solver,
        levels=levels_for(solver, grids.GRIDS["logsnr"], schedules.EDM(), 3),
        basis=basis,
        steps=(StepWeights(), weights, weights),
        fingerprint=(0.1,) * 8,
        conditions={"guidance": 1.0, "network": identify(NETWORK)},
        provenance={"seed": 3, "cost": [1, 2]},
    )


def content(version: int) -> dict[str, Any]:
    """What a file of a format holds, without its checksum; format 2 as older versions wrote it."""
    body = {name: value for name, value in calibration().to_dict().items() if name != "sha256"}
    if version == 3:
        return body
    same = {name: body[name] for name in ("solver", "nfe", "schedule", "levels", "basis")}
    lists = {name: [step[name] for step in body["steps"]] for name in ("rho", "tau")}
    gamma = [step.get("gamma", 1.0) for step in body["steps"]]
    settings = {**body["conditions"], **body["provenance"]}
    return {
        "format": 2,
        **same,
        **lists,
        "gamma": gamma,
        "error": [],
        "model": body["fingerprint"],
        "settings": settings,
    }


@pytest.mark.reader("calibrations")
@pytest.mark.parametrize("version", [2, 3])
@given(data=st.data())
def test_calibrations_with_a_right_checksum(place: Path, version: int, data: st.DataObject):
    """Before: tracebacks for `order: 3.0`, `rings: 32.0` and `model: [1, "x"]`; 3 GB for a seed that is a format."""
    changed = data.draw(mutated(content(version)))
    path = place / f"c{version}.json"
    path.write_text(json.dumps(with_checksum(changed) if isinstance(changed, dict) else changed))
    found: list[Calibration] = []
    said = refusal(lambda: found.append(Calibration.load(path)), ValueError)
    assert said is None or str(path) in said
    denoiser = Gaussian(torch.zeros(1, 4), torch.ones(1, 4))
    for own in found:  # what is taken for sound can be used, or says what it was measured for
        x = noise([0], (1, 4), own.levels[0])
        refusal(
            lambda own=own, x=x: sample(denoiser, x, own.levels, own.solver, own.replay()), (ValueError, RuntimeError)
        )


@pytest.mark.parametrize("version", [2, 3])
def test_calibrations_of_both_formats_are_read(place: Path, version: int):
    path = place / "sound.json"
    path.write_text(json.dumps(with_checksum(content(version))))
    known, found = calibration(), Calibration.load(path)
    for name in ("solver", "levels", "basis", "fingerprint", "conditions", "provenance"):
        assert getattr(found, name) == getattr(known, name)
    assert [(w.rho, w.tau, w.gamma) for w in found.steps] == [(w.rho, w.tau, w.gamma) for w in known.steps]


@pytest.mark.reader("calibrations")
@given(data=st.binary(max_size=80), cut=st.integers(0, 2000))
@example(LARGE[0], 0)
@example(LARGE[1], 0)
def test_calibration_bytes(place: Path, data: bytes, cut: int):
    path = place / "bytes.json"
    text = json.dumps(calibration().to_dict()).encode()
    path.write_bytes(text[: min(cut, len(text) - 1)] + data)
    said = refusal(lambda: Calibration.load(path), ValueError)
    assert said is None or str(path) in said


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


@pytest.mark.reader("EDM networks")
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
    path.write_bytes(edited(save(STATE, {"class": name, "arguments": json.dumps(arguments)}), edits, 0))
    found: list[torch.nn.Module] = []
    refusal(lambda: found.append(edm.load(path, source=clone)), (ValueError, RuntimeError))
    for network in found:  # arguments may be left out where they are the defaults
        assert name == "Net"
        assert {key: value.shape for key, value in network.state_dict().items()} == {
            key: value.shape for key, value in STATE.items()
        }


@pytest.mark.reader("identities of networks")
@given(known=mutated(identify(NETWORK)) | JSON | HOSTILE)
def test_identities_of_networks(known: Any):
    refusal(lambda: check_identity(known, NETWORK), ValueError)


def test_levels_are_decoded():
    assert decode("levels", [[1, 1.0, 2.0]], tuple[Level, ...]) == (Level(1.0, 1.0, 2.0),)
    with pytest.raises(ValueError, match=r"levels\[0\] must have 3 entries, got 2"):
        decode("levels", [[1, 1.0]], tuple[Level, ...])
