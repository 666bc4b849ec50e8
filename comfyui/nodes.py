"""The nodes. They hold no mathematics: everything is `steindiff.integrations.kdiffusion` and `steindiff.calibrate`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import comfy.model_management
import comfy.model_sampling
import comfy.sample
import comfy.samplers
import comfy.utils
import folder_paths
import torch

from steindiff._checks import Within, integer, shown
from steindiff._serialization import decode
from steindiff.calibrating import Progress, Recipe, calibrate
from steindiff.calibration import Calibration
from steindiff.grids import LogSNR
from steindiff.integrations.kdiffusion import HostDenoiser, hosted, sample_steindiff, sigmas_of
from steindiff.loop import Cancelled
from steindiff.sampler import levels_for
from steindiff.schedules import EDM
from steindiff.search import Search
from steindiff.solvers import SOLVERS

from .identity import differences, identify

CATEGORY = "sampling/custom_sampling/steindiff"
CALIBRATION = "STEINDIFF_CALIBRATION"
AUTO, DEFAULT = "auto", "dpmpp-2m"
KIND = "steindiff"
REUSE, OVERWRITE = "reuse", "overwrite"
STATES_ON_DEVICE = 2**30
"""Bytes of states a search may keep beside the network; more are kept in main memory."""
REFERENCE_SHARE = 0.15
"""Of the progress bar, for the fine trajectory."""
NAME = re.compile(r"(?!(con|prn|aux|nul|com\d|lpt\d)(\.|$))[\w+()-][\w+(). -]{0,98}(?<![. ])", re.IGNORECASE)
"""File names every system knows."""

for place in (Path(folder_paths.models_dir) / KIND, Path(folder_paths.get_output_directory()) / KIND):
    folder_paths.add_model_folder_path(KIND, str(place))
folder_paths.folder_names_and_paths[KIND][1].add(".json")


def target(name: str) -> Path:
    """Where a calibration of that name is written.

    Raises:
        ValueError: if it is not a plain file name.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name := name.removesuffix(".json")):
        raise ValueError(
            f"name must be a file name of at most 99 letters, digits, spaces and _ + - . ( ), got {shown(name)}"
        )
    return Path(folder_paths.get_output_directory()) / KIND / f"{name}.json"


def is_flow(model: Any) -> bool:
    """Whether a sampler's model is a flow-matching one."""
    return isinstance(model.inner_model.inner_model.model_sampling, comfy.model_sampling.CONST)


def record(model: Any, extra_args: Mapping[str, Any], x: torch.Tensor) -> dict[str, Any]:
    """What a calibration of a sampler's model must agree on."""
    options = extra_args.get("model_options") or {}
    return {
        "guidance": float(getattr(model.inner_model, "cfg", 1.0)),
        "comfyui": identify(model, options, x.shape[1:], flow=is_flow(model)),
    }


def unlike(calibration: Calibration, found: Mapping[str, Any], x: torch.Tensor) -> list[str]:
    """What differs between a calibration and a sampler's model, in words."""
    if said := calibration.differences(shape=tuple(x.shape[1:])):
        return said  # the rest was recorded at that size
    if "comfyui" not in calibration.conditions:
        return ["it was not measured in ComfyUI and does not say for which model"]
    said = differences(calibration.conditions["comfyui"], found["comfyui"])
    if weights := calibration.differences(conditions={"guidance": found["guidance"]}):
        said = [*weights, *(text for text in said if not text.startswith("guidance"))]
    return said


def replaying(
    model: Any,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: Any = None,
    disable: bool | None = None,
    options: tuple[str, Calibration | None, bool] = (AUTO, None, True),
) -> torch.Tensor:
    """The sampler function: checks a calibration against the model it is about to run on, then samples."""
    solver, calibration, check = options
    if calibration is not None and len(sigmas) > 1:
        if check and (said := unlike(calibration, record(model, extra_args or {}, x), x)):
            raise ValueError(
                f"calibration does not fit: {'; '.join(said)}. Calibrate this model, or switch 'check' off in "
                "SteinDiff Sampler to use it all the same"
            )
        own = sigmas_of(calibration)
        if len(own) != len(sigmas) or not torch.allclose(sigmas.cpu().float(), own, rtol=1e-3, atol=1e-6):
            raise ValueError(
                f"sigmas: {len(sigmas) - 1} steps, but the calibration is for its own {len(own) - 1}; connect "
                "SteinDiff Sigmas, whole, to the sampler"
            )
    return sample_steindiff(
        model,
        x,
        sigmas,
        extra_args,
        callback,
        disable if find_spec("rich") else True,
        solver=None if solver == AUTO else solver,
        calibration=calibration,
        flow=is_flow(model),
    )


