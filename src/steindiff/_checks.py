"""Checks of arguments and of fields of files: name, what is expected, the value."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

LARGEST_INT = 2**63 - 1
"""The largest whole number torch can hold."""
SHOWN = 60
"""Characters of a value that a message shows."""


def shown(value: Any) -> str:
    """A value for a message; text and containers are cut before they are spelled out."""
    if isinstance(value, str | bytes | list | tuple):
        text = repr(value[: SHOWN + 1])
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        text = f"a whole number of {value.bit_length()} bits"
    else:
        text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def integer(name: str, value: Any, low: int = -LARGEST_INT, high: int = LARGEST_INT) -> int:
    """`value` as an int in [low, high]; no text, no truth value, no fraction.

    Raises:
        ValueError: `batch must be >= 1, got 0`.

    Example:
        >>> integer("batch", 4, 1)
        4
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} must be a whole number, got {shown(value)}")
    if number < low:
        raise ValueError(f"{name} must be >= {low}, got {shown(number)}")
    if number > high:
        raise ValueError(f"{name} must be <= {high}, got {shown(number)}")
    return number


def finite(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a finite float in [low, high]; no text, no truth value.

    Raises:
        ValueError: `power must be >= 0, got -1`.
    """
    number = math.nan
    if isinstance(value, float | int) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an int beyond float64
            number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")
    if number < low:
        raise ValueError(f"{name} must be >= {low:g}, got {value}")
    if number > high:
        raise ValueError(f"{name} must be <= {high:g}, got {value}")
    return number


class Within(NamedTuple):
    """The bounds of a number, for `Annotated`: `Annotated[int, Within(1)]`."""

    low: float = -math.inf
    high: float = math.inf

    def __call__(self, name: str, value: Any) -> None:
        """Refuse a number out of bounds."""
        if value < self.low:
            raise ValueError(f"{name} must be >= {self.low:g}, got {shown(value)}")
        if value > self.high:
            raise ValueError(f"{name} must be <= {self.high:g}, got {shown(value)}")


def seeds(name: str, values: Sequence[int]) -> None:
    """Refuse an empty sequence, and seeds that are not whole numbers in [0, 2⁶³).

    Raises:
        ValueError: naming the first one that is wrong.
    """
    if len(values) == 0:
        raise ValueError(f"{name} must hold at least one seed, got none")
    for seed in (values[0], values[-1]) if isinstance(values, range) else values:
        integer(name, seed, 0)
