"""The page: what it shows, as data; the files in `assets` draw it."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any

import steindiff
from steindiff.comparison import REFERENCE, Comparison, Row
from steindiff.report.picture import data_uri

SHOWN = 48
"""At most so many seeds are carried as pictures; the numbers are of all."""

BLUR = (
    "The distance column rewards blur: mean-square error is smallest for the average of all images that fit, and an "
    "average is blurred; so a smooth picture can lie closer to the many-step image than a sharp one that looks better."
)

Series = dict[str, Any]
Chart = dict[str, Any]


def columns(comparison: Comparison) -> list[dict[str, Any]]:
    """The columns of the table: key of a row, title, decimals (None: as it is), and which end is good."""
    frechet = f"Fréchet distance, {comparison.features} to the model's own many-step samples of other seeds"
    return [
        {"key": "title", "title": "method", "digits": None},
        {"key": "nfe", "title": "evaluations", "digits": None},
        {"key": "honest", "title": frechet, "digits": 1},
        {"key": "energy_ratio", "title": "high-frequency energy ratio", "digits": 2},
        {"key": "distance", "title": "distance to many-step image", "digits": 3},
        {"key": "network_calls", "title": "network calls", "digits": None},
        {"key": "backward_passes", "title": "backward passes", "digits": None},
        {"key": "seconds", "title": "seconds", "digits": 1},
    ]


GOODNESS: dict[str, Callable[[Row], float]] = {
    "honest": lambda row: row.honest,
    "spread": lambda row: abs(row.spread - 1.0),
    "energy_ratio": lambda row: abs(row.energy_ratio - 1.0),
    "distance": lambda row: row.distance,
    "psnr": lambda row: -row.psnr,
}
"""Which row is best in a column: the one with the least of this."""


def few_step(comparison: Comparison) -> list[Row]:
    """All rows but the reference."""
    return [row for row in comparison.rows if row.method != REFERENCE]


def best(comparison: Comparison) -> dict[str, list[int]]:
    """For each judged column the best row at each number of evaluations, by index."""
    index = {id(row): i for i, row in enumerate(comparison.rows)}
    rows = few_step(comparison)
    return {
        key: [index[id(min((r for r in rows if r.nfe == nfe), key=badness))] for nfe in nfes(comparison)]
        for key, badness in GOODNESS.items()
    }


def nfes(comparison: Comparison) -> list[int]:
    """The numbers of evaluations compared, in order."""
    return sorted({row.nfe for row in few_step(comparison)})


def series(row: Row, points: Iterable[Sequence[float]], name: str | None = None) -> Series:
    """One line of a chart in its method's colour."""
    return {"name": name or row.title, "style": row.method, "points": [list(map(float, point)) for point in points]}


def by_method(comparison: Comparison, x: Callable[[Row], float], y: Callable[[Row], float]) -> list[Series]:
    """One line for each method, one point for each number of evaluations."""
    lines: dict[str, list[Row]] = {}
    for row in comparison.rows:
        lines.setdefault(row.method, []).append(row)
    return [series(rows[0], sorted((x(row), y(row)) for row in rows)) for rows in lines.values()]


def frames(
    comparison: Comparison, make: Callable[[Row], Iterable[Series]], *, reference: bool
) -> dict[str, list[Series]]:
    """The lines to show at each number of evaluations."""
    return {
        str(nfe): [
            line
            for row in comparison.rows
            if row.nfe == nfe or (reference and row.method == REFERENCE)
            for line in make(row)
        ]
        for nfe in nfes(comparison)
    }


def ratios(row: Row) -> list[float]:
    """σ/α where the steps start; pure noise, where it is infinite, is left out."""
    return [sigma / alpha for sigma, alpha in row.levels[:-1] if alpha > 0]


def stretches(row: Row) -> list[tuple[float, float]]:
    """(σ/α, Lipschitz constant) of the steps, constants below 0.001 drawn there."""
    steps = zip(row.levels, row.lipschitz, strict=False)
    return [(sigma / alpha, max(value, 1e-3)) for (sigma, alpha), value in steps if alpha > 0]


def weight_lines(row: Row, weights: Sequence[Sequence[float]]) -> Iterable[Series]:
    """A calibration's weights of the first channel against frequency, one line for each step that has them."""
    rings = len(row.spectrum)
    steps = [i for i, own in enumerate(weights) if len(own) >= rings]
    for rank, i in enumerate(steps, 1):
        name = f"step {i + 1}: σ {row.levels[i][0]:.3g} → {row.levels[i + 1][0]:.3g}"
        points = [[k, value] for k, value in enumerate(weights[i][:rings])]
        yield {"name": name, "style": round(rank / len(steps), 3), "points": points}


