"""What hosts hand over: inputs of the ComfyUI nodes, and configurations of diffusers schedulers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from damage import HOSTILE, JSON, mutated, refusal
from problems import random_calibration
from steindiff._serialization import with_checksum
from steindiff.calibration import Calibration
from steindiff.grids import LogSNR
from steindiff.integrations import diffusers as ours
from steindiff.solvers import DPMSolverMultistep, Heun, UniPCBh2

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
import comfy_stand_in as comfy

NAMES = (
    st.text(max_size=8)
    | st.sampled_from(["a" * 300, "a\0b", "../a", "/etc/passwd", "con", "a/../../b", "a.json", ".", "~/a", "a\\b"])
    | HOSTILE
)
COUNTS = {"evaluations": 3, "samples": 4, "search": 0, "batch": 2}
LATENT = {"samples": torch.zeros(1, *comfy.SHAPE)}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    with comfy.imported(tmp_path_factory.mktemp("comfyui")) as pack, torch.inference_mode():
        yield pack


def guider() -> Any:
    return comfy.CFGGuider(comfy.Patcher(comfy.BaseModel(comfy.DiscreteEPS())))


@pytest.fixture(scope="module")
def written(nodes: ModuleType) -> dict[str, Any]:
    """A calibration the nodes wrote, without its checksum."""
    calibrate = nodes.NODE_CLASS_MAPPINGS["SteinDiffCalibrate"]().calibrate
    calibrate(guider=guider(), latent_image=LATENT, solver="dpmpp-2m", name="sound", **COUNTS)
    content = json.loads((nodes.output / "sound.json").read_text())
    del content["sha256"]
    return content


@pytest.mark.reader("ComfyUI inputs")
@given(name=NAMES)
def test_names_of_calibrations(nodes: ModuleType, written: dict[str, Any], name: Any):
    """Nothing beside the two folders is read, stat'ed or named as a target."""
    check = nodes.NODE_CLASS_MAPPINGS["SteinDiffCalibrate"].VALIDATE_INPUTS
    loader = nodes.NODE_CLASS_MAPPINGS["SteinDiffLoadCalibration"]
    if check(name) is True:
        assert nodes.nodes.target(name).parent == nodes.output
    refusal(lambda: loader().load(name), ValueError)
    refusal(lambda: loader.IS_CHANGED(name), ValueError)


@pytest.mark.reader("ComfyUI inputs")
@given(
    changes=st.dictionaries(st.sampled_from([*COUNTS, "solver", "name", "existing"]), HOSTILE, min_size=1, max_size=2)
)
def test_inputs_of_calibrate(nodes: ModuleType, written: dict[str, Any], changes: dict[str, Any]):
    """What is linked to an input reaches a node unchecked."""
    node = nodes.NODE_CLASS_MAPPINGS["SteinDiffCalibrate"]()
    inputs = {"solver": "dpmpp-2m", "name": "sound", **COUNTS, **changes}
    refusal(lambda: node.calibrate(guider=guider(), latent_image=LATENT, **inputs), (ValueError, TypeError))
    (nodes.output / "sound.json").write_text(json.dumps(with_checksum(written)))
    sampler = nodes.NODE_CLASS_MAPPINGS["SteinDiffSampler"]()
    refusal(lambda: sampler.get_sampler(changes.get("solver", "auto")), (ValueError, TypeError))


@pytest.mark.reader("ComfyUI inputs")
@given(data=st.data(), deep=st.booleans())
def test_calibrations_of_nodes(nodes: ModuleType, written: dict[str, Any], data: st.DataObject, deep: bool):
    """A damaged file with a right checksum is refused or used, also where only the record of the model is damaged."""
    changed = (
        written | {"conditions": data.draw(mutated(written["conditions"]))} if deep else data.draw(mutated(written))
    )
    (nodes.output / "torn.json").write_text(
        json.dumps(with_checksum(changed) if isinstance(changed, dict) else changed)
    )
    found: list[Calibration] = []
    refusal(lambda: found.extend(nodes.NODE_CLASS_MAPPINGS["SteinDiffLoadCalibration"]().load("torn.json")), ValueError)
    for calibration in found:
        (sampler,) = nodes.NODE_CLASS_MAPPINGS["SteinDiffSampler"]().get_sampler("auto", calibration)
        (sigmas,) = nodes.NODE_CLASS_MAPPINGS["SteinDiffSigmas"]().get_sigmas(calibration)
        noise = torch.ones(1, *comfy.SHAPE)
        refusal(
            lambda sampler=sampler, sigmas=sigmas, noise=noise: guider().sample(
                noise, torch.zeros_like(noise), sampler, sigmas, disable_pbar=True
            ),
            (ValueError, RuntimeError),
        )
    node = nodes.NODE_CLASS_MAPPINGS["SteinDiffCalibrate"]()
    inputs = {"solver": "dpmpp-2m", "name": "torn", **COUNTS}
    refusal(lambda: node.calibrate(guider=guider(), latent_image=LATENT, **inputs), ValueError)


