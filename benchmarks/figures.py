"""The tables and the curve of README, home page and method page, from the records of `benchmarks/comparison.py`.

python benchmarks/figures.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from comparison import ABLATIONS, BUDGETS, METHODS, REPEATED
from pages import TITLES, fill, rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "method.md")
SOLVER = "dpmpp-2m"
RIVAL = "gits-afs"
"""A rival that needs no training and was measured at every budget."""


def records(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


MODEL = "cifar10"
SMALL, LARGE = ([r for r in records(f"comparison{size}.json") if r["model"] == MODEL] for size in ("", "-50k"))
BEFORE = records("cifar10.json")


def cell(found: list[dict[str, Any]], method: str, nfe: int, solver: str = SOLVER) -> dict[str, Any] | None:
    """The record of a solver by a method at a budget."""
    same = [r for r in found if (r["method"], r["nfe"], r["solver"]) == (method, nfe, solver)]
    return same[0] if same else None


def number(record: dict[str, Any] | None, key: str, digits: int = 2) -> str:
    return "–" if record is None else f"{record[key]:.{digits}f}"


def teacher(found: list[dict[str, Any]]) -> dict[str, Any]:
    return next(r for r in found if r["method"] == "teacher")


def plain(nfe: int, key: str) -> dict[str, Any] | None:
    """The better of the two grids by a measure."""
    both = [r for r in (cell(SMALL, "logsnr", nfe), cell(SMALL, "edm", nfe)) if r is not None]
    return min(both, key=lambda r: r[key]) if both else None


def headline() -> str:
    """Plain, a rival and ours; the least of every column is bold, as printed."""
    body = []
    for key, title in (("own", "own"), ("fid", "FID")):
        shown = {
            "plain, better grid": [plain(nfe, key) for nfe in BUDGETS],
            f"{METHODS[RIVAL].title}, iPNDM-4": [cell(SMALL, RIVAL, nfe, "ipndm-4") for nfe in BUDGETS],
            "**calibrated**": [cell(SMALL, "calibrated", nfe) for nfe in BUDGETS],
        }
        texts = {name: [number(record, key) for record in found] for name, found in shown.items()}
        least = [min(column, key=float) for column in zip(*texts.values(), strict=True)]
        for name, row in texts.items():
            cells = (f"**{text}**" if text == low else text for text, low in zip(row, least, strict=True))
            body.append([f"{name}: {title}", *cells])
    many = teacher(SMALL)
    table = rows(["DPM-Solver++(2M) unless named", *(f"{nfe} NFE" for nfe in BUDGETS)], body)
    own, fid = many["own"], many["fid"]
    return f"{table}\n\nThe model itself (Heun, 35 NFE): own {own:.2f}, which is the floor, and FID {fid:.2f}."


SOLVERS = ("dpmpp-2m", "dpmpp-3m", "unipc-bh1-3", "ddim", "ipndm-4", "heun")


def solvers() -> str:
    """FID of every solver, plain and calibrated, and own over the floor."""
    floor = teacher(SMALL)["own"]
    body = []
    for solver in SOLVERS:
        ours = {r["nfe"]: r for r in SMALL if r["method"] == "calibrated" and r["solver"] == solver}
        plain_fids = {
            nfe: [
                r["fid"]
                for r in (*SMALL, *BEFORE)
                if (r["solver"], r["nfe"], r["samples"]) == (solver, nfe, 10_000)
                and (r.get("method") in ("edm", "logsnr") or r.get("correction") == "none")
                and r.get("grid", "edm-min") in ("edm-min", "logsnr-min")
                and not r.get("options")
            ]
            for nfe in BUDGETS
        }
        cells = [f"{min(plain_fids[nfe]):.2f}" if plain_fids[nfe] else "–" for nfe in BUDGETS]
        body.append([TITLES[solver], "plain, better grid: FID", *cells])
        body.append(["", "calibrated: FID", *(number(ours.get(nfe), "fid") for nfe in BUDGETS)])
        ratios = [f"{ours[nfe]['own'] / floor:.2f}" if nfe in ours else "–" for nfe in BUDGETS]
        body.append(["", "calibrated: own / floor", *ratios])
    return rows(["solver", "10,000 samples", *(f"{nfe} NFE" for nfe in BUDGETS)], body)


def fashion() -> str:
    """The VP network: own distances."""
    found = [r for r in records("variants.json") if r["model"] == "fashion"]
    body = [
        [METHODS[r["method"]].title, str(r["nfe"]), f"{r['own']:.2f}", f"{r['own_second']:.2f}", f"{r['spread']:.3f}"]
        for r in found
    ]
    return rows(["Fashion-MNIST, 10,000 samples", "NFE", "own", "own, second features", "spread"], body)


def fifty_thousand() -> str:
    found = {r["nfe"]: r for r in LARGE if r["method"] != "teacher"}
    body = [
        [f"calibrated: {title}", *(number(found[n], key) for n in sorted(found))]
        for key, title in (("own", "own"), ("fid", "FID"))
    ]
    many = teacher(LARGE)
    table = rows(["DPM-Solver++(2M), 50,000 samples", *(f"{nfe} NFE" for nfe in sorted(found))], body)
    return f"{table}\n\nThe model itself: own {many['own']:.2f}, FID {many['fid']:.2f}."


def ablation() -> str:
    """The default and its changes, one at a time."""
    body = [
        [
            "the default" if name == "calibrated" else name,
            *(
                number(cell(SMALL, name, 5), key, digits)
                for key, digits in (("own", 2), ("fid", 2), ("psnr", 1), ("spread", 3))
            ),
        ]
        for name in ("calibrated", *ABLATIONS)
        if cell(SMALL, name, 5)
    ]
    return rows(["5 NFE", "own", "FID", "PSNR", "spread"], body)


VARIANTS = {
    "cifar10-guidance-2": "guidance 2",
    "cifar10-guidance-4": "guidance 4",
    "cifar10-bf16": "bfloat16",
    "cifar10-int8": "int8",
    "cifar10-inference": "inference mode",
}


def variants() -> str:
    """The CIFAR-10 network under guidance and in other precisions: own distances over their floors, and spread."""
    found = [r for r in records("variants.json") if r["model"] in VARIANTS]
    body = []
    for model, nfe in dict.fromkeys((r["model"], r["nfe"]) for r in found if r["method"] != "teacher"):
        same = {r["method"]: r for r in found if r["model"] == model and r["nfe"] in (nfe, 35)}
        floor = same["teacher"]["own"]
        best = min((same[grid] for grid in ("edm", "logsnr")), key=lambda r: r["own"])
        line = [f"{VARIANTS[model]}, {same['teacher']['samples']:,} samples", str(nfe), f"{floor:.2f}"]
        line += [f"{r['own'] / floor:.2f} ({r['spread']:.2f})" for r in (best, same["calibrated"], same["transferred"])]
        body.append(line)
    return rows(["network", "NFE", "floor", "plain, better grid", "calibrated on it", "calibrated without"], body)


def fine() -> str:
    """How far fine trajectories and plain solvers end from the limit."""
    names = {"fine trajectory": "the fine trajectory", "many steps": "the many-step samples (Heun, EDM grid)", **TITLES}
    body = [
        [names[r["solver"]], str(r["nfe"]), f"{r['rms']:.4f}", f"{r['mismatch']:.5f}"]
        for r in records("fine_trajectory.json")
    ]
    return rows(["run", "evaluations", "rms to the limit", "J"], body)


def repeated() -> str:
    body = []
    for count in sorted({count for count, _ in REPEATED.values()}):
        found = [cell(SMALL, name, 5) for name, (seeds, _) in REPEATED.items() if seeds == count]
        kept = [r for r in found if r is not None]
        line = [f"{count} seeds, {len(kept)} calibrations"]
        for key in ("own", "fid", "spread"):
            values = [r[key] for r in kept]
            line.append(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}")
        body.append(line)
    return rows(["5 NFE", "own", "FID", "spread"], body)


def curve(path: Path) -> None:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for axes, key, title in zip(figure.subplots(1, 2), ("own", "fid"), ("own distance", "FID"), strict=True):
        for label, values in (
            ("plain, better grid", [plain(nfe, key) for nfe in BUDGETS]),
            ("calibrated", [cell(SMALL, "calibrated", nfe) for nfe in BUDGETS]),
        ):
            axes.plot(BUDGETS, [r[key] for r in values if r], marker="o", label=label)
        axes.axhline(teacher(SMALL)[key], color="grey", linestyle=":", label="the model itself, 35 evaluations")
        axes.set(xlabel="network evaluations", title=title, yscale="log", xticks=BUDGETS)
        axes.set_xticks(BUDGETS, [str(nfe) for nfe in BUDGETS])
        axes.minorticks_off()
        axes.set_yticks([5, 10, 20, 40, 80], ["5", "10", "20", "40", "80"])
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def hero() -> str:
    """The first line of the documentation."""
    fids = {r["method"]: r["fid"] for r in SMALL if (r["solver"], r["nfe"]) == ("dpmpp-2m", 5)}
    change = f"FID {fids['logsnr']:.1f} → {fids['calibrated']:.1f} with five network evaluations"
    return f'<p class="number">{change}; the model itself has {teacher(SMALL)["fid"]:.1f}</p>'


def tables() -> dict[str, str]:
    """Every table, by name; pages take those they have marks for."""
    return {
        "hero": hero(),
        "headline": headline(),
        "solvers": solvers(),
        "fashion": fashion(),
        "variants": variants(),
        "fine": fine(),
        "large": fifty_thousand(),
        "ablation": ablation(),
        "repeated": repeated(),
    }


def main() -> None:
    for name, text in tables().items():
        for page in PAGES:
            fill(page, name, text)
    curve(ROOT / "docs" / "assets" / "fid.png")


if __name__ == "__main__":
    main()
