"""Figures and tables of the documentation, from committed results alone.

    python benchmarks/figures.py

Reads `benchmarks/results/{cifar10,second_opinion,fashion,guided,demo}.json` and the shipped calibrations; writes
`docs/assets/{fid,calibration,spectra}.png`, and the tables between the `table:NAME` marks of `README.md` and
`docs/method.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from steindiff.zoo.shipped import calibration

from pages import fill, rows
from steindiff import GRIDS, SOLVERS
from steindiff.bases import DCT
from steindiff.schedules import EDM

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ASSETS = ROOT / "docs" / "assets"
HOSTS = {
    "dpmpp-2m": "DPM-Solver++(2M)",
    "dpmpp-3m": "DPM-Solver++(3M)",
    "unipc-bh1-3": "UniPC-3 (bh1)",
    "ddim": "DDIM",
    "ipndm-4": "iPNDM-4",
    "heun": "Heun",
}
GRID_NAMES = {"edm": "EDM grid to 0", "edm-min": "EDM grid", "logsnr-min": "log-SNR grid", "stein": "Stein grid"}

LATE = {"start": 2.0}
"""The option of calibrations that begin later than the schedule."""

Record = dict[str, Any]
Curve = dict[int, float]


def read(name: str) -> list[Record]:
    """The records of a file in `benchmarks/results`."""
    records: list[Record] = json.loads((RESULTS / f"{name}.json").read_text())
    return records


def best_plain(records: Sequence[Record], solver: str) -> Curve:
    """By NFE, the lower of the two published grids."""
    found: Curve = {}
    for record in records:
        if (
            record["solver"] == solver
            and record["correction"] == "none"
            and record["grid"] in ("edm-min", "logsnr-min")
            and not record["options"]
        ):
            found[record["nfe"]] = min(record["fid"], found.get(record["nfe"], float("inf")))
    return found


def calibrated(records: Sequence[Record], solver: str, options: dict[str, Any] | None = None) -> Curve:
    """By NFE, with the default calibration, or with one of the given options."""
    key = (solver, "stein", "calibrated", options or {})
    return {r["nfe"]: r["fid"] for r in records if (r["solver"], r["grid"], r["correction"], r["options"]) == key}


def marked(ours: Curve, plain: Curve, nfe: int) -> str:
    """A cell of ours, bold where it is the better one to two digits."""
    if nfe not in ours:
        return "–"
    return f"**{ours[nfe]:.2f}**" if round(ours[nfe], 2) < round(plain[nfe], 2) else f"{ours[nfe]:.2f}"


def hosts_table(records: Sequence[Record]) -> str:
    """Every solver, plain on the better grid, calibrated, and calibrated with a late start where that was measured."""
    budgets = sorted({nfe for solver in HOSTS for nfe in calibrated(records, solver)})
    body = []
    for solver, title in HOSTS.items():
        plain, ours, late = best_plain(records, solver), calibrated(records, solver), calibrated(records, solver, LATE)
        body.append([title, "plain, better grid", *(f"{plain[n]:.2f}" if n in ours else "–" for n in budgets)])
        body.append(["", "calibrated", *(marked(ours, plain, n) for n in budgets)])
        if late:
            body.append(["", "late start", *(marked(late, plain, n) for n in budgets)])
    return rows(["FID, 10,000 samples", "", *(f"{nfe} NFE" for nfe in budgets)], body)


def headline_table(records: Sequence[Record]) -> str:
    """FID as the field quotes it."""
    solver = "dpmpp-2m"
    curves = {
        "plain, log-SNR grid": best_plain(records, solver),
        "calibrated": calibrated(records, solver),
        "calibrated, late start": calibrated(records, solver, LATE),
    }
    (limit,) = (r for r in records if r["solver"] == "heun")
    budgets = sorted(curves["calibrated"])
    body = [[name, *(f"{curve[n]:.2f}" if n in curve else "–" for n in budgets)] for name, curve in curves.items()]
    header = ["FID, 50,000 samples", *(f"{nfe} NFE" for nfe in budgets)]
    return rows(header, body) + f"\n\nThe model itself (Heun, {limit['nfe']} evaluations): {limit['fid']:.2f}."


def ablation_table(records: Sequence[Record]) -> str:
    """One change at a time, 2M at 5 and 8 evaluations."""
    default = ("stein", "calibrated", {})
    changes: dict[str, tuple[str, str, dict[str, Any]]] = {"default": default}
    for record in records:
        if record["solver"] == "dpmpp-2m" and record["nfe"] in (5, 8):
            key = (record["grid"], record["correction"], record["options"])
            parts = [
                *([GRID_NAMES[key[0]]] if key[0] != "stein" else []),
                *(["grid alone"] if key[1:] == ("none", {}) and key[0] == "stein" else []),
                *([] if key[1] in ("calibrated", "none") else [key[1]]),
                *(f"{name} {value}" for name, value in key[2].items()),
            ]
            if parts and not (key[1] == "none" and key[0] != "stein"):
                changes.setdefault(", ".join(parts), key)
    body = []
    for title, key in changes.items():
        cells = {
            r["nfe"]: f"{r['fid']:.2f}"
            for r in records
            if r["solver"] == "dpmpp-2m" and (r["grid"], r["correction"], r["options"]) == key
        }
        body.append([title, cells.get(5, "–"), cells.get(8, "–")])
    return rows(["change", "FID at 5", "at 8"], body)


def second_table(records: Sequence[Record]) -> str:
    """Other measures of the same samples."""
    body = [
        [
            f"{HOSTS[r['solver']]}, {GRID_NAMES[r['grid']] if r['correction'] == 'none' else 'calibrated'}",
            str(r["nfe"]),
            f"{r['fid']:.2f}",
            f"{r['fd_efficientnet']:.2f}",
            f"{1000 * r['kid']:.2f}",
            f"{r['precision']:.3f}",
            f"{r['recall']:.3f}",
        ]
        for r in records
    ]
    return rows(["", "NFE", "FID", "EfficientNet", "KID · 10³", "precision", "recall"], body)


def others_table(records: Sequence[Record]) -> str:
    """Another model, and guidance."""
    body = []
    for r in records:
        title = "Fashion-MNIST, VP" if r["model"] == "fashion" else f"CIFAR-10, guidance {r['guidance']:g}"
        how = "calibrated" if r["correction"] != "none" else f"plain, {r['grid']}"
        body.append([title, HOSTS[r["solver"]], how, str(r["nfe"]), f"{r['fid']:.2f}", f"{r['fd_many_step']:.2f}"])
    return rows(["model", "solver", "", "NFE", "to real images", "to its own many-step samples"], body)


def plot_fid(records: Sequence[Record], limit: float) -> None:
    figure, axes = plt.subplots(figsize=(6.8, 4))
    for solver, colour in (("ddim", "C3"), ("dpmpp-2m", "C0"), ("dpmpp-3m", "C2"), ("ipndm-4", "C4")):
        points = sorted(best_plain(records, solver).items())
        label = f"{HOSTS[solver]}, better plain grid"
        axes.plot(*zip(*points, strict=True), marker="o", ms=4, color=colour, ls="--", lw=1.2, label=label)
    points = sorted(calibrated(records, "dpmpp-2m").items())
    axes.plot(*zip(*points, strict=True), marker="o", color="k", lw=2, label="DPM-Solver++(2M), Stein calibration")
    points = sorted(item for item in calibrated(records, "dpmpp-2m", LATE).items() if item[0] <= 5)
    axes.plot(*zip(*points, strict=True), marker="s", ms=4, color="C1", lw=2, label="the same with a late start")
    axes.axhline(limit, color="0.5", ls=":", label="the model itself: Heun, 35 evaluations")
    axes.set(xlabel="network evaluations per image", ylabel="FID (10,000 samples)", yscale="log")
    axes.set_yticks([10, 15, 20, 30, 50, 70], ["10", "15", "20", "30", "50", "70"])
    axes.set_xticks([3, 4, 5, 6, 8, 10, 15, 20])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(ASSETS / "fid.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def plot_calibration(nfe: int) -> None:
    """Where the evaluations go, and the weights of the brightness channel."""
    solver = SOLVERS["dpmpp-2m"]
    shipped = calibration("cifar10", solver, nfe)
    assert shipped is not None, f"no calibration ships for {nfe} evaluations"
    assert isinstance(shipped.basis, DCT)
    figure, (grids, factors, changes) = plt.subplots(1, 3, figsize=(14, 3.4))
    levels = {
        "EDM": solver.levels(GRIDS["edm-min"], EDM(), nfe),
        "log-SNR": solver.levels(GRIDS["logsnr-min"], EDM(), nfe),
        "Stein": shipped.levels,
    }
    for height, row in enumerate(levels.values()):
        sigmas = [level.sigma for level in row[:-1]]
        grids.plot(sigmas, [height] * len(sigmas), "o-", lw=1)
    grids.set(xscale="log", xlabel="σ of the evaluations", title=f"where {nfe} evaluations go")
    grids.set_yticks(range(len(levels)), list(levels))
    grids.invert_xaxis()
    shape = (shipped.shape[0], shipped.basis.bands // shipped.shape[0])
    for i, (rho, tau) in enumerate(zip(shipped.rho, shipped.tau, strict=True)):
        label = f"σ {shipped.levels[i].sigma:.2g} → {shipped.levels[i + 1].sigma:.2g}"
        if rho:
            factors.plot(torch.tensor(rho).reshape(shape)[0], ".-", lw=1, color=f"C{i}", label=label)
        if tau:
            changes.plot(torch.tensor(tau[0]).reshape(shape)[0], ".-", lw=1, color=f"C{i}", label=label)
    factors.axhline(1.0, color="0.5", lw=0.8)
    factors.set(xlabel="frequency ring (brightness)", title="ρ: weight of the solver's denoised image")
    changes.axhline(0.0, color="0.5", lw=0.8)
    changes.set(xlabel="frequency ring (brightness)", title="τ₁: weight of the latest change of D")
    factors.legend(fontsize=8)
    changes.legend(fontsize=8)
    figure.savefig(ASSETS / "calibration.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def plot_spectra(demo: dict[str, Any]) -> None:
    """Power of the demo's samples at each frequency, and the same over that of the many-step samples."""
    figure, (power, ratio) = plt.subplots(1, 2, figsize=(10, 3.4))
    *rows, fine = [row for row in demo["rows"] if row["method"] != "relaxation"]
    for row in (*rows, fine):
        style = {"color": "k", "ls": ":"} if row is fine else {}
        power.plot(row["spectrum"], lw=1.5, label=f"{row['title']}, {row['nfe']} evaluations", **style)
        ratio.plot([a / b for a, b in zip(row["spectrum"], fine["spectrum"], strict=True)], lw=1.5, **style)
    power.set(yscale="log", xlabel="frequency ring", title="mean power of the samples")
    power.legend(fontsize=8)
    ratio.set(xlabel="frequency ring", title="over that of the many-step samples", ylim=(0, 1.9))
    figure.savefig(ASSETS / "spectra.png", dpi=150, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    ASSETS.mkdir(parents=True, exist_ok=True)
    known = read("cifar10")
    cells = [r for r in known if r["samples"] == 10_000]
    second = read("second_opinion")
    tables: dict[str, Callable[[], str]] = {
        "fid": lambda: hosts_table(cells),
        "headline": lambda: headline_table([r for r in known if r["samples"] == 50_000]),
        "ablation": lambda: ablation_table(cells),
        "second": lambda: second_table(second),
        "others": lambda: others_table([*read("fashion"), *read("guided")]),
    }
    for page in (ROOT / "docs" / "method.md", ROOT / "README.md"):
        for name, make in tables.items():
            fill(page, name, make())
    plot_fid(cells, next(r["fid"] for r in second if r["solver"] == "heun" and r["nfe"] == 35))
    plot_calibration(5)
    plot_spectra(json.loads((RESULTS / "demo.json").read_text()))


if __name__ == "__main__":
    main()
