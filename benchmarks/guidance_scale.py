"""FID of the strong network guided by the embedded one, by scale: how the scale it is trained towards was chosen.

    python benchmarks/guidance_scale.py --samples 1008 --batch 16 --nfe 10 --half --compile

Samples are of the seeds defaults are chosen by, at few enough calls to try many scales on a CPU. A record is one of
`comparison.py`'s, of FID alone; 1 is the network without a guide. A call of the guided network is one of each.
"""

from __future__ import annotations

import time

import torch

from comparison import CHOICE_SEED, Bench, Cell
from networks.autoguided import Autoguided
from networks.labelled import labelled
from networks.strong import load_network
from recording import Records, options
from steindiff import datasets, zoo
from steindiff.metrics import references

SCALES = (1.0, 1.5, 2.0, 3.0)
SOLVER, GRID = "dpmpp-3m", "logsnr"


def main() -> None:
    parser = options(__doc__, "guidance_scale")
    parser.add_argument("--scales", nargs="+", type=float, default=list(SCALES))
    parser.add_argument("--nfe", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="compile the networks")
    parser.add_argument("--half", action="store_true", help="on a CPU too, sample in half precision")
    args = parser.parse_args()
    begun = time.monotonic()
    reference = references.read(references.FOLDER / "cifar10-train.npz").to(args.device)
    half = args.device == "cuda" or args.half
    dtype = (torch.float16 if args.device == "cuda" else torch.bfloat16) if half else torch.float32
    network, guide = (
        one.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
        for one in (load_network(args.device), zoo.load("cifar10", args.device))
    )
    # Compiled once for all scales.
    both = [torch.compile(one) if args.compile else one for one in (network, guide)]
    for scale in args.scales:
        model = labelled(
            network,
            f"strong-guided-{scale:g}",
            args.device,
            lambda _, scale=scale: Autoguided(*both, scale),
            half=half,
            compiled=False,
        )
        bench = Bench(
            model,
            model,
            model,
            args.samples,
            args.batch,
            seeds=0,
            iterations=0,
            inception=args.inception or datasets.inception(),
            reference=reference,
            tf32=args.tf32,
            first=CHOICE_SEED,
            many=(SOLVER, GRID, args.nfe),
            fid_only=True,
            sampled_in=str(dtype).removeprefix("torch."),
        )
        Records(args.out).measure([Cell(SOLVER, "teacher", args.nfe)], bench.identity, bench.run, begun + args.seconds)


if __name__ == "__main__":
    main()
