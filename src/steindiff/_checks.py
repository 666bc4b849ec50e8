"""Checks of arguments: one wording for one mistake, naming argument, expectation and value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


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
