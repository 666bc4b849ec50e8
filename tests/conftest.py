"""Make `problems`, benchmarks and examples importable, keep torch to one thread and hypothesis off the clock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
for folder in ("benchmarks", "examples"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
torch.set_num_threads(1)

# No test depends on the clock: neither a deadline nor a health check that measures time. The suite tries the same cases
# every time; `make fuzz` tries more, and prints the seed of what fails.
CLOCKS = [HealthCheck.too_slow]
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=40, suppress_health_check=CLOCKS)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=int(os.environ.get("FUZZ_CASES", "2000")),
    print_blob=True,
    suppress_health_check=CLOCKS,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
