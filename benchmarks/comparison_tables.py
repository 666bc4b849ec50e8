"""The tables of `docs/comparison.md`, one of which README has too, from records alone.

    python benchmarks/comparison_tables.py

Records are those of `comparison.py` and, where they lie beside them, of `third_party.py` and `remainder.py`. Writes
between the marks `table:…` of the pages. Records judged by random features alone (`--quick`) are refused: they are for
dry runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from comparison import BUDGETS, METHODS, REPEATED, REPEATED_FEW, TRIED
from pages import TITLES, fill, rows
from third_party import PLAIN

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "comparison.json"
PAGES = [ROOT / "README.md", ROOT / "docs" / "comparison.md", ROOT / "docs" / "your-network.md"]
SOLVERS = ("ddim", "dpmpp-2m", "dpmpp-3m", "unipc-bh1-3", "ipndm", "v3")
ROWS: dict[str, tuple[str, ...]] = {
    "plain, better grid": ("edm", "logsnr"),
    "epsilon scaling": ("epsilon-scaling",),
    "AFS": ("afs",),
    "IIA, better grid": ("iia-edm", "iia-logsnr"),
    "GITS": ("gits",),
    "GITS, one step more, + AFS": ("gits-longer-afs",),
    "GITS + AFS": ("gits-afs",),
    "DPM-Solver-v3, better order": ("dpm-v3", "dpm-v3-pseudo"),
    "learned (training)": ("learned",),
    "**calibrated, no search**": ("no search",),
    "**calibrated, 64 seeds**": ("calibrated-64",),
    "**calibrated**": ("calibrated",),
    "**calibrated for few, 64 seeds**": ("calibrated-few-64",),
    "**calibrated for few**": ("calibrated-few",),
}
"""Rows of a solver: of several methods, or orders of iPNDM, each cell shows the least."""
RIVALS = {method for title, methods in ROWS.items() if "calibrated" not in title for method in methods}
"""Every method that is not ours."""
OTHER_MEASURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "own": ("own", "{:.2f}".format),
    "fid": ("FID", "{:.2f}".format),
    "own_second": ("own, 2nd", "{:.2f}".format),
    "precision": ("precision", "{:.3f}".format),
    "recall": ("recall", "{:.3f}".format),
    "psnr": ("PSNR", "{:.1f}".format),
    "lpips": ("LPIPS", "{:.4f}".format),
    "spread": ("spread", "{:.3f}".format),
}

Record = dict[str, Any]


def family(record: Record) -> str:
    """Whose row a record is in: iPNDM's orders share one, DPM-Solver-v3 has its own."""
    if record["method"].startswith("dpm-v3"):
        return "v3"
    return "ipndm" if record["solver"].startswith("ipndm") else str(record["solver"])


def best(
    records: Sequence[Record], solver: str, methods: Sequence[str], nfe: int, measure: str = "own"
) -> Record | None:
    """The record with the least value of a measure, of those that have it."""
    found = [r for r in records if family(r) == solver and r["method"] in methods and r["nfe"] == nfe]
    return min((r for r in found if r.get(measure) is not None), key=lambda r: r[measure], default=None)


def teacher(records: Sequence[Record]) -> Record:
    """The row of many steps."""
    found = [r for r in records if r["method"] == "teacher"]
    if len(found) != 1:
        raise SystemExit(f"records: need one of the method 'teacher', got {len(found)}; run it first")
    return found[0]


def by_budget(records: Sequence[Record], measure: str) -> str:
    """Solver × method against budgets; the least without training is bold, per column, as printed."""
    picked = {
        (solver, title): [best(records, solver, methods, nfe, measure) for nfe in BUDGETS]
        for solver in SOLVERS
        for title, methods in ROWS.items()
    }
    picked = {key: cells for key, cells in picked.items() if any(cells)}
    least = [
        min((round(c[measure], 2) for c in column if c is not None and not c["training"]), default=None)
        for column in zip(*picked.values(), strict=True)
    ]
    body, before = [], ""
    for (solver, title), cells in picked.items():
        shown = ["–" if c is None else f"{c[measure]:.2f}" for c in cells]
        shown = [
            f"**{text}**" if c is not None and round(c[measure], 2) == low and not c["training"] else text
            for text, c, low in zip(shown, cells, least, strict=True)
        ]
        body.append([TITLES[solver] if solver != before else "", title, *shown])
        before = solver
    many = teacher(records)
    body.append(
        [
            TITLES[many["solver"]],
            f"many steps ({many['network_calls']})",
            f"{many[measure]:.2f}",
            *[""] * (len(BUDGETS) - 1),
        ]
    )
    return rows(["solver", "method", *(f"{nfe} NFE" for nfe in BUDGETS)], body)


def change(value: float, before: float) -> str:
    """In per cent."""
    return f"{round(100 * (value / before - 1), 1) + 0.0:+.1f} %"  # no −0.0


