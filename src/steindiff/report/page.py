"""The report of a comparison: headline, table and charts, from its numbers."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from steindiff._files import write_bytes, write_text
from steindiff.comparison import REFERENCE, Comparison, Row
from steindiff.report.document import Chart, Column, Entry, Report, asset, contact_sheet, render

BLUR = (
    "PSNR to the many-step image rewards blur. The average of all plausible images has the smallest "
    "mean-square error, and an average is blurred: a smooth picture can score better than a sharp one."
)
COLUMNS = (
    "Own samples are the model's many-step samples of other seeds. High-frequency energy, and spread within a "
    "condition, are over those of the many-step images: 1 is right. PSNR and LPIPS compare with the same seed's."
)
NO_LPIPS = (
    "LPIPS was not measured: images are small, or its weights are not here; "
    "steindiff evaluate SET --metrics own downloads them once."
)
CLOSED = 0.9
"""A few-step run "looks like" the many-step one if it closes this share of the plain run's gap to it."""

NOISE = 0.1
"""A plain run whose distance exceeds the floor by less than this share cannot be told from the many-step one."""

Series = dict[str, Any]

DRAWN = {"distance", "levels", "told", "rho", "tau", "gamma", "spectrum", "lipschitz"}
"""Fields of a row that charts show, and the distance, which PSNR tells in other units."""


def plain(row: Row) -> bool:
    """Whether a row is a solver without correction."""
    return not (row.rho or row.gamma)


def kind(comparison: Comparison) -> str:
    """The features by name, so that nobody takes a distance on others for FID."""
    return comparison.features if "FID" in comparison.features else f"{comparison.features}, not FID"


def columns(comparison: Comparison) -> list[Column]:
    """The columns of the table; fields of a row that this list does not know are appended by name."""
    label = "" if "FID" in comparison.features else " (not FID)"
    known = [
        Column("title", "method"),
        Column("nfe", "evaluations"),
        Column("honest", f"Fréchet distance, own samples{label}", 1, float),
        Column("frechet", f"Fréchet distance, real images{label}", 1, float),
        Column("energy_ratio", "high-frequency energy", 2, lambda value: abs(value - 1)),
        Column("spread", "spread", 2, lambda value: abs(value - 1)),
        Column("psnr", "PSNR, dB", 1, lambda value: -value),
        Column("lpips", "LPIPS", 3, float),
        Column("network_calls", "network calls"),
        Column("backward_passes", "backward passes"),
        Column("seconds", "seconds", 1),
    ]
    fields = [field.name for field in dataclasses.fields(comparison.rows[0]) if field.name not in DRAWN | {"method"}]
    fields = [name for name in fields if not name.endswith("_interval")]
    known += [Column(name, name.replace("_", " "), 3) for name in fields if name not in {c.key for c in known}]
    return [c for c in known if any(getattr(row, c.key) is not None for row in comparison.rows)]


def numbers(row: Row, shown: Iterable[Column]) -> dict[str, Any]:
    """What the table shows of a row: the columns' values and their intervals."""
    keys = [name for column in shown for name in (column.key, f"{column.key}_interval")]
    found = {key: getattr(row, key, None) for key in keys}
    return {key: value for key, value in found.items() if value is not None and value != math.inf}


def few_step(comparison: Comparison, nfe: int | None = None) -> list[Row]:
    """All rows but the reference, or those at one number of evaluations."""
    return [row for row in comparison.rows if row.method != REFERENCE and nfe in (None, row.nfe)]


def contenders(comparison: Comparison, nfe: int) -> tuple[Row | None, Row | None]:
    """The plain row nearest to the model's own samples, and the calibrated row, or else another corrected one."""
    rows = sorted(few_step(comparison, nfe), key=lambda row: (not row.rho, row.honest))
    return next((row for row in rows if plain(row)), None), next((row for row in rows if not plain(row)), None)


def nfes(comparison: Comparison) -> list[int]:
    """The numbers of evaluations compared, in order."""
    return sorted({row.nfe for row in few_step(comparison)})


def series(row: Row, points: Iterable[Sequence[float]], name: str | None = None) -> Series:
    """One line of a chart in its method's colour; a point is x, y and, where known, the ends of y's interval."""
    return {"name": name or row.title, "style": row.method, "points": [list(map(float, point)) for point in points]}


