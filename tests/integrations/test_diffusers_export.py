"""The embedded models as diffusers pipelines: the images of our own loop, plain and calibrated."""

from __future__ import annotations

import pytest
import torch

from steindiff import sample, zoo
from steindiff.calibrate import calibrate
from steindiff.calibration import Calibration
from steindiff.corrections.replay import Replay
from steindiff.grids import LogSNR
from steindiff.solvers import DPMSolverMultistep
from steindiff.subjects import embedded
from steindiff.survey import survey

diffusers = pytest.importorskip("diffusers")

from steindiff.integrations import diffusers as ours  # noqa: E402
from steindiff.integrations.diffusers.tiny import quiet  # noqa: E402

QUICK = {"seeds": range(2), "steps": 3, "batch": 2, "grid": LogSNR(), "class_labels": [0, 1]}


def pixels(x: torch.Tensor) -> torch.Tensor:
    """What is saved: eight bits."""
    return ((x / 2 + 0.5).clamp(0, 1) * 255).round()


@pytest.mark.parametrize(("name", "guidance"), [("cifar10", 1.0), ("fashion", 1.0), ("fashion", 2.0)])
def test_exported_pipeline_gives_the_images_of_our_loop(name: str, guidance: float):
    """Equal images have equal FID, so a gain measured on our loop is the pipeline's gain."""
    pipe, subject = quiet(ours.export(zoo.load(name))), embedded(name, guidance)
    calibration = ours.calibrate(pipe, nfe=3, **QUICK, guidance_scale=guidance)
    assert calibration.settings["guidance"]["copies"] == (1 if guidance == 1.0 else 2)
    latents = torch.randn(2, *subject.shape, generator=torch.Generator().manual_seed(0))
    call = {"guidance_scale": guidance, "latents": latents, "num_inference_steps": 3, "output_type": "latent"}
    empty = Calibration.empty(calibration.solver, calibration.levels, calibration.basis)
    ends = []
    for used in (calibration, empty):
        settings = {**used.settings, "network": calibration.settings["network"]}
        settings["guidance"] = calibration.settings["guidance"]
        installed = Calibration(used.solver, used.levels, used.basis, used.rho, used.gamma, settings=settings)
        with ours.stabilize(pipe, installed):
            images = pipe([0, 1], **call).images
            x = latents * float(pipe.scheduler.init_noise_sigma)
        mine = sample(subject.denoisers([0, 1]), x, used.levels, used.solver, Replay(used)).x
        # From ε at the first level, where α = 0.006, the image follows only up to float32 rounding times 1/α.
        assert float((images - mine).norm() / mine.norm()) < (1e-5 if name == "cifar10" else 5e-5)
        assert torch.equal(pixels(images), pixels(mine)) or (pixels(images) - pixels(mine)).abs().max() <= 1
        ends.append(images)
    assert not torch.equal(*ends), "the calibration must do something for this to be a test"


def test_a_shipped_calibration_goes_with_the_pipeline(tmp_path):
    """A calibration of the model made without any pipeline is put into the scheduler, and saved with it."""
    subject = embedded("fashion")
    denoisers, schedule, shape = subject.denoisers, subject.schedule, subject.shape
    measured = survey(denoisers, schedule, shape, seeds=range(4), batch=4, steps=6, stations=0)
    calibration = calibrate(denoisers, DPMSolverMultistep(2), schedule, 4, shape, measured=measured, grid=LogSNR())
    pipe = quiet(ours.export(zoo.load("fashion"), calibration))
    latents = torch.randn(2, *subject.shape, generator=torch.Generator().manual_seed(0))
    call = {"latents": latents, "num_inference_steps": 4, "output_type": "latent"}
    images = pipe([0, 1], **call).images
    mine = sample(subject.denoisers([0, 1]), latents, calibration.levels, calibration.solver, Replay(calibration)).x
    assert float((images - mine).norm() / mine.norm()) < 5e-5
    pipe.save_pretrained(tmp_path)
    assert torch.equal(quiet(ours.ClassConditionalPipeline.from_pretrained(tmp_path))([0, 1], **call).images, images)
    with pytest.raises(ValueError, match=r"shape: measured for \(1, 28, 28\), asked for \(3, 32, 32\)"):
        ours.export(zoo.load("cifar10"), calibration)


def test_saved_and_loaded(tmp_path):
    pipe = quiet(ours.export(zoo.load("fashion")))
    call = {"num_inference_steps": 4, "output_type": "pt", "guidance_scale": 2.0}
    expected = pipe([3, 5], generator=torch.Generator().manual_seed(1), **call).images
    pipe.save_pretrained(tmp_path)
    loaded = quiet(ours.ClassConditionalPipeline.from_pretrained(tmp_path))
    assert torch.equal(loaded([3, 5], generator=torch.Generator().manual_seed(1), **call).images, expected)
    loaded.scheduler = diffusers.EulerDiscreteScheduler.from_config(loaded.scheduler.config)
    images = loaded([3], num_inference_steps=2).images
    assert images[0].size == (28, 28)