def late(records: Sequence[Record]) -> str:
    """Larger budgets, where plain solvers are near the model's own limit: the better grid by a measure → calibrated.

    By two yardsticks, the many-step samples and, where measured, samples in 60 steps.
    """
    found = [r for r in records if r["method"] == "calibrated-64" and r["nfe"] > max(BUDGETS)]
    body = []
    for record in sorted(found, key=lambda r: (r["nfe"], list(TITLES).index(r["solver"]))):
        same = {r["method"]: r for r in records if (r["solver"], r["nfe"]) == (record["solver"], record["nfe"])}
        body.append([TITLES[record["solver"]], str(record["nfe"])])
        for key in ("own", "own_limit", "fid"):
            known = [r.get(key) for r in (same["logsnr"], same["edm"], record)]
            if None in known:
                body[-1] += ["–", "–"]
                continue
            least = min(known[:2])
            body[-1] += [f"{least:.2f} → {known[2]:.2f}", change(known[2], least)]
    header = ["solver", "NFE", "own", "change", "own, to 60 steps", "change", "FID", "change"]
    return rows(header, body)


def others(records: Sequence[Record], nfe: int = 5) -> str:
    """All measures at one budget: of every row, the solver with the least own distance, the first of equal ones."""
    shown: dict[str, Record] = {}
    for title, methods in ROWS.items():
        found = [r for r in (best(records, solver, methods, nfe) for solver in SOLVERS) if r is not None]
        if found:
            shown[title] = min(found, key=lambda r: round(r["own"], 2))
    shown["many steps"] = teacher(records)
    measures = [name for name in OTHER_MEASURES if any(r.get(name) is not None for r in shown.values())]
    body = []
    for title, record in shown.items():
        cells = ["–" if record.get(name) is None else OTHER_MEASURES[name][1](record[name]) for name in measures]
        body.append([title, record["solver"] if family(record) != "v3" else "its own", *cells])
    return rows(["method", "solver", *(OTHER_MEASURES[name][0] for name in measures)], body)


OURS = {"**calibrated, 64 seeds**": "calibrated-64", "**calibrated for few, 64 seeds**": "calibrated-few-64"}
"""What is compared with the model's own many-step samples."""


def relative(records: Sequence[Record], many: Sequence[Record]) -> str:
    """Over the model's own many-step samples: FID, also of `many` samples, and own distance; the nearest rival beside.

    Calibrated by the default recipe and by that for few calls, and the least of every other method without training.
    """

    def share(found: Sequence[Record], measure: str, nfe: int, method: str | None) -> str:
        there = [
            r[measure]
            for r in found
            if r["nfe"] == nfe
            and not r["training"]
            and (r["method"] in RIVALS if method is None else r["method"] == method and r["solver"] == "dpmpp-2m")
        ]
        return f"{min(there) / teacher(found)[measure]:.2f}" if there else "–"

    shown = [("FID", records, "fid"), ("FID, 50,000 samples", many, "fid"), ("own", records, "own")]
    body = [
        [title, name, *cells]
        for title, found, measure in shown
        for name, method in (*OURS.items(), ("nearest rival", None))
        if set(cells := [share(found, measure, nfe, method) for nfe in BUDGETS]) != {"–"}
    ]
    return rows(["over its own", "method", *(f"{nfe} NFE" for nfe in BUDGETS)], body)


def repeated(records: Sequence[Record]) -> str:
    """How much calibrations from 64 other seeds differ: FID and own distance, from the least to the greatest."""
    sets = {
        "calibrated": ("calibrated-64", *(name for name, (seeds, _) in REPEATED.items() if seeds == 64)),
        "calibrated for few": ("calibrated-few-64", *REPEATED_FEW),
    }
    body = []
    for title, methods in sets.items():
        for nfe in (3, 4, 5):
            found = [r for r in records if r["method"] in methods and r["nfe"] == nfe and r["solver"] == "dpmpp-2m"]
            if not found:
                continue
            spans = (sorted(r[key] for r in found) for key in ("fid", "own"))
            shown = (f"{v[0]:.2f} to {v[-1]:.2f}" if len(v) > 1 else f"{v[0]:.2f}" for v in spans)
            body.append([title, str(nfe), str(len(found)), *shown])
    return rows(["64 seeds", "NFE", "calibrations", "FID", "own"], body)


def costs(records: Sequence[Record], nfe: int = 5) -> str:
    """What every method needs before it can sample, and what a sample costs."""
    body = []
    for name, method in METHODS.items():
        if name in TRIED:
            continue
        found = [r for r in records if r["method"] == name and (r["nfe"] == nfe or name in ("teacher", "restart"))]
        # A time counts only where nothing else ran on the device.
        found.sort(key=lambda r: (bool(r["preparation"]["evaluations"]) and not r["preparation"]["alone"], r["nfe"]))
        for r in found[:1] if name != "restart" else found:
            p = r["preparation"]
            memory = "–" if p["memory_mb"] is None or not p["evaluations"] else f"{p['memory_mb']:,.0f} MB"
            if sampling := r["chosen"].get("sampling_memory_mb"):
                memory += f" ({p['memory_mb'] / sampling:.2f} ×)"
            prepared = bool(p["evaluations"])
            body.append(
                [
                    method.title,
                    "yes" if r["training"] else "no",
                    "yes" if r["data"] else "no",
                    f"{p['seeds']} × {p['teacher_nfe']}" if prepared else "–",
                    f"{p['evaluations']:,}" if prepared else "–",
                    f"{p['backward_passes']:,}" if p["backward_passes"] else "–",
                    f"{p['seconds']:.1f} s" if prepared and p["alone"] else "–",
                    memory,
                    f"{r['network_calls']} of {r['nfe_counted']}",
                    f"{r['own']:.2f}",
                ]
            )
    return rows(["method", "training", "data", "teacher", "evals", "backward", "time", "memory", "calls", "own"], body)


