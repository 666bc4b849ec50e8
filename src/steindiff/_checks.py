"""Checks of arguments and of fields of files: one wording for one mistake, naming it, the expectation and the value."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


def at_least(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")


def number(name: str, value: Any, least: float, most: float = math.inf, *, open_end: bool = False) -> None:
    """Refuse what is not a number from `least` (beyond it, if `open_end`) to `most`; NaN never passes."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    low = value > least if open_end else value >= least
    if not (low and value <= most):
        sign = ">" if open_end else ">="
        upper = "" if math.isinf(most) else f" and <= {most:g}"
        raise ValueError(f"{name} must be {sign} {least:g}{upper}, got {value!r}")


def nearest(name: str, options: Iterable[str]) -> str:
    """What may have been meant, as the end of a sentence: `; did you mean 'dpmpp-2m'?`, else all options."""
    options = list(options)
    close = difflib.get_close_matches(str(name).lower(), options, 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(sorted(options))}"


LARGEST_INT = 2**63 - 1
"""The largest whole number torch can hold."""
SHOWN = 60
"""Characters of a value that a message shows."""


def shown(value: Any) -> str:
    """A value of a file for a message: of text and lists only the beginning is spelled out."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value[: SHOWN + 1] if isinstance(value, str | bytes | list | tuple) else value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def integer(name: str, value: Any) -> int:
    """A field of a file as an int below 2⁶³; text, truth values and 2.0 are refused."""
    if type(value) is not int or abs(value) > LARGEST_INT:
        raise ValueError(f"{name} must be a whole number below 2**63, got {shown(value)}")
    return value


def finite(name: str, value: Any) -> float:
    """A field of a file as a finite float; text, truth values and NaN are refused."""
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")
    return float(value)


class Within(NamedTuple):
    """The bounds of a number, for annotations: `Annotated[int, Within(1)]`."""

    low: float = -math.inf
    high: float = math.inf

    def __call__(self, name: str, value: Any) -> None:
        """Refuse a number out of bounds."""
        if not self.low <= value <= self.high:
            upper = "" if math.isinf(self.high) else f" and <= {self.high:g}"
            raise ValueError(f"{name} must be >= {self.low:g}{upper}, got {shown(value)}")
