"""The nodes. They hold no mathematics: everything is `steindiff.integrations.kdiffusion`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_sampling
import comfy.sample
import comfy.samplers
import folder_paths
import torch

from steindiff.calibration import Calibration
from steindiff.integrations.identity import check_identity, identify
from steindiff.integrations.kdiffusion import calibrate_steindiff, sample_steindiff, sigmas_of
from steindiff.solvers import SOLVERS

CATEGORY = "sampling/custom_sampling/steindiff"
CALIBRATION = "STEINDIFF_CALIBRATION"
DEFAULT = "dpmpp-2m"


def folder() -> Path:
    """Where calibrations are kept."""
    found = Path(folder_paths.get_output_directory()) / "steindiff"
    found.mkdir(parents=True, exist_ok=True)
    return found


def is_flow(model: Any) -> bool:
    """Whether a sampler's model is a flow-matching one."""
    return isinstance(model.inner_model.inner_model.model_sampling, comfy.model_sampling.CONST)


def guidance(model: Any) -> float:
    """The guidance weight a sampler's model applies."""
    return float(getattr(model.inner_model, "cfg", 1.0))


def replaying(
    model: Any,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: Any = None,
    disable: bool | None = None,
    solver: str = DEFAULT,
    calibration: Calibration | None = None,
) -> torch.Tensor:
    """The sampler function: checks a calibration against the model it is about to run on, then samples."""
    settings = {}
    if calibration is not None:
        check_identity(calibration.settings["network"], model.inner_model.inner_model.diffusion_model)
        settings = {"guidance": guidance(model)}
    return sample_steindiff(
        model,
        x,
        sigmas,
        extra_args,
        callback,
        disable,
        solver=None if calibration is not None else SOLVERS[solver],
        calibration=calibration,
        flow=is_flow(model),
        settings=settings,
    )


class SteinDiffSampler:
    """A SAMPLER for `SamplerCustom` and `SamplerCustomAdvanced`."""

    RETURN_TYPES = ("SAMPLER",)
    FUNCTION = "get_sampler"
    CATEGORY = CATEGORY
    DESCRIPTION = "Any solver of SteinDiff; with a calibration, the solver and corrections it was measured with."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs of the node."""
        return {
            "required": {"solver": (list(SOLVERS), {"default": DEFAULT})},
            "optional": {"calibration": (CALIBRATION,)},
        }

    def get_sampler(self, solver: str, calibration: Calibration | None = None) -> tuple[Any]:
        """Build the sampler."""
        return (comfy.samplers.KSAMPLER(replaying, {"solver": solver, "calibration": calibration}),)


class SteinDiffCalibrate:
    """Calibrates a guider: its model, conditioning and guidance, at the size of a latent."""

    RETURN_TYPES = (CALIBRATION, "SIGMAS")
    RETURN_NAMES = ("calibration", "sigmas")
    FUNCTION = "calibrate"
    CATEGORY = CATEGORY
    OUTPUT_NODE = True
    DESCRIPTION = "Measures once where to step and what each step loses; writes output/steindiff/<name>.json."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs of the node."""
        return {
            "required": {
                "guider": ("GUIDER",),
                "latent_image": ("LATENT",),
                "solver": (list(SOLVERS), {"default": DEFAULT}),
                "evaluations": ("INT", {"default": 8, "min": 1, "max": 100}),
                "samples": ("INT", {"default": 32, "min": 2, "max": 4096}),
                "batch": ("INT", {"default": 4, "min": 1, "max": 256}),
                "name": ("STRING", {"default": "calibration"}),
            }
        }

    def calibrate(
        self,
        guider: Any,
        latent_image: dict[str, Any],
        solver: str,
        evaluations: int,
        samples: int,
        batch: int,
        name: str,
    ) -> tuple[Calibration, torch.Tensor]:
        """Calibrate inside a run of the guider, which loads the model and prepares its conditioning."""
        if not name or Path(name).name != name:
            raise ValueError(f"name = {name!r}: allowed are file names without a folder")
        found: list[Calibration] = []

        def measuring(
            model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: Any = None, **_: Any
        ) -> torch.Tensor:
            sampling = model.inner_model.inner_model.model_sampling
            found.append(
                calibrate_steindiff(
                    model,
                    tuple(x.shape[1:]),
                    evaluations,
                    float(sampling.sigma_min),
                    # A flow at σ = 1 is pure noise, where the log-SNR is infinite.
                    min(float(sampling.sigma_max), 0.999) if is_flow(model) else float(sampling.sigma_max),
                    extra_args,
                    solver=SOLVERS[solver],
                    flow=is_flow(model),
                    seeds=range(samples),
                    batch=batch,
                    settings={
                        "guidance": guidance(model),
                        "network": identify(model.inner_model.inner_model.diffusion_model),
                    },
                    device=x.device,
                    dtype=x.dtype,
                )
            )
            return x

        latent = comfy.sample.fix_empty_latent_channels(guider.model_patcher, latent_image["samples"])[:1]
        span = torch.tensor([1.0, 0.0])
        guider.sample(
            torch.zeros_like(latent), latent, comfy.samplers.KSAMPLER(measuring), span, disable_pbar=True, seed=0
        )
        found[0].save(folder() / f"{name}.json")
        return found[0], sigmas_of(found[0])


class SteinDiffSigmas:
    """The SIGMAS a calibration was measured on."""

    RETURN_TYPES = ("SIGMAS",)
    FUNCTION = "get_sigmas"
    CATEGORY = CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs of the node."""
        return {"required": {"calibration": (CALIBRATION,)}}

    def get_sigmas(self, calibration: Calibration) -> tuple[torch.Tensor]:
        """Read them off."""
        return (sigmas_of(calibration),)


class SteinDiffLoadCalibration:
    """A calibration from a file in `output/steindiff`."""

    RETURN_TYPES = (CALIBRATION,)
    FUNCTION = "load"
    CATEGORY = CATEGORY

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs of the node."""
        return {"required": {"file": (sorted(path.name for path in folder().glob("*.json")),)}}

    @classmethod
    def IS_CHANGED(cls, file: str) -> float:
        """Load again when the file was written again."""
        return (folder() / file).stat().st_mtime

    def load(self, file: str) -> tuple[Calibration]:
        """Read and check the file."""
        if Path(file).name != file:
            raise ValueError(f"file = {file!r}: allowed are files of {folder()}")
        return (Calibration.load(folder() / file),)


NODE_CLASS_MAPPINGS = {
    "SteinDiffSampler": SteinDiffSampler,
    "SteinDiffCalibrate": SteinDiffCalibrate,
    "SteinDiffSigmas": SteinDiffSigmas,
    "SteinDiffLoadCalibration": SteinDiffLoadCalibration,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SteinDiffSampler": "SteinDiff Sampler",
    "SteinDiffCalibrate": "SteinDiff Calibrate",
    "SteinDiffSigmas": "SteinDiff Sigmas",
    "SteinDiffLoadCalibration": "SteinDiff Load Calibration",
}