def by_method(comparison: Comparison, x: Callable[[Row], float]) -> list[Series]:
    """Fréchet distance against x: one line for each method, one point for each number of evaluations."""
    lines: dict[str, list[Row]] = {}
    for row in comparison.rows:
        lines.setdefault(row.method, []).append(row)
    points = {key: sorted((x(row), row.honest, *row.honest_interval) for row in rows) for key, rows in lines.items()}
    return [series(rows[0], points[key]) for key, rows in lines.items()]


def at_levels(row: Row, values: Sequence[float]) -> Series:
    """Values against σ/α where the steps start; pure noise, where it is infinite, is left out."""
    return series(row, ((s / a, value) for (s, a), value in zip(row.levels, values, strict=False) if a > 0))


def weight_lines(row: Row, weights: Sequence[Sequence[float]]) -> Iterable[Series]:
    """A calibration's weights of the first channel against frequency, one line for each step that has them."""
    rings = len(row.spectrum)
    steps = [i for i, own in enumerate(weights) if len(own) >= rings]
    for rank, i in enumerate(steps):
        start, end = (f"{sigma / alpha:.3g}" if alpha > 0 else "∞" for sigma, alpha in row.levels[i : i + 2])
        points = [[k, value] for k, value in enumerate(weights[i][:rings])]
        yield {"name": f"step {i + 1}: σ/α {start} → {end}", "style": [rank, len(steps)], "points": points}


def charts(comparison: Comparison) -> list[Chart]:
    """Everything that is drawn: words and axes from `assets/charts.json`, lines by number of evaluations from here."""
    images = len(comparison.images[0])
    floor = f"Two sets of those are {comparison.floor:.1f} apart."
    kept = f"Lower is better: {kind(comparison)}, to the model's own many-step samples of other seeds. {floor}"
    ticks = {
        "frechet-nfe": sorted({row.nfe for row in comparison.rows}),
        "gamma": list(range(1, max(nfes(comparison)) + 1)),
    }

    def each(make: Callable[[Row], Iterable[Series]], *, reference: bool = False) -> dict[str, list[Series]]:
        made: dict[str, list[Series]] = {str(nfe): [] for nfe in nfes(comparison)}
        for row in comparison.rows:
            everywhere = reference and row.method == REFERENCE
            for nfe in made if everywhere else made.keys() & {str(row.nfe)}:
                made[nfe] += make(row)
        return made

    frames = {
        "frechet-nfe": {"*": by_method(comparison, lambda r: r.nfe)},
        "frechet-time": {"*": by_method(comparison, lambda r: 1000 * r.seconds / images)},
        "spectrum": each(lambda r: [series(r, enumerate(r.spectrum))], reference=True),
        "grids": each(lambda r: [at_levels(r, [0.0] * (len(r.levels) - 1))], reference=True),
        "rho": each(lambda r: weight_lines(r, r.rho)),
        "tau": each(lambda r: weight_lines(r, r.tau)),
        "gamma": each(lambda r: [series(r, enumerate(r.gamma, 1))]),
        "lipschitz": each(lambda r: [at_levels(r, [max(value, 1e-3) for value in r.lipschitz])]),
    }
    drawn: list[Chart] = json.loads(asset("charts.json"))
    for chart in drawn:
        name = chart["id"]
        chart["frames"], chart["caption"] = frames[name], chart["caption"] or kept
        chart["x"] |= {"ticks": ticks[name]} if name in ticks else {}
    return drawn


def told_apart(comparison: Comparison, base: Row) -> bool:
    """Whether there are images enough to tell a plain run from the many-step one."""
    return base.honest >= (1 + NOISE) * comparison.floor


def tiles(comparison: Comparison, nfe: int) -> list[dict[str, str]]:
    """The figures below the headline: the best plain row against the best corrected one."""
    base, ours = contenders(comparison, nfe)
    if base is None or ours is None:
        return []
    pair = f"{base.title} → {ours.title}"
    if told_apart(comparison, base):
        label = f"Fréchet distance ({kind(comparison)}), {pair}; floor {comparison.floor:.1f}"
        near = f"{base.honest:.1f}", f"{ours.honest:.1f}", label
    else:  # a distance that cannot rank them would only mislead
        near = f"{base.psnr:.1f}", f"{ours.psnr:.1f}", f"dB PSNR to the many-step image of the same seed, {pair}"
    energy = "of the fine detail’s energy (100% is right)"
    extra = f"{ours.network_calls - base.network_calls:+d}".replace("+0", "0")
    figures = [
        near,
        (f"{base.energy_ratio:.0%}", f"{ours.energy_ratio:.0%}", energy),
        ("", extra, f"extra network calls, {ours.backward_passes} backward passes"),
    ]
    return [{"before": before, "after": after, "label": label} for before, after, label in figures]


