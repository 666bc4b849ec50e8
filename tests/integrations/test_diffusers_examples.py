"""The example scripts, offline."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("diffusers_*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = ["--tiny", "--nfe", "4", "--out", str(tmp_path)]
    module.main(arguments)
    assert str(tmp_path) in capsys.readouterr().out
    images = sorted(tmp_path.glob("*.png"))
    assert images
    assert all(image.stat().st_size > 0 for image in images)
    for file in tmp_path.glob("calibration*.json"):
        before = file.read_bytes()
        json.loads(before)
        module.main(arguments)
        assert file.read_bytes() == before, "the same calibration again: reused, or measured from the same seeds"


def test_ten_lines_for_a_pipeline_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Calibrate, sample, save, load and sample again: the whole path of a user, on a tiny pipeline."""
    import tiny
    import torch

    from steindiff.calibrating import Recipe
    from steindiff.integrations import diffusers as stein

    monkeypatch.chdir(tmp_path)
    pipe = tiny.stable_diffusion(prompts=True)
    call = {"height": 16, "width": 16, "guidance_scale": 5.0, "output_type": "pt"}
    prompts = ["a lighthouse", "a dragonfly"]
    quick = Recipe(seeds=range(6), steps=6, search=None)

    calibration = stein.calibrate(pipe, prompts, nfe=5, recipe=quick, **call)
    stein.stabilize(pipe, calibration)
    image = pipe("a bowl", num_inference_steps=5, generator=torch.manual_seed(0), **call).images
    pipe.save_pretrained("mine")
    again = type(pipe).from_pretrained("mine")
    stein.stabilize(again)
    same = again("a bowl", num_inference_steps=5, generator=torch.manual_seed(0), **call).images

    assert torch.equal(image, same)
    assert type(again.scheduler).__name__ == "SteinDPMSolverMultistepScheduler"
    with pytest.raises(ValueError, match="guidance: measured with"):
        again("a bowl", num_inference_steps=5, **{**call, "guidance_scale": 2.0})
