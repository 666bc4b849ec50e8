"""The embedded models as diffusers pipelines: the images of our own loop, plain and calibrated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from steindiff import sample, zoo
from steindiff.calibrating import Recipe, calibrate
from steindiff.grids import Karras, LogSNR
from steindiff.models import load, shipped_calibration
from steindiff.solvers import DPMSolverMultistep

diffusers = pytest.importorskip("diffusers")

from tiny import quiet  # noqa: E402

from steindiff.integrations import diffusers as ours  # noqa: E402

EVEN = Recipe(seeds=range(4), steps=8, grid=LogSNR(), search=None, rivals=())
QUICK = {"recipe": EVEN, "batch": 2, "class_labels": [0, 1], "progress": False}


def pixels(x: torch.Tensor) -> torch.Tensor:
    """What is saved: eight bits."""
    return ((x / 2 + 0.5).clamp(0, 1) * 255).round()


def test_cifar10_pipeline_gives_the_images_of_our_loop():
    """Plain on the EDM grid and calibrated as shipped: equal images have equal FID, so the gain is the same."""
    subject, solver = load("cifar10"), DPMSolverMultistep(2)
    calibration = shipped_calibration(subject, solver, 5)
    assert calibration is not None, "the package ships a calibration for 5 evaluations"
    latents = torch.randn(1, *subject.shape, generator=torch.Generator().manual_seed(0))
    ends = []
    for used, levels in ((None, Karras(to_zero=True)(subject.schedule, 5)), (calibration, calibration.levels)):
        pipe = quiet(ours.export(zoo.load("cifar10"), used))
        images = pipe([0], latents=latents, num_inference_steps=5, output_type="latent").images
        x = latents * float(pipe.scheduler.init_noise_sigma)
        mine = sample(subject.denoiser_for([0]), x, levels, solver, None if used is None else used.replay()).x
        assert float((images - mine).norm() / mine.norm()) < 1e-5
        assert (pixels(images) - pixels(mine)).abs().max() <= 1
        ends.append(images)
    assert float((ends[0] - ends[1]).norm() / ends[0].norm()) > 0.05
    with pytest.raises(ValueError, match="guidance: measured with 1 conditions a sample, this run has 2"):
        pipe([0], guidance_scale=2.0, num_inference_steps=5)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_calibrated_pipeline_gives_the_images_of_our_loop(guidance: float):
    pipe, subject = quiet(ours.export(zoo.load("fashion"))), load("fashion", guidance)
    calibration = ours.calibrate(pipe, nfe=4, **QUICK, guidance_scale=guidance)
    assert calibration.conditions["guidance"]["copies"] == (1 if guidance == 1.0 else 2)
    latents = torch.randn(2, *subject.shape, generator=torch.Generator().manual_seed(0))
    call = {"guidance_scale": guidance, "latents": latents, "num_inference_steps": 4, "output_type": "latent"}
    with ours.stabilize(pipe, calibration):
        images = pipe([0, 1], **call).images
    mine = sample(subject.denoiser_for([0, 1]), latents, calibration.levels, calibration.solver, calibration.replay()).x
    # From ε at the first level, where α = 0.006, the image follows only up to float32 rounding times 1/α.
    assert float((images - mine).norm() / mine.norm()) < 5e-5
    assert (pixels(images) - pixels(mine)).abs().max() <= 1
    plain = sample(subject.denoiser_for([0, 1]), latents, calibration.levels, calibration.solver).x
    assert float((images - plain).norm() / plain.norm()) > 0.01


@pytest.mark.parametrize("nfe", [3, 4, 5])
def test_a_shipped_calibration_makes_the_same_images_in_a_pipeline(nfe: int):
    """Those for three and four evaluations begin late, and the pipeline with them."""
    subject = load("cifar10")
    calibration = shipped_calibration(subject, DPMSolverMultistep(2), nfe)
    pipe = quiet(ours.export(zoo.load("cifar10"), calibration))
    unit = torch.randn(2, *subject.shape, generator=torch.Generator().manual_seed(0))
    images = pipe([0, 1], latents=unit, num_inference_steps=nfe, output_type="latent").images
    x = unit * calibration.levels[0].sigma
    mine = sample(subject.denoiser_for([0, 1]), x, calibration.levels, calibration.solver, calibration.replay()).x
    assert float((images - mine).norm() / mine.norm()) < 2e-3


def test_a_calibration_made_without_a_pipeline_goes_with_it(tmp_path):
    """It is put into the scheduler, saved with the pipeline, and checked against model and guidance."""
    subject = load("fashion")
    calibration = calibrate(subject, 4, DPMSolverMultistep(2), recipe=replace(EVEN, to_zero=True))
    pipe = quiet(ours.export(zoo.load("fashion"), calibration))
    latents = torch.randn(2, *subject.shape, generator=torch.Generator().manual_seed(0))
    call = {"latents": latents, "num_inference_steps": 4, "output_type": "latent"}
    images = pipe([0, 1], **call).images
    pipe.save_pretrained(tmp_path)
    again = quiet(ours.ClassConditionalPipeline.from_pretrained(tmp_path))
    ours.stabilize(again)
    assert torch.equal(again([0, 1], **call).images, images)
    with pytest.raises(ValueError, match=r"shape: measured for \(1, 28, 28\), asked for \(3, 32, 32\)"):
        ours.export(zoo.load("cifar10"), calibration)
    with pytest.raises(ValueError, match=r"guidance: measured with 3\.0, asked for 1\.0"):
        ours.export(zoo.load("fashion"), replace(calibration, conditions={"guidance": 3.0}))
    other = zoo.load("fashion")
    other.network.leave.weight.data.mul_(-1.0)
    with pytest.raises(ValueError, match="network: its answer differs by"):
        ours.export(other, calibration)


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
