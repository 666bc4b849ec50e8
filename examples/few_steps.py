"""Sixteen images in five network evaluations each, plain and calibrated, as one picture.

    python examples/few_steps.py

Writes `few_steps.png`: the plain solver above, the calibrated one below, the same seeds.
"""

from __future__ import annotations

import torch

from steindiff import GRIDS, SOLVERS, noise, sample
from steindiff.calibrating import calibrate
from steindiff.corrections.replay import Replay
from steindiff.models import embedded
from steindiff.report.picture import to_image


def main() -> None:
    """Sample and write."""
    model, seeds, solver = embedded("fashion"), range(16), SOLVERS["dpmpp-2m"]
    calibration = model.calibrations(solver, 5) or calibrate(
        model.denoisers, solver, model.schedule, 5, model.shape, seeds=range(1000, 1016), batch=16
    )
    rows = []
    for levels, correction in (
        (solver.levels(GRIDS["edm-min"], model.schedule, 5), None),
        (calibration.levels, Replay(calibration)),
    ):
        out = sample(model.denoisers(seeds), noise(seeds, model.shape, levels[0]), levels, solver, correction)
        rows.append(torch.cat(list(out.x), dim=2))
    to_image(torch.cat(rows, dim=1)).save("few_steps.png")


if __name__ == "__main__":
    main()
