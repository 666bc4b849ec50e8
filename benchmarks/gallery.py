"""The pictures of the gallery and the method page, of the embedded CIFAR-10 model and its shipped calibration.

python benchmarks/gallery.py          # minutes on two cores; writes docs/assets and benchmarks/results/gallery.json
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import steindiff as sd
from steindiff.comparison import many_steps, spectrum
from steindiff.images import to_image, to_uint8

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "docs" / "assets"
COLUMNS, SCALE, GAP = 8, 2, 8


def pairs(strips: list[Tensor]) -> Image.Image:
    """Triples of every seed: plain, calibrated, many steps."""
    size = SCALE * strips[0].shape[-1]
    width, lines = len(strips) * size + GAP, -(-len(strips[0]) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * width - GAP, lines * (size + GAP) - GAP), "white")
    for k, images in enumerate(strips):
        for n, image in enumerate(to_uint8(images)):
            tile = to_image(image).resize((size, size), Image.Resampling.LANCZOS)
            sheet.paste(tile, ((n % COLUMNS) * width + k * size, (n // COLUMNS) * (size + GAP)))
    return sheet


def spectra(rows: list[dict[str, Any]]) -> Figure:
    """Power at each frequency over that of many steps."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes, limit = figure.subplots(), rows[-1]["spectrum"]
    for row in rows[:-1]:
        axes.plot(
            [a / b for a, b in zip(row["spectrum"], limit, strict=True)], label=f"{row['title']}, {row['nfe']} NFE"
        )
    axes.axhline(1.0, color="grey", linestyle=":", label=rows[-1]["title"])
    axes.set(xlabel="frequency ring, max(k_x, k_y)", ylabel="power over many steps'", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def weights(rows: list[dict[str, Any]]) -> Figure:
    """Where runs step, what the network is told, and ρ and τ of the brightness channel."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    where, rho, tau = figure.subplots(1, 3)
    found = rows[-2]
    rings, told = len(found["spectrum"]), found["told"]
    for y, row in enumerate(reversed(rows)):
        ratios = [sigma / alpha for sigma, alpha in row["levels"]]
        where.plot(ratios, [y] * len(ratios), "|", markersize=14, label=row["title"])
    asked = [c * sigma / alpha for c, (sigma, alpha) in zip(told, found["levels"], strict=True)]
    where.plot(asked[:-1], [1] * len(asked[:-1]), "x", color="black", markersize=5)
    where.set(xscale="log", xlabel="σ/α of every level; ×: what the network is told", yticks=range(len(rows)))
    where.set_yticklabels([row["title"] for row in reversed(rows)])
    where.invert_xaxis()
    for axes, name, still in ((rho, "rho", 1.0), (tau, "tau", 0.0)):
        for i, row in enumerate(found[name]):
            if row:
                axes.plot(row[:rings], label=f"step {i + 1}", color=f"C{i}")
        axes.axhline(still, color="grey", linestyle=":")
        axes.set(xlabel="frequency ring", title={"rho": "ρ", "tau": "τ₁"}[name])
    figure.legend(*rho.get_legend_handles_labels(), loc="outside upper center", ncols=len(found["rho"]), frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model, solver = sd.load("cifar10", device=args.device), sd.SOLVERS["dpmpp-2m"]
    calibration = sd.shipped_calibration(model, solver, 5)
    assert calibration is not None, "it ships"
    samplers = {
        "log-SNR grid": sd.Sampler(solver, "logsnr", 5),
        "calibrated": calibration.sampler(),
        "many steps": many_steps(24),
    }
    rows, strips = [], []
    for title, sampler in samplers.items():
        made = sampler(model, range(args.num), batch=24)
        levels, steps = sampler.levels_for(model.schedule), calibration.steps if title == "calibrated" else ()
        strips.append(made.x.cpu())
        rows.append(
            {
                "title": title,
                "nfe": made.nfe,
                "network_calls": made.network_calls,
                "backward_passes": made.backward_passes,
                "levels": [[level.sigma, level.alpha] for level in levels],
                "told": [level.told for level in levels],
                "rho": [step.rho for step in steps],
                "tau": [step.tau[0] if step.tau else () for step in steps],
                "spectrum": spectrum(strips[-1].clamp(-1, 1)).tolist(),
            }
        )
    record = {
        "seed": 0,
        "seeds": args.num,
        "solver": "dpmpp-2m",
        "device": args.device,
        "versions": {"steindiff": sd.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
    }
    pairs(strips).save(ASSETS / "pairs.png", optimize=True)
    spectra(rows).savefig(ASSETS / "spectra.png", dpi=160)
    weights(rows).savefig(ASSETS / "calibration.png", dpi=160)
    path = ROOT / "benchmarks" / "results" / "gallery.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
