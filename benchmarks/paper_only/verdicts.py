"""Whether one method's Fréchet distance differs from another's by more than chance, and by enough to matter."""

from __future__ import annotations

from typing import NamedTuple

from steindiff.metrics.frechet import Distance


class Difference(NamedTuple):
    """A difference of two distances, and its standard error."""

    value: float
    error: float

    def verdict(self, against: float, share: float = 0.01) -> str:
        """`better` or `worse` beyond two standard errors and `share` of the distance compared with, else `equal`."""
        if abs(self.value) <= max(2.0 * self.error, share * against):
            return "equal"
        return "better" if self.value < 0 else "worse"


def difference(one: Distance, other: Distance) -> Difference:
    """`one` less `other`, of sets made from the same seeds in the same order: what they share cancels in φ_1 − φ_2."""
    value = one.value - other.value
    return Difference(value, Distance(value, one.influence - other.influence).error)
