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