class SteinDiffSampler:
    """A SAMPLER for `SamplerCustom` and `SamplerCustomAdvanced`."""

    RETURN_TYPES = ("SAMPLER",)
    OUTPUT_TOOLTIPS = ("Connect to SamplerCustomAdvanced.",)
    FUNCTION = "get_sampler"
    CATEGORY = CATEGORY
    DESCRIPTION = "Any solver of SteinDiff; with a calibration, the solver and corrections it was measured with."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs of the node."""
        solver = {"default": AUTO, "tooltip": "auto: the calibration's own solver; without a calibration dpmpp-2m."}
        check = {
            "default": True,
            "tooltip": "Refuse a model, LoRA or guidance the calibration was not measured with. Off: use it all the "
            "same, for example on a fine-tune or a quantised model.",
        }
        return {
            "required": {"solver": ([AUTO, *SOLVERS], solver)},
            "optional": {
                "calibration": (CALIBRATION, {"tooltip": "From SteinDiff Calibrate or SteinDiff Load Calibration."}),
                "check": ("BOOLEAN", check),
            },
        }

    def get_sampler(self, solver: str, calibration: Calibration | None = None, check: bool = True) -> tuple[Any]:
        """Build the sampler.

        Raises:
            ValueError: if the calibration was measured with another solver than the one chosen.
        """
        chosen = None if solver == AUTO else SOLVERS.resolve("solver", solver)
        if calibration is not None and (said := calibration.differences(solver=chosen)):
            raise ValueError(f"calibration does not fit: {said[0]}; set solver to {AUTO}")
        return (comfy.samplers.KSAMPLER(replaying, {"options": (solver, calibration, check)}),)


class SteinDiffCalibrate:
    """Calibrates a guider: its model, conditioning and guidance, at the size of a latent."""

    RETURN_TYPES = (CALIBRATION, "SIGMAS", "STRING")
    RETURN_NAMES = ("calibration", "sigmas", "summary")
    OUTPUT_TOOLTIPS = (
        "Connect to SteinDiff Sampler.",
        "The noise levels to sample on: connect to SamplerCustomAdvanced.",
        "Where the file is, what was gained and what it cost.",
    )
    FUNCTION = "calibrate"
    CATEGORY = CATEGORY
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Measures once where to step, what to tell the network and what each step loses, by sampling; writes "
        "output/steindiff/<name>.json and uses that file from then on. Prompt and seed may change afterwards; the "
        "model, its LoRAs, the guidance and the size may not."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs of the node."""

        def whole(default: int, least: int, most: int, tooltip: str) -> tuple[str, dict[str, Any]]:
            return "INT", {"default": default, "min": least, "max": most, "tooltip": tooltip}

        return {
            "required": {
                "guider": ("GUIDER", {"tooltip": "Model, prompts and guidance, as you sample with them."}),
                "latent_image": ("LATENT", {"tooltip": "An empty latent of the size you sample."}),
                "solver": (list(SOLVERS), {"default": DEFAULT, "tooltip": "The solver to calibrate."}),
                "evaluations": whole(8, 1, 100, "Model evaluations of a run. Heun with its last Euler step: odd ones."),
                "samples": whole(16, 3, 4096, "Images to measure on. More are better and take longer in proportion."),
                "search": whole(1, 0, 16, "Rounds of searching the noise levels; 0 takes a third of the time of 1."),
                "batch": whole(1, 1, 256, "Images in one evaluation; ComfyUI makes room for them as in sampling."),
                "name": ("STRING", {"default": "calibration", "tooltip": "Of the file, without folder and ending."}),
                "existing": (
                    [REUSE, OVERWRITE],
                    {
                        "default": REUSE,
                        "tooltip": "A file of that name. reuse: take it if it was measured as asked here, else stop "
                        "with what differs. overwrite: measure again.",
                    },
                ),
            }
        }

    @classmethod
    def VALIDATE_INPUTS(cls, name: str) -> bool | str:
        """Refuse a bad name before anything runs."""
        try:
            target(name)
        except ValueError as error:
            return str(error)
        return True

    def calibrate(
        self, guider: Any, latent_image: dict[str, Any], solver: str, name: str, existing: str = REUSE, **counts: int
    ) -> dict[str, Any]:
        """Calibrate inside a run of the guider, which loads the model and prepares its conditioning.

        Raises:
            ValueError: if an input is out of range, or another calibration has that name.
        """
        path = target(name)
        for count, value in counts.items():  # what is linked to an input has not been checked
            limits = self.INPUT_TYPES()["required"][count][1]
            Within(limits["min"], limits["max"])(count, integer(count, value))
        decode("existing", existing, Literal["reuse", "overwrite"])
        evaluations, samples, batch = counts["evaluations"], counts["samples"], counts["batch"]
        # Refuse before a model is loaded.
        levels_for(SOLVERS.resolve("solver", solver), LogSNR(to_zero=True), EDM(), evaluations)
        recipe = Recipe(
            seeds=range(10**6, 10**6 + samples),
            search=Search(iterations=counts["search"]) if counts["search"] else None,
            to_zero=True,
        )
        measurement = Measurement(path, solver, evaluations, recipe, batch, reuse=existing == REUSE)
        latent = comfy.sample.fix_empty_latent_channels(guider.model_patcher, latent_image["samples"])[:1]
        if getattr(latent, "is_nested", False):
            raise ValueError("latent_image must be one tensor, got several (audio and video together)")
        latent = latent.repeat(batch, *[1] * (latent.ndim - 1))  # ComfyUI makes room for that many
        guider.sample(
            torch.zeros_like(latent),
            latent,
            comfy.samplers.KSAMPLER(measurement),
            torch.tensor([1.0, 0.0]),
            disable_pbar=True,
            seed=0,
        )
        found, summary = measurement.found, measurement.summary
        return {"ui": {"text": [summary]}, "result": (found, sigmas_of(found), summary)}


