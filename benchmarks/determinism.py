"""What stays equal to the bit when something about a run changes, and what only up to rounding.

    python benchmarks/determinism.py

Every row of `CLAIMS` is checked by tests/test_determinism.py. Writes `benchmarks/results/determinism.json` and, with
`benchmarks/results/{soak,drills}.json`, the tables of `docs/scale.md`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recording import machine
from steindiff import Model, Sampler, load
from steindiff._files import write_json, write_text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import drills  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SEEDS = range(6)
SAMPLER = Sampler("dpmpp-2m", nfe=3)


def images(seeds: Sequence[int] = SEEDS, batch: int = 6, threads: int = 1, device: str = "cpu", **more: Any) -> Tensor:
    """Images of the embedded Fashion-MNIST model, float64 on the CPU."""
    before, model = torch.get_num_threads(), load("fashion", device=device)
    model = Model(model.denoiser, model.schedule, model.shape, device=device, condition=model.condition, **more)
    torch.set_num_threads(threads)
    try:
        return SAMPLER(model, seeds, batch=batch).x.double().cpu()
    finally:
        torch.set_num_threads(before)


def gap(**change: Any) -> float:
    """The largest difference a change makes to an image in [−1, 1]."""
    return float((images(**change) - images()).abs().max())


def one_alone() -> float:
    """A sample in a batch of its own against the same one among others."""
    return float((images(seeds=[SEEDS[2]], batch=1) - images()[2:3]).abs().max())


def by_drill(name: str) -> Callable[[], float]:
    """0 where a drill of the suite finds all files equal to the byte; it raises where it does not."""

    def drill() -> float:
        with tempfile.TemporaryDirectory() as place:
            drills.DRILLS[name](Path(place))
        return 0.0

    return drill


class Claim(NamedTuple):
    """What changes, the largest difference promised (0: equal to the bit; None: none is), and how it is measured."""

    change: str
    promise: float | None
    measure: Callable[[], float]


ROUNDING = 5e-4
"""Of images in [−1, 1], where a grey level is 8e-3; some times what was measured, since processors differ."""
CLAIMS = {
    "again": Claim("nothing: the same run again", 0.0, gap),
    "processes": Claim("several processes instead of one", 0.0, by_drill("ranks")),
    "kills": Claim("kills and new starts on the way", 0.0, by_drill("kills")),
    "batch": Claim("the batch size, or the other samples of a batch", ROUNDING, lambda: max(gap(batch=4), one_alone())),
    "threads": Claim("the number of CPU threads", ROUNDING, lambda: gap(threads=2)),
    "dtype": Claim("a float64 state instead of float32", ROUNDING, lambda: gap(dtype=torch.float64)),
    "device": Claim("a GPU instead of a CPU", None, lambda: gap(device="cuda")),
}


def measurable(name: str) -> bool:
    return name != "device" or torch.cuda.is_available()


def spelled(value: float | None, missing: str = "not promised") -> str:
    if value is None:
        return missing
    return "equal to the bit" if value == 0.0 else f"{value:.0e}"


def main() -> None:
    torch.set_num_threads(1)
    found = {name: claim.measure() if measurable(name) else None for name, claim in CLAIMS.items()}
    record = {
        "seeds": [SEEDS.start, SEEDS.stop],
        "nfe": SAMPLER.nfe,
        "network_calls": SAMPLER.nfe,
        "backward_passes": 0,
    }
    promised = {name: {"change": c.change, "promise": c.promise, "measured": found[name]} for name, c in CLAIMS.items()}
    write_json(RESULTS / "determinism.json", {**record, **machine("cpu"), "claims": promised})
    tables()


def fill(page: Path, name: str, header: Sequence[str], body: Sequence[Sequence[str]], remark: str = "") -> None:
    """Put a table between its marks."""
    lines = [" | ".join(row) for row in (header, ["---"] * len(header), *body)]
    mark, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(mark)
    table = "\n".join(f"| {line} |" for line in lines)
    write_text(page, f"{before}{mark}\n\n{table}\n{remark}\n{end}{rest.partition(end)[2]}")


def tables() -> None:
    """Fill the page from the records."""
    page = ROOT / "docs" / "scale.md"
    claims = json.loads((RESULTS / "determinism.json").read_text())["claims"].values()
    body = [[c["change"], spelled(c["promise"]), spelled(c["measured"], "not measured")] for c in claims]
    fill(page, "determinism", ["what changes", "images differ at most by", "measured"], body)
    found = json.loads((RESULTS / "soak.json").read_text())
    numbers = ", ".join(f"{name} {found[name]}" for name in ("lost", "duplicated", "different"))
    drilled = json.loads((RESULTS / "drills.json").read_text())["drills"].values()
    body = [[f"soak: {name}", str(f["tried"]), str(f["held"])] for name, f in found["faults"].items()]
    body += [[f"drill: {d['what'][0].lower()}{d['what'][1:]}", str(d["tried"]), str(d["held"])] for d in drilled]
    fill(page, "faults", ["fault", "tried", "held"], body, f"\nSoak, {found['images']:,} images: {numbers}.\n")


if __name__ == "__main__":
    main()