def headline(comparison: Comparison, nfe: int) -> str:
    """What the numbers say in one sentence."""
    many = next(row for row in comparison.rows if row.method == REFERENCE)
    base, ours = contenders(comparison, nfe)
    if base is None or ours is None:
        return f"{nfe} evaluations beside {many.nfe}: drag the divider"
    if not told_apart(comparison, base):
        return f"{len(comparison.seeds)} images cannot tell {nfe} evaluations from {many.nfe}: drag the divider"
    if ours.honest >= base.honest:
        return f"At {nfe} evaluations the plain solver does as well: drag the divider"
    if base.honest - ours.honest >= CLOSED * (base.honest - comparison.floor):
        return f"{nfe} evaluations look like {many.nfe}: drag the divider"
    return f"{nfe} evaluations, {1 - ours.honest / base.honest:.0%} closer to {many.nfe}: drag the divider"


def report_of(comparison: Comparison, title: str | None = None) -> Report:
    """The report of a comparison."""
    several = nfes(comparison)
    shown = columns(comparison)
    base, ours = contenders(comparison, 5 if 5 in several else several[0])
    left, right = base or comparison.rows[0], ours or comparison.rows[-1]
    settings = dict(comparison.settings)
    return Report(
        title=title or f"{comparison.model}, {comparison.solver}, {', '.join(map(str, several))} evaluations",
        entries=[
            Entry(row.title, row.nfe, images, numbers(row, shown), row.method, row.method == REFERENCE)
            for row, images in zip(comparison.rows, comparison.images, strict=True)
        ],
        labels=comparison.seeds,
        headlines={nfe: headline(comparison, nfe) for nfe in several},
        lead=(
            f"{comparison.model}, {comparison.solver}: {len(comparison.seeds)} seeds, each sampled by every method "
            "from the same noise. Pictures are compared seed by seed, numbers over all of them."
        ),
        tiles={nfe: tiles(comparison, nfe) for nfe in several},
        columns=shown,
        notes=[
            f"Fréchet distances: {kind(comparison)}. Two sets of own samples are {comparison.floor:.1f} apart.",
            f"{COLUMNS} The range under a distance is two standard errors over the images.",
            *([] if any(row.lpips is not None for row in comparison.rows) else [NO_LPIPS]),
            BLUR,
        ],
        charts=charts(comparison),
        sides=(left.method, right.method),
        command=str(settings.pop("command", "")),
        settings=settings,
    )


def page(comparison: Comparison, title: str | None = None) -> str:
    """The HTML document of a comparison."""
    return render(report_of(comparison, title))


def results(comparison: Comparison) -> dict[str, Any]:
    """The numbers of a comparison, ready for JSON."""
    return {
        "settings": dict(comparison.settings),
        "features": comparison.features,
        "floor": comparison.floor,
        "rows": [
            {**dataclasses.asdict(row), "psnr": row.psnr if math.isfinite(row.psnr) else None}
            for row in comparison.rows
        ],
    }


def write(what: Comparison | Report, out: Path) -> tuple[Path, Path, Path]:
    """Write `report.html`, `grid.png` and `results.json` into the folder `out`, each whole or not at all."""
    if isinstance(what, Report):
        rows = [{"method": e.key, "title": e.title, "nfe": e.nfe, **e.numbers} for e in what.entries]
        report, numbers = what, {"settings": dict(what.settings), "rows": rows}
    else:
        report, numbers = report_of(what), results(what)
    paths = out / "report.html", out / "grid.png", out / "results.json"
    buffer = io.BytesIO()
    contact_sheet(report.entries).save(buffer, "PNG", optimize=True)
    write_text(paths[0], render(report))
    write_bytes(paths[1], buffer.getvalue())
    write_text(paths[2], json.dumps(numbers, indent=1) + "\n")
    return paths
