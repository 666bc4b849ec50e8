"""Figures and tables of the documentation, from committed results alone.

    python benchmarks/figures.py

Reads `benchmarks/results/cifar10.json` and the shipped calibrations, writes `docs/assets/fid.png`,
`docs/assets/calibration.png` and the table between the `table:fid` marks of `docs/method.md` and `README.md`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from steindiff import GRIDS, SOLVERS
from steindiff.bases import DCT
from steindiff.schedules import EDM
from steindiff.zoo.shipped import calibration

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cifar10.json"
ASSETS = ROOT / "docs" / "assets"
TITLES = {
    ("dpmpp-2m", "edm-min", "none"): "DPM-Solver++(2M), EDM grid",
    ("dpmpp-2m", "logsnr-min", "none"): "DPM-Solver++(2M), log-SNR grid",
    ("dpmpp-3m", "edm-min", "none"): "DPM-Solver++(3M), EDM grid",
    ("dpmpp-3m", "logsnr-min", "none"): "DPM-Solver++(3M), log-SNR grid",
    ("dpmpp-2m", "stein", "none"): "DPM-Solver++(2M), Stein grid",
    ("dpmpp-2m", "stein", "balance"): "DPM-Solver++(2M), Stein calibration",
}


def curves(records: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """FID by title and NFE, of 10,000-sample records with default options."""
    found: dict[str, dict[int, float]] = {title: {} for title in TITLES.values()}
    for record in records:
        title = TITLES.get((record["solver"], record["grid"], record["correction"]))
        if title and record["samples"] == 10_000 and not record["options"]:
            found[title][record["nfe"]] = record["fid"]
    return found


def table(found: dict[str, dict[int, float]]) -> str:
    budgets = sorted({nfe for row in found.values() for nfe in row})
    lines = ["| FID, 10,000 samples | " + " | ".join(f"{nfe} NFE" for nfe in budgets) + " |"]
    lines.append("|---" * (len(budgets) + 1) + "|")
    for title, row in found.items():
        cells = [f"{row[nfe]:.2f}" if nfe in row else "–" for nfe in budgets]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fill(path: Path, name: str, text: str) -> None:
    """Put `text` between the marks `table:name` of a page."""
    page = path.read_text(encoding="utf-8")
    mark, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    page = re.sub(rf"{re.escape(mark)}(.*?{re.escape(end)})?", f"{mark}\n\n{text}\n\n{end}", page, flags=re.S)
    path.write_text(page, encoding="utf-8")


def plot_fid(found: dict[str, dict[int, float]], limit: float) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4))
    for title, row in found.items():
        points = sorted(row.items())
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=title, lw=1.5)
    axes.axhline(limit, color="0.5", ls=":", label="the model at 35 NFE (50,000 samples)")
    axes.set(xlabel="network evaluations per image", ylabel="FID (10,000 samples)", yscale="log")
    axes.set_yticks([10, 15, 20, 30], ["10", "15", "20", "30"])
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(ASSETS / "fid.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def plot_calibration(nfe: int) -> None:
    solver = SOLVERS["dpmpp-2m"]
    shipped = calibration("cifar10", solver, nfe)
    assert shipped is not None, f"no calibration ships for {nfe} evaluations"
    assert isinstance(shipped.basis, DCT)
    figure, (grids, factors) = plt.subplots(1, 2, figsize=(10, 3.4))
    rows = {
        "EDM": solver.levels(GRIDS["edm-min"], EDM(), nfe),
        "log-SNR": solver.levels(GRIDS["logsnr-min"], EDM(), nfe),
        "Stein": shipped.levels,
    }
    for height, levels in enumerate(rows.values()):
        sigmas = [level.sigma for level in levels[:-1]]
        grids.plot(sigmas, [height] * len(sigmas), "o-", lw=1)
    grids.set(xscale="log", xlabel="σ of the evaluations", title=f"where {nfe} evaluations go")
    grids.set_yticks(range(len(rows)), list(rows))
    grids.invert_xaxis()
    rings = shipped.basis.bands // shipped.shape[0]
    for i, row in enumerate(shipped.rho):
        if row:
            s, t = shipped.levels[i], shipped.levels[i + 1]
            brightness = torch.tensor(row).reshape(shipped.shape[0], rings)[0]
            factors.plot(brightness, ".-", lw=1, label=f"σ {s.sigma:.2g} → {t.sigma:.2g}")
    factors.axhline(1.0, color="0.5", lw=0.8)
    factors.set(xlabel="frequency ring (brightness)", ylabel="ρ", title="energy each step must give back")
    factors.legend(fontsize=8)
    figure.savefig(ASSETS / "calibration.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    ASSETS.mkdir(parents=True, exist_ok=True)
    records = json.loads(RESULTS.read_text())
    found = {title: row for title, row in curves(records).items() if row}
    limit = next(r["fid"] for r in records if r["solver"] == "heun" and r["nfe"] == 35 and r["samples"] == 50_000)
    for page in (ROOT / "docs" / "method.md", ROOT / "README.md"):
        if "<!-- table:fid -->" in page.read_text(encoding="utf-8"):
            fill(page, "fid", table(found))
    plot_fid(found, limit)
    plot_calibration(5)


if __name__ == "__main__":
    main()
