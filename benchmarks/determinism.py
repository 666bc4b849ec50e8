"""What stays equal to the bit when something about a run changes, and what only up to rounding.

    python benchmarks/determinism.py                  # the rows of a CPU
    python benchmarks/determinism.py --device cuda    # those of a GPU, in seconds; the others stay

Every row of `CLAIMS` is checked by tests/test_determinism.py. Writes `benchmarks/results/determinism.json`;
`benchmarks/scale_tables.py` puts it into `docs/scale.md`.
"""

from __future__ import annotations

import argparse
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
from steindiff._files import write_json

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import drills  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="whose rows are measured")
    record(RESULTS / "determinism.json", parser.parse_args().device)


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


if __name__ == "__main__":
    main()