class Measurement:
    """A sampler function that calibrates instead of sampling.

    Args:
        path: of the file.
        solver: by name.
        evaluations: of a run.
        recipe: how to calibrate.
        batch: samples in one evaluation.
        reuse: take the file if it is there.
    """

    found: Calibration
    summary: str

    def __init__(
        self, path: Path, solver: str, evaluations: int, recipe: Recipe, batch: int, *, reuse: bool = True
    ) -> None:
        self.path, self.solver, self.evaluations, self.recipe, self.batch = path, solver, evaluations, recipe, batch
        self.reuse = reuse

    def __call__(
        self, model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: dict[str, Any] | None = None, **_: Any
    ) -> torch.Tensor:
        extra_args = extra_args or {}
        conditions = record(model, extra_args, x)
        if self.reuse and self.path.is_file():
            self.found = self.known(conditions, x)
            self.summary = f"SteinDiff: using {self.path}, measured before"
        else:
            self.measured(model, x, extra_args, conditions).save(self.path)
            self.found = Calibration.load(self.path)  # rounded, as after a restart
            self.summary = f"SteinDiff: wrote {self.path}: {gained(self.found)}"
            if self.found.provenance["stopped"]:
                logging.info(self.summary)
                raise comfy.model_management.InterruptProcessingException
        logging.info(self.summary)
        return x

    def known(self, conditions: Mapping[str, Any], x: torch.Tensor) -> Calibration:
        """The calibration in the file, if it is the one asked for."""
        found = Calibration.load(self.path)
        said = found.differences(solver=SOLVERS[self.solver], nfe=self.evaluations) + unlike(found, conditions, x)
        made = found.provenance
        if made.get("seeds") != [self.recipe.seeds[0], len(self.recipe.seeds)]:
            said.append(f"samples: measured on seeds {shown(made.get('seeds'))}")
        if made.get("search") != repr(self.recipe.search):
            said.append("search: measured with another number of rounds")
        if said:
            raise ValueError(
                f"{self.path.name} exists and was measured otherwise: {'; '.join(said)}. Choose another name, or set "
                f"existing to {OVERWRITE}"
            )
        return found

    def measured(
        self, model: Any, x: torch.Tensor, extra_args: dict[str, Any], conditions: dict[str, Any]
    ) -> Calibration:
        """Calibrate, with a progress bar; interrupted during the search it keeps the best so far."""
        interrupted = comfy.model_management.InterruptProcessingException

        def interruptible(x: torch.Tensor, sigma: torch.Tensor, **given: Any) -> torch.Tensor:
            try:
                comfy.model_management.throw_exception_if_processing_interrupted()
                return model(x, sigma, **given)
            except interrupted:
                raise KeyboardInterrupt from None

        shown = comfy.utils.ProgressBar(1000)

        def told(progress: Progress) -> None:
            share = progress.done / progress.total
            whole = (
                REFERENCE_SHARE * share if progress.stage == "reference" else 1 - (1 - REFERENCE_SHARE) * (1 - share)
            )
            shown.update_absolute(round(1000 * whole), 1000)

        sampling = model.inner_model.inner_model.model_sampling
        denoiser = HostDenoiser(
            interruptible, extra_args, flow=is_flow(model), dtype=x.dtype, device=x.device, conditions=conditions
        )
        wrapped = hosted(denoiser, x.shape[1:], float(sampling.sigma_min), float(sampling.sigma_max))
        states = 4 * 4 * len(self.recipe.seeds) * math.prod(wrapped.shape) * (self.evaluations + 1)
        wrapped = replace(
            wrapped,
            name=type(model.inner_model.inner_model.diffusion_model).__name__,
            device="cpu" if states > STATES_ON_DEVICE else x.device,
        )
        try:
            return calibrate(
                wrapped, self.evaluations, self.solver, recipe=self.recipe, batch=self.batch, callback=told
            )
        except (KeyboardInterrupt, Cancelled):
            raise interrupted from None


