"""The command line with the digits as a model, for tests/cli/test_launch.py: `torchrun tests/launched.py ARGUMENTS`."""

from __future__ import annotations

import sys

import torch

import subjects
from steindiff.cli.commands import evaluate
from steindiff.cli.frame import run
from steindiff.subjects import MODELS


def pooled(images: torch.Tensor) -> torch.Tensor:
    """A stand-in for Inception: mean and deviation of each channel."""
    x = images.float().flatten(2) / 255
    return torch.cat([x.mean(2), x.std(2)], dim=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    MODELS["digits"] = lambda guidance, device: subjects.subject()
    evaluate.Evaluation.inception = staticmethod(pooled)
    sys.exit(run(sys.argv[1:]))
