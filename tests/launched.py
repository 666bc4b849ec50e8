"""The command line with the digits as a model, for tests/cli: `torchrun tests/launched.py ARGUMENTS ++ ARGUMENTS …`.

With `DIE` in the environment process 1 is killed after its first shard, unless it was started anew.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import toys
from steindiff.cli.app import run
from steindiff.cli.commands import evaluate
from steindiff.cli.options import MODELS
from steindiff.production import generating


def pooled(images: torch.Tensor) -> torch.Tensor:
    """A stand-in for Inception: mean and deviation of each channel."""
    x = images.float().flatten(2) / 255
    return torch.cat([x.mean(2), x.std(2)], dim=1)


def die_after_a_shard() -> None:
    write = generating.write

    def last(*args) -> None:
        write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    generating.write = last


if __name__ == "__main__":
    torch.set_num_threads(1)
    MODELS["digits"] = lambda guidance, device, **options: toys.model()
    evaluate.Evaluation.inception = staticmethod(pooled)
    if "DIE" in os.environ and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die_after_a_shard()
    for line in " ".join(sys.argv[1:]).split(" ++ "):
        if code := run(line.split()):
            sys.exit(code)
        os.environ["TORCHELASTIC_RESTART_COUNT"] += "+"  # the next line's processes meet anew