def charts(comparison: Comparison) -> list[Chart]:
    """Everything that is drawn."""
    images = len(comparison.images[0])
    several = nfes(comparison)
    ticks = sorted({row.nfe for row in comparison.rows})
    return [
        {
            "id": "frechet-nfe",
            "title": "Fréchet distance against evaluations",
            "caption": f"Lower is better. {comparison.features.capitalize()}, to the model's own many-step samples.",
            "x": {"label": "network evaluations", "log": True, "ticks": ticks},
            "y": {"label": "Fréchet distance", "log": True},
            "frames": {"*": by_method(comparison, lambda r: r.nfe, lambda r: r.honest)},
        },
        {
            "id": "frechet-time",
            "title": "Fréchet distance against time",
            "caption": "Lower and further left is better. A backward pass costs time but no evaluation.",
            "x": {"label": "milliseconds per image", "log": True},
            "y": {"label": "Fréchet distance", "log": True},
            "frames": {"*": by_method(comparison, lambda r: 1000 * r.seconds / images, lambda r: r.honest)},
        },
        {
            "id": "spectrum",
            "title": "Band spectra",
            "caption": "Mean power at each spatial frequency. Few plain steps lose the fine detail on the right.",
            "x": {"label": "frequency ring, max(k_x, k_y)", "log": False},
            "y": {"label": "mean power", "log": True},
            "frames": frames(comparison, lambda r: [series(r, enumerate(r.spectrum))], reference=True),
        },
        {
            "id": "grids",
            "title": "Where the steps are",
            "caption": "The noise levels σ/α at which steps start, from noise (left) to image.",
            "x": {"label": "σ/α", "log": True, "reverse": True},
            "y": {"label": "", "categories": True},
            "frames": frames(comparison, lambda r: [series(r, ([v, 0] for v in ratios(r)))], reference=True),
        },
        {
            "id": "rho",
            "title": "Calibration: ρ at each step",
            "caption": "The factor each frequency of the denoised image is multiplied by; 1 leaves it alone.",
            "x": {"label": "frequency ring, max(k_x, k_y)", "log": False},
            "y": {"label": "ρ", "log": False, "include": [1]},
            "frames": frames(comparison, lambda r: weight_lines(r, r.rho), reference=False),
        },
        {
            "id": "tau",
            "title": "Calibration: τ at each step",
            "caption": "How much of the latest change of the denoised image is added, beyond the solver’s own.",
            "x": {"label": "frequency ring, max(k_x, k_y)", "log": False},
            "y": {"label": "τ₁", "log": False, "include": [0]},
            "frames": frames(comparison, lambda r: weight_lines(r, r.tau), reference=False),
        },
        {
            "id": "gamma",
            "title": "Relaxation: γ at each step",
            "caption": "The paper's coefficient, kept in (0, 1]. At 1 the step is the plain solver's.",
            "x": {"label": "step", "log": False, "ticks": list(range(1, max(several) + 1))},
            "y": {"label": "γ", "log": False, "include": [0, 1]},
            "frames": frames(comparison, lambda r: [series(r, enumerate(r.gamma, 1))], reference=False),
        },
        {
            "id": "lipschitz",
            "title": "Local Lipschitz constants",
            "caption": "How much a step stretches a small error, at least, where it starts. Above 1 it expands.",
            "x": {"label": "σ/α", "log": True, "reverse": True},
            "y": {"label": "Lipschitz constant of the step", "log": True, "include": [1]},
            "frames": frames(comparison, lambda r: [series(r, stretches(r))], reference=False),
        },
    ]


def tiles(comparison: Comparison) -> dict[str, list[dict[str, str]]]:
    """The headline figures at each number of evaluations: the better plain grid against calibrated."""
    out = {}
    for nfe in nfes(comparison):
        rows = {row.method: row for row in few_step(comparison) if row.nfe == nfe}
        plain = [row for name, row in rows.items() if name in ("edm", "logsnr")]
        ours = rows.get("calibrated")
        if not plain or ours is None:
            continue
        base = min(plain, key=lambda row: row.honest)
        out[str(nfe)] = [
            {
                "before": f"{base.honest:.1f}",
                "after": f"{ours.honest:.1f}",
                "label": f"Fréchet distance, {base.title} → calibrated",
            },
            {
                "before": f"{base.energy_ratio:.0%}",
                "after": f"{ours.energy_ratio:.0%}",
                "label": "of the fine detail’s energy (100% is right)",
            },
            {
                "before": "",
                "after": f"{ours.network_calls - base.network_calls:+d}".replace("+0", "0"),
                "label": f"extra network calls, {ours.backward_passes} backward passes",
            },
        ]
    return out


def content(comparison: Comparison) -> dict[str, Any]:
    """All the page needs."""
    present = {row.method: row for row in comparison.rows}
    several = nfes(comparison)
    plain = next((name for name in ("edm", "logsnr") if name in present), next(iter(present)))
    ours = "calibrated" if "calibrated" in present else REFERENCE
    seeds = [int(seed) for seed in comparison.seeds][:SHOWN]
    return {
        "version": steindiff.__version__,
        "lead": (
            f"{len(comparison.images[0])} seeds, each sampled by every method from the same noise. "
            "Pictures are compared seed by seed, numbers over all of them."
        ),
        "blur": BLUR,
        "reference": REFERENCE,
        "methods": [{"key": row.method, "title": row.title} for row in present.values()],
        "left": plain,
        "right": ours,
        "nfes": several,
        "start": several.index(5) if 5 in several else 0,
        "seeds": seeds,
        "columns": columns(comparison),
        "rows": [
            {"index": i, "method": row.method, **{c["key"]: getattr(row, c["key"]) for c in columns(comparison)}}
            for i, row in enumerate(comparison.rows)
        ],
        "best": best(comparison),
        "tiles": tiles(comparison),
        "pictures": [[data_uri(x) for x in images[:SHOWN]] for images in comparison.images],
        "charts": charts(comparison),
        "settings": [[str(name), str(value)] for name, value in comparison.settings.items()],
    }


def page(comparison: Comparison, title: str | None = None) -> str:
    """The HTML document: styles, script, pictures and numbers in one file that requests nothing."""
    assets = resources.files(__package__) / "assets"
    several = ", ".join(map(str, nfes(comparison)))
    title = title or f"{comparison.model}, {comparison.solver}, {several} evaluations: the same seeds, side by side"
    data = json.dumps(content(comparison), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts = {
        "@title@": html.escape(title),
        "@style@": (assets / "report.css").read_text(encoding="utf-8"),
        "@script@": (assets / "report.js").read_text(encoding="utf-8"),
        "@data@": data.replace("<", "\\u003c"),
    }
    document = (assets / "report.html").read_text(encoding="utf-8")
    for mark, text in parts.items():
        document = document.replace(mark, text)
    return document
