"""Files damaged on purpose, for the tests of everything that reads one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

EDITS = st.lists(st.tuples(st.integers(0, 1000), st.binary(max_size=6)), max_size=4)
"""Places and what to write there."""


def edited(data: bytes, edits: list[tuple[int, bytes]], cut: int) -> bytes:
    """The data with some bytes replaced, and only the first `cut` of them unless that is 0."""
    changed = bytearray(data[: cut or len(data)])
    for start, piece in edits:
        changed[start % len(data) : start % len(data) + len(piece)] = piece
    return bytes(changed)


def refusal(look: Callable[[], object], documented: type[Exception]) -> str | None:
    """What the documented error says, if there is one; any other fails the test."""
    try:
        look()
    except documented as error:
        return str(error)
    return None


class Trap:
    """Makes a folder when unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)
