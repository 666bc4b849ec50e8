"""FID of the strong network guided by the embedded one, by scale: how the scale it is trained towards was chosen.

    python benchmarks/guidance_scale.py --compile --tf32 --samples 5000

Samples are of the seeds defaults are chosen by, at few enough calls to try many scales. A record is one of
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

SCALES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
RUN = ("dpmpp-3m", "logsnr", 16)


def main() -> None:
    parser = options(__doc__, "guidance_scale")
    parser.add_argument("--scales", nargs="+", type=float, default=list(SCALES))
    parser.add_argument("--compile", action="store_true", help="compile the networks")
    args = parser.parse_args()
    begun = time.monotonic()
    reference = references.read(references.FOLDER / "cifar10-train.npz").to(args.device)
    cuda = args.device == "cuda"
    network, guide = load_network(args.device), zoo.load("cifar10", args.device)
    layout = {"dtype": torch.float16 if cuda else torch.float32, "memory_format": torch.channels_last}
    # Compiled once for all scales.
    both = [torch.compile(one) if args.compile else one for one in (network.to(**layout), guide.to(**layout))]
    for scale in args.scales:
        name = f"strong-guided-{scale:g}"
        model = labelled(
            network, name, args.device, lambda _, scale=scale: Autoguided(*both, scale), half=cuda, compiled=False
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
            many=RUN,
            fid_only=True,
            sampled_in="float16" if cuda else "float32",
        )
        Records(args.out).measure([Cell(RUN[0], "teacher", RUN[2])], bench.identity, bench.run, begun + args.seconds)


if __name__ == "__main__":
    main()