def gained(calibration: Calibration) -> str:
    """What a calibration gained and cost, in words."""
    made = calibration.provenance
    judged = made["mismatch"]
    plain = min((value for name, value in judged.items() if name.startswith("plain")), default=None)
    better = "" if plain is None else f" against {plain:.3g} of the plain solver"
    return f"kept {made['kept']}, mismatch {judged[made['kept']]:.3g}{better}, {made['network_calls']:,} evaluations"


class SteinDiffSigmas:
    """The SIGMAS a calibration was measured on."""

    RETURN_TYPES = ("SIGMAS",)
    OUTPUT_TOOLTIPS = ("Connect to SamplerCustomAdvanced.",)
    FUNCTION = "get_sigmas"
    CATEGORY = CATEGORY
    DESCRIPTION = "The noise levels a calibration was measured on; a calibrated sampler takes no others."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs of the node."""
        return {"required": {"calibration": (CALIBRATION, {"tooltip": "The one the sampler has."})}}

    def get_sigmas(self, calibration: Calibration) -> tuple[torch.Tensor]:
        """Read them off."""
        return (sigmas_of(calibration),)


class SteinDiffLoadCalibration:
    """A calibration from a file in `output/steindiff` or `models/steindiff`."""

    RETURN_TYPES = (CALIBRATION,)
    OUTPUT_TOOLTIPS = ("Connect to SteinDiff Sampler and SteinDiff Sigmas.",)
    FUNCTION = "load"
    CATEGORY = CATEGORY
    DESCRIPTION = "A calibration measured before, from output/steindiff or models/steindiff."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs of the node."""
        files = folder_paths.get_filename_list(KIND)
        return {
            "required": {"file": (files, {"tooltip": "Written by SteinDiff Calibrate; reload the page for new ones."})}
        }

    @classmethod
    def IS_CHANGED(cls, file: str) -> float:
        """Load again when the file was written again."""
        path = folder_paths.get_full_path(KIND, file) if file in folder_paths.get_filename_list(KIND) else None
        return math.nan if path is None else Path(path).stat().st_mtime

    def load(self, file: str) -> tuple[Calibration]:
        """Read and check the file.

        Raises:
            ValueError: if it is not one of the calibrations, or damaged.
        """
        files = folder_paths.get_filename_list(KIND)
        path = folder_paths.get_full_path(KIND, file) if file in files else None
        if path is None:
            raise ValueError(f"file must be one of output/steindiff or models/steindiff, got {shown(file)}")
        return (Calibration.load(path),)


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
