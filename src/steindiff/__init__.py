"""SteinDiff: few-step diffusion sampling without retraining.

Data flows one way: model → Denoiser → Step (tableau + engine) → Correction → next state.
"""

from steindiff.grids import GRIDS
from steindiff.levels import Level, Levels
from steindiff.loop import Cancelled, SampleResult, StepInfo, sample
from steindiff.schedules import SCHEDULES
from steindiff.seeding import noise
from steindiff.solvers import SOLVERS

__version__ = "0.1.0"

__all__ = [
    "GRIDS",
    "SCHEDULES",
    "SOLVERS",
    "Cancelled",
    "Level",
    "Levels",
    "SampleResult",
    "StepInfo",
    "__version__",
    "noise",
    "sample",
]
