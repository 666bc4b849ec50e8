"""Make `problems` and the benchmarks importable, and keep torch from oversubscribing the two cores."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
torch.set_num_threads(1)
