"""Files damaged on purpose, for the tests of everything that reads one."""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

EDITS = st.lists(st.tuples(st.integers(0, 1000), st.binary(max_size=6)), max_size=4)
"""Places and what to write there."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HOSTILE = st.sampled_from(
    [
        *(-1, 0, 1, 10**6, 2**31, 2**63, 10**400, 2.0, -0.0, 1e300, True, None),
        *("", "x", "1", "false", "%3000000000d", [], {}, [[]]),
    ]
)
"""What breaks programs that take a file's word for it."""

CHANGES = st.integers(1, 3)
PLACE = st.integers(0, 2**20 - 1)
"""Of an entry, modulo how many there are: a strategy made for every list would cost more than what it draws."""
ACTION = st.sampled_from(["replace", "replace", "replace", "remove", "add"])
VALUE = HOSTILE | JSON
NAME = st.text(max_size=5)

LARGE = (b"[" + b"[]," * 330_000 + b"[]]", b'{"format":3,"sha256":"","x":[' + b'{"a":[]},' * 100_000 + b"0]}")
"""JSON of just under 1 MB that takes as much memory as it can."""

MOST = 200 * 2**20
"""Bytes that no reader may take for a file under 1 MB."""
TAKEN = {"most": 0}
"""Bytes that the greediest look took since this was last set to 0."""


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three values replaced, removed or added, at any depth."""
    document = copy.deepcopy(document)
    for _ in range(draw(CHANGES)):
        holders = list(containers(document))
        if not holders:
            return draw(VALUE)
        holder = holders[draw(PLACE) % len(holders)]
        keys = sorted(holder) if isinstance(holder, dict) else range(len(holder))
        key, action = keys[draw(PLACE) % len(keys)], draw(ACTION)
        if action == "remove":
            del holder[key]
        elif action == "add" and isinstance(holder, dict):
            holder[draw(NAME)] = copy.deepcopy(draw(VALUE))
        else:
            holder[key] = copy.deepcopy(draw(VALUE))
    return document


def containers(value: Any) -> Iterator[Any]:
    """The lists and objects of a document that are not empty."""
    if isinstance(value, dict | list) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def edited(data: bytes, edits: list[tuple[int, bytes]], cut: int) -> bytes:
    """The data with some bytes replaced, and only the first `cut` of them unless that is 0."""
    changed = bytearray(data[: cut or len(data)])
    for start, piece in edits:
        changed[start % len(data) : start % len(data) + len(piece)] = piece
    return bytes(changed)


def refusal(look: Callable[[], object], documented: type[Exception] | tuple[type[Exception], ...]) -> str | None:
    """What the documented error says, if there is one; any other fails the test, and so does too much memory."""
    with capped():
        try:
            look()
        except documented as error:
            return str(error)
    return None


@contextmanager
def capped(most: int = MOST) -> Iterator[None]:
    """Inside, the process may not grow by more than `most` bytes, not even for a moment."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: memory kept from before would hide growth
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    yield
    taken = memory("VmHWM") - before
    TAKEN["most"] = max(TAKEN["most"], taken)
    assert taken <= most, f"{taken} bytes"


def memory(field: str) -> int:
    """Bytes in memory now (`VmRSS`) or at most so far (`VmHWM`); 0 where the system does not tell."""
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
    return 0


class Trap:
    """Makes a folder when unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)