SIGMAS = st.lists(
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-30, 1e-3, 0.5, 1.0, 14.6, 1e30])
    | st.floats(width=32),
    max_size=4,
)


@pytest.mark.reader("ComfyUI inputs")
@given(sigmas=SIGMAS | SIGMAS.map(lambda given: sorted(given, reverse=True)), flow=st.booleans())
def test_sigmas_of_samplers(nodes: ModuleType, sigmas: list[float], flow: bool):
    """What is linked to a sampler is sampled on as it is, or refused."""
    (sampler,) = nodes.NODE_CLASS_MAPPINGS["SteinDiffSampler"]().get_sampler("auto")
    guider = comfy.CFGGuider(comfy.Patcher(comfy.BaseModel((comfy.FlowCONST if flow else comfy.DiscreteEPS)())))
    x, found = torch.ones(1, *comfy.SHAPE), []
    guider.inner_model = guider.model_patcher.model
    model, extra = comfy.Wrapped(guider), {"denoise_mask": None}
    refusal(
        lambda: found.append(
            sampler.sampler_function(model, x, torch.tensor(sigmas), extra, disable=True, **sampler.extra_options)
        ),
        ValueError,
    )
    for out in found:
        assert len(sigmas) < 2 or (
            sigmas == sorted(set(sigmas), reverse=True) and 0.0 <= sigmas[-1] <= sigmas[0] < math.inf
        )
        assert out.isfinite().all()


SCHEDULERS = {
    "DPMSolverMultistepScheduler": DPMSolverMultistep(2),
    "UniPCMultistepScheduler": UniPCBh2(2),
    "HeunDiscreteScheduler": Heun(),
    "EDMDPMSolverMultistepScheduler": DPMSolverMultistep(2),
}
SHAPE = (1, 4, 4)


def config_of(name: str) -> dict[str, Any]:
    """A corrected scheduler's configuration, its calibration's checksum left out."""
    stein = getattr(ours, f"Stein{name}")
    levels = LogSNR(to_zero=True)(ours.family_of(stein()).schedule, 3)
    config = dict(stein(stein_calibration=random_calibration(levels, SCHEDULERS[name], SHAPE)).config)
    del config["stein_calibration"]["sha256"]
    return json.loads(json.dumps({key: value for key, value in config.items() if not key.startswith("_")}))


CONFIGS = {name: config_of(name) for name in SCHEDULERS}


@pytest.mark.reader("diffusers schedulers")
@pytest.mark.parametrize("name", SCHEDULERS)
@given(data=st.data())
def test_calibrations_in_schedulers(name: str, data: st.DataObject):
    """What is taken for sound runs."""
    changed = data.draw(mutated(CONFIGS[name]["stein_calibration"]) | JSON)
    calibration = with_checksum(changed) if isinstance(changed, dict) else changed
    found: list[Any] = []
    stein = getattr(ours, f"Stein{name}")
    refusal(lambda: found.append(stein.from_config({**CONFIGS[name], "stein_calibration": calibration})), ValueError)
    for scheduler in found:

        def run(scheduler: Any = scheduler) -> None:
            scheduler.set_timesteps(3)
            x = torch.ones(1, *SHAPE)
            for t in scheduler.timesteps:
                x = scheduler.step(0.1 * x, t, x).prev_sample

        refusal(run, (ValueError, RuntimeError))


@pytest.mark.reader("diffusers schedulers")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in stock schedulers
@pytest.mark.parametrize("name", SCHEDULERS)
@given(data=st.data())
def test_configurations_of_schedulers(name: str, data: st.DataObject):
    """Stock schedulers know no settings they do not implement; whatever else is damaged is refused in a sentence."""
    sound = with_checksum(CONFIGS[name]["stein_calibration"])
    config = data.draw(mutated({key: value for key, value in CONFIGS[name].items() if key != "stein_calibration"}))
    config = {**config, "stein_calibration": sound} if isinstance(config, dict) else config
    refusal(lambda: getattr(ours, f"Stein{name}").from_config(config), (ValueError, NotImplementedError))
