"""How much is measured, by kind of device."""

from __future__ import annotations

from dataclasses import dataclass

GIBIBYTE = 2**30


@dataclass(frozen=True)
class Scope:
    """Sizes of what is measured.

    Attributes:
        batches: of the loops, on the model asked for.
        corrected: batches of the corrections.
        repeats: rounds of every comparison; the sweeps take half of them.
        sweep_batch: batch of the sweeps over evaluations, resolution and probes, on a random U-Net.
        sweep_batches: of the sweep over batches.
        sweep_nfes: of the sweep over evaluations.
        resolutions: of the sweep over resolutions.
        probes: of the sweep over probes.
        memory: bytes the probes may take in the sweep over resolutions.
    """

    batches: tuple[int, ...]
    corrected: tuple[int, ...]
    repeats: int
    sweep_batch: int
    sweep_batches: tuple[int, ...]
    sweep_nfes: tuple[int, ...] = (5, 10, 20)
    resolutions: tuple[int, ...] = (32, 64, 256)
    probes: tuple[int, ...] = (1, 2, 5)
    memory: int = GIBIBYTE


SCOPES = {
    "cpu": Scope((1, 4, 32), (4,), 5, 2, (1, 2, 4, 8), memory=GIBIBYTE // 4),
    "mps": Scope((1, 32), (4,), 7, 4, (1, 4, 16)),
    "cuda": Scope((1, 32, 512), (32, 512), 7, 64, (1, 8, 64, 512), memory=8 * GIBIBYTE),
}
"""What is measured unless told otherwise: some minutes' worth."""
