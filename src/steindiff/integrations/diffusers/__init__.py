"""SteinDiff in diffusers.

Import this module before loading a pipeline that was saved with one of its classes: diffusers resolves components it
does not own among the modules already imported, and looks for their base classes in the same namespace.
"""

from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin

from steindiff.calibration import CalibrationSet
from steindiff.integrations.diffusers.export import ClassConditionalPipeline, ZooUNet2DModel, export
from steindiff.integrations.diffusers.families import family_of
from steindiff.integrations.diffusers.networks import denoiser
from steindiff.integrations.diffusers.pipelines import (
    HOST_RECIPE,
    Stabilized,
    calibrate,
    report,
    scheduler_for,
    stabilize,
)
from steindiff.integrations.diffusers.schedulers import (
    SteinDPMSolverMultistepScheduler,
    SteinEDMDPMSolverMultistepScheduler,
    SteinHeunDiscreteScheduler,
    SteinUniPCMultistepScheduler,
)

__all__ = [
    "HOST_RECIPE",
    "CalibrationSet",
    "ClassConditionalPipeline",
    "DiffusionPipeline",
    "ModelMixin",
    "SchedulerMixin",
    "Stabilized",
    "SteinDPMSolverMultistepScheduler",
    "SteinEDMDPMSolverMultistepScheduler",
    "SteinHeunDiscreteScheduler",
    "SteinUniPCMultistepScheduler",
    "ZooUNet2DModel",
    "calibrate",
    "denoiser",
    "export",
    "family_of",
    "report",
    "scheduler_for",
    "stabilize",
]
