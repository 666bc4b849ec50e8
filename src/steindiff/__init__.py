"""SteinDiff: few-step diffusion sampling without retraining.

Data flows one way: model → denoiser → step → correction → next state.

    import steindiff as sd

    model = sd.load("cifar10")
    sampler = sd.calibrate(model, nfe=5).sampler()
    images = sampler(model, seeds=range(16)).x
"""

from steindiff._discovery import register
from steindiff._version import __version__
from steindiff.bases import BASES, DCT, Basis, Identity
from steindiff.calibrating import FEW_CALLS, ByAlignment, Progress, Recipe, calibrate, calibrate_budgets
from steindiff.calibration import Calibration, CalibrationSet
from steindiff.comparison import CompareOptions, Comparison, compare
from steindiff.corrections import CORRECTIONS, Correction
from steindiff.corrections.replay import Replay, StepWeights
from steindiff.denoisers import X0, Denoiser, EDMDenoiser, Epsilon, FlowVelocity, Guided, Score, Velocity
from steindiff.grids import GRIDS, Grid
from steindiff.levels import Level, Levels
from steindiff.loop import Cancelled, SampleResult, StepInfo, sample
from steindiff.model import Model
from steindiff.models import load, shipped_calibration
from steindiff.reference import GaussianDensity, ReferenceRun, reference_run
from steindiff.sampler import Sampler
from steindiff.schedules import EDM, SCHEDULES, VE, VP, Cosine, Discrete, Flow, Schedule
from steindiff.search import Search
from steindiff.seeding import noise
from steindiff.solvers import SOLVERS, Solver
from steindiff.stein import ByEnergy, SteinDensity, SteinEnergy

__all__ = [
    "BASES",
    "CORRECTIONS",
    "DCT",
    "EDM",
    "FEW_CALLS",
    "GRIDS",
    "SCHEDULES",
    "SOLVERS",
    "VE",
    "VP",
    "X0",
    "Basis",
    "ByAlignment",
    "ByEnergy",
    "Calibration",
    "CalibrationSet",
    "Cancelled",
    "CompareOptions",
    "Comparison",
    "Correction",
    "Cosine",
    "Denoiser",
    "Discrete",
    "EDMDenoiser",
    "Epsilon",
    "Flow",
    "FlowVelocity",
    "GaussianDensity",
    "Grid",
    "Guided",
    "Identity",
    "Level",
    "Levels",
    "Model",
    "Progress",
    "Recipe",
    "ReferenceRun",
    "Replay",
    "SampleResult",
    "Sampler",
    "Schedule",
    "Score",
    "Search",
    "Solver",
    "SteinDensity",
    "SteinEnergy",
    "StepInfo",
    "StepWeights",
    "Velocity",
    "__version__",
    "calibrate",
    "calibrate_budgets",
    "compare",
    "load",
    "noise",
    "reference_run",
    "register",
    "sample",
    "shipped_calibration",
]
