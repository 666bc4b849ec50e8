"""Sixty-four uncurated pairs: the same seeds plain and calibrated, and with many steps.

    python benchmarks/pairs.py

Seeds 0 to 63 of the embedded CIFAR-10 model, DPM-Solver++(2M), 5 evaluations; every triple is the log-SNR grid, the
shipped calibration, and 3M with 24 evaluations, from left to right. Writes `docs/assets/pairs.png`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from steindiff import GRIDS, SOLVERS, noise, sample
from steindiff._files import write_bytes
from steindiff.corrections.replay import Replay
from steindiff.models import embedded
from steindiff.pixels import png, to_uint8

SEEDS, COLUMNS, GAP, ZOOM = range(64), 8, 4, 2
OUT = Path(__file__).parent.parent / "docs" / "assets" / "pairs.png"


def sheet(triples: Tensor) -> Tensor:
    """One picture, `(C, H, W)`, of triples `(N, 3, C, h, w)` in [−1, 1]."""
    side = triples.shape[-1]
    strips = torch.cat(triples.unbind(1), dim=-1)
    framed = torch.nn.functional.pad(strips, (GAP, GAP, GAP, GAP), value=1.0)
    lines = framed.unflatten(0, (-1, COLUMNS)).movedim(1, 3).flatten(3, 4).movedim(0, 1).flatten(1, 2)
    assert lines.shape[1] == len(triples) // COLUMNS * (side + 2 * GAP)
    return lines.repeat_interleave(ZOOM, 1).repeat_interleave(ZOOM, 2)


def main() -> None:
    model, solver = embedded("cifar10"), SOLVERS["dpmpp-2m"]
    calibration = model.calibrations(solver, 5)
    assert calibration is not None, "a calibration ships for 5 evaluations"
    runs = [
        (solver.levels(GRIDS["logsnr-min"], model.schedule, 5), solver, None),
        (calibration.levels, solver, Replay(calibration)),
        (GRIDS["logsnr-min"](model.schedule, 24), SOLVERS["dpmpp-3m"], None),
    ]
    images = [
        torch.cat(
            [
                sample(
                    model.denoisers(SEEDS[k : k + 16]),
                    noise(SEEDS[k : k + 16], model.shape, levels[0]),
                    levels,
                    how,
                    correction,
                ).x
                for k in range(0, len(SEEDS), 16)
            ]
        )
        for levels, how, correction in runs
    ]
    write_bytes(OUT, png(to_uint8(sheet(torch.stack(images, 1).clamp(-1, 1)))))


if __name__ == "__main__":
    main()