FIELDS = {
    "cosmology": "21cmpsdenoiser",
    "electricity": "enerdatasynth",
    "superresolution": "super-resolution",
    "signals": "signals, 1-D",
}


def fields(records: Sequence[Record]) -> str:
    """Networks whose samples are not pictures of things: the plain solver on its best grid → calibrated."""
    body, named = [], ""
    for model, nfe in product(FIELDS, BUDGETS):
        same = {r["method"]: r for r in records if (r["model"], r["nfe"], r["solver"]) == (model, nfe, "dpmpp-2m")}
        if not same:
            continue
        best = min((same[grid] for grid in PLAIN), key=lambda r: r["honest"])
        body.append(["" if model == named else FIELDS[model], str(nfe)])
        named = model
        for key in ("honest", "spectrum", "spread", "rms"):
            scale = best["floor"] if key == "honest" else 1.0
            pair = (r[key] / scale for r in (best, same["calibrated"]))
            body[-1].append("\u00a0→\u00a0".join(f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in pair))
    return rows(["network", "NFE", "own / floor", "spectrum", "spread", "rms"], body)


def bands(records: Sequence[Record]) -> str:
    """What bands are worth on the 1-D model: its own distance by method."""
    shown = {
        "logsnr": "plain, log-SNR grid",
        "edm": "plain, EDM grid",
        "one-band": "calibrated, one band",
        "calibrated": "calibrated, bands",
    }
    here = [r for r in records if (r["model"], r["solver"]) == ("signals", "dpmpp-2m")]
    body = []
    for nfe in BUDGETS:
        own = {r["method"]: r["honest"] for r in here if r["nfe"] == nfe}
        body.append([str(nfe), *(f"{own[method]:,.1f}" if method in own else "–" for method in shown)])
    return rows(["evaluations", *shown.values()], body)


REMAINDER = {
    "calibrated": "calibrated",
    "all differences": "all differences",
    "searched by features": "searched by the features themselves",
    "convolutions": "+ learned convolutions",
}


def remainder(records: Sequence[Record]) -> str:
    """What few calls lack, and what could be gained: features, shift and PSNR by method and budget."""
    budgets = sorted({r["nfe"] for r in records})
    body = []
    for method, title in REMAINDER.items():
        found = {r["nfe"]: r for r in records if r["method"] == method}
        cells = [f"{found[n]['features']:.2f}, {found[n]['shift']:.2f}, {found[n]['psnr']:.1f}" for n in budgets]
        body.append([title, *cells])
    return rows(["distance, shift, PSNR", *(f"{nfe} NFE" for nfe in budgets)], body)


def read(path: Path) -> list[Record]:
    """The records of a file; none where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def tables(path: Path = RECORDS) -> dict[str, str]:
    """Every table of the page, by name."""
    records: list[Record] = json.loads(path.read_text(encoding="utf-8"))
    if any(record["features"][0] == "random" for record in records):
        raise SystemExit(f"{path}: holds records of a dry run (--quick); measure with Inception features")
    larger = read(path.with_name(f"{path.stem}-50k.json"))
    made = {}
    for model in dict.fromkeys(record["model"] for record in records):
        here = [record for record in records if record["model"] == model]
        samples = max(record["samples"] for record in here)
        here = [record for record in here if record["samples"] == samples]
        made[f"comparison-{model}-own"] = by_budget(here, "own")
        made[f"comparison-{model}-fid"] = (
            by_budget(here, "fid") if teacher(here)["fid"] is not None else "Not measured."
        )
        if any(record["nfe"] > max(BUDGETS) and record["method"] == "calibrated-64" for record in here):
            made[f"comparison-{model}-late"] = late(here)
        made[f"comparison-{model}-others"] = others(here)
        made[f"comparison-{model}-costs"] = costs(here)
        many = [record for record in larger if record["model"] == model]
        if any(record["method"] == "calibrated-64" for record in many):
            made[f"comparison-{model}-relative"] = relative(here, many)
        if any(record["method"] in REPEATED_FEW for record in here):
            made[f"comparison-{model}-repeated"] = repeated(here)
    if other := read(path.with_name("third_party.json")):
        made |= {"fields": fields(other), "bands": bands(other)}
    if lacking := read(path.with_name("remainder.json")):
        made["remainder"] = remainder(lacking)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    args = parser.parse_args()
    for name, text in tables(args.records).items():
        for page in args.pages:
            fill(page, name, text)


if __name__ == "__main__":
    main()
