"""What stays equal to the bit when something about a run changes, and what only up to rounding.

    python benchmarks/determinism.py                  # the rows of a CPU
    python benchmarks/determinism.py --device cuda    # those of a GPU, in seconds; the others stay
    python benchmarks/determinism.py --tables         # docs/scale.md from the records, nothing measured

Every row of `CLAIMS` is checked by tests/test_determinism.py. Writes `benchmarks/results/determinism.json` and, with
`benchmarks/results/{soak,drills,fuzz}.json`, the tables of `docs/scale.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
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
PAGE = ROOT / "docs" / "scale.md"
SEEDS = range(6)
SAMPLER = Sampler("dpmpp-2m", nfe=3)
GPU = "cuda"


def images(
    seeds: Sequence[int] = SEEDS,
    batch: int = 6,
    threads: int = 1,
    device: str = "cpu",
    tf32: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Images of the embedded Fashion-MNIST model, float64 on the CPU."""
    before, model = torch.get_num_threads(), load("fashion", device=device)
    model = Model(model.denoiser, model.schedule, model.shape, device=device, dtype=dtype, condition=model.condition)
    torch.set_num_threads(threads)
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            return SAMPLER(model, seeds, batch=batch).x.double().cpu()
    finally:
        torch.set_num_threads(before)


def gap(device: str = "cpu", **change: Any) -> float:
    """The largest difference a change makes to an image in [−1, 1]."""
    return float((images(device=device, **change) - images(device=device)).abs().max())


def batches(device: str = "cpu") -> float:
    """Another batch size, and a sample in a batch of its own against the same one among others."""
    alone = images([SEEDS[2]], batch=1, device=device) - images(device=device)[2:3]
    return max(gap(device, batch=4), float(alone.abs().max()))


def moved(**change: Any) -> float:
    """The largest difference between a GPU's images and a CPU's."""
    return float((images(device=GPU, **change) - images()).abs().max())


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
    "batch": Claim("the batch size, or the other samples of a batch", ROUNDING, batches),
    "threads": Claim("the number of CPU threads", ROUNDING, lambda: gap(threads=2)),
    "dtype": Claim("a float64 state instead of float32", ROUNDING, lambda: gap(dtype=torch.float64)),
    "device": Claim("a GPU instead of a CPU", ROUNDING, lambda: moved()),
    "tf32": Claim(
        "a GPU that may multiply in TF32, PyTorch's default, instead of a CPU", None, lambda: moved(tf32=True)
    ),
    "gpu again": Claim("on a GPU, nothing: the same run again", 0.0, lambda: gap(GPU)),
    "gpu batch": Claim("on a GPU, the batch size, or the other samples of a batch", ROUNDING, lambda: batches(GPU)),
}
ON_GPU = ("device", "tf32", "gpu again", "gpu batch")


def measurable(name: str) -> bool:
    return name not in ON_GPU or torch.cuda.is_available()


def spelled(value: float | None, missing: str = "not promised") -> str:
    if value is None:
        return missing
    return "equal to the bit" if value == 0.0 else f"{value:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="whose rows are measured")
    parser.add_argument("--tables", action="store_true", help="only fill the page")
    arguments = parser.parse_args()
    if not arguments.tables:
        record(RESULTS / "determinism.json", arguments.device)
    tables(PAGE)


def record(path: Path, device: str) -> None:
    """Measure the rows of a device and keep the others as they are."""
    torch.set_num_threads(1)
    known = json.loads(path.read_text())
    found = {
        name: claim.measure()
        if (name in ON_GPU) == (device != "cpu")
        else known["claims"].get(name, {}).get("measured")
        for name, claim in CLAIMS.items()
    }
    facts = {
        "seeds": [SEEDS.start, SEEDS.stop],
        "nfe": SAMPLER.nfe,
        "network_calls": SAMPLER.nfe,
        "backward_passes": 0,
    }
    names = ("device", "versions")
    machines = {**{name: known[name] for name in names}, "gpu": known.get("gpu")}
    machines |= machine("cpu") if device == "cpu" else {"gpu": machine(device)}
    rows = {name: {"change": c.change, "promise": c.promise, "measured": found[name]} for name, c in CLAIMS.items()}
    write_json(path, {**facts, **machines, "claims": rows})
    if broken := [n for n, c in CLAIMS.items() if None not in (c.promise, found[n]) and found[n] > c.promise]:
        raise SystemExit(f"promises that do not hold: {', '.join(broken)}")


def fill(page: Path, name: str, header: Sequence[str], body: Sequence[Sequence[str]], remark: str = "") -> None:
    """Put a table between its marks."""
    lines = [" | ".join(row) for row in (header, ["---"] * len(header), *body)]
    mark, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(mark)
    table = "\n".join(f"| {line} |" for line in lines)
    write_text(page, f"{before}{mark}\n\n{table}\n{remark}\n{end}{rest.partition(end)[2]}")


def tables(page: Path) -> None:
    """Fill the page from the records."""
    claims = json.loads((RESULTS / "determinism.json").read_text())["claims"].values()
    body = [[c["change"], spelled(c["promise"]), spelled(c["measured"], "not measured")] for c in claims]
    fill(page, "determinism", ["what changes", "images differ at most by", "measured"], body)
    found = json.loads((RESULTS / "soak.json").read_text())
    numbers = ", ".join(f"{name} {found[name]}" for name in ("lost", "duplicated", "different"))
    drilled = json.loads((RESULTS / "drills.json").read_text())["drills"].values()
    body = [[f"soak: {name}", str(f["tried"]), str(f["held"])] for name, f in found["faults"].items()]
    body += [[f"drill: {d['what'][0].lower()}{d['what'][1:]}", str(d["tried"]), str(d["held"])] for d in drilled]
    fill(page, "faults", ["fault", "tried", "held"], body, f"\nSoak, {found['images']:,} images: {numbers}.\n")
    fuzzed = json.loads((RESULTS / "fuzz.json").read_text())
    body = [
        [reader, *(f"{sum(test[name] for test in tests):,}" for name in ("cases", "failures")), f"{peak(tests):.1f}"]
        for reader, tests in by_reader(fuzzed["tests"].values()).items()
    ]
    fill(page, "fuzz", ["what is damaged", "cases", "failures", "memory taken, at most, MiB"], body)


def by_reader(tests: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What was found of each reader, by one test or several."""
    found: dict[str, list[dict[str, Any]]] = {}
    for test in tests:
        found.setdefault(test["reader"], []).append(test)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def peak(tests: Iterable[dict[str, Any]]) -> float:
    """The most memory that a case took beyond what there was, in MiB."""
    return max(test["peak_bytes"] for test in tests) / 2**20


if __name__ == "__main__":
    main()
