"""What the commands do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from steindiff import datasets
from steindiff.calibration import Calibration
from steindiff.cli.commands import evaluate
from steindiff.metrics import InceptionFeatures

COMPARE = "compare --model digits --nfe 4,5 --num 24"


def pixels(path):
    with Image.open(path) as image:
        return np.array(image)


def test_compare(steindiff, tmp_path):
    done = steindiff(f"{COMPARE} --out {tmp_path}")
    assert done.code == 0
    assert done.err == ""  # quiet when piped
    assert "\x1b" not in done.out
    for text in ("EDM grid", "log-SNR grid", "relaxation", "calibrated", "many steps (24)", "report.html"):
        assert text in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.png", "report.html", "results.json"]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["nfe"] for row in rows] == [4] * 4 + [5] * 4 + [24]
    for row in rows:
        assert row["network_calls"] == row["nfe"]
        assert bool(row["backward_passes"]) == (row["method"] == "relaxation")
    assert rows[-1]["distance"] == 0
    assert rows[-1]["energy_ratio"] == 1
    assert pixels(tmp_path / "grid.png").ndim == 3


def test_compare_json(steindiff, tmp_path):
    done = steindiff(f"{COMPARE} --json --out {tmp_path}")
    assert json.loads(done.out) == json.loads((tmp_path / "results.json").read_text())
    assert done.err == ""


def test_compare_by_fid(steindiff, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "inception", lambda: tmp_path)
    monkeypatch.setattr(InceptionFeatures, "load", lambda path, device: Pooled())
    done = steindiff(f"compare --model digits --num 8 --features inception --out {tmp_path / 'out'}")
    assert done.code == 0, done.err
    assert "Inception features (FID) to the many-step samples" in " ".join(done.out.split())
    wrong = steindiff(f"compare --model digits --features beauty --out {tmp_path / 'out'}")
    assert "features = 'beauty': allowed are random, inception" in wrong.err


def test_compare_says_what_is_left_out(steindiff, tmp_path):
    done = steindiff(f"compare --model hungry --num 4 --batch 4 --out {tmp_path}")
    assert done.code == 0
    assert "calibrated: no calibration of digits for this solver at 5 evaluations, left out" in done.err


def test_sample_folder_goes_on(steindiff, tmp_path):
    line = f"sample --model digits --nfe 3 --out {tmp_path} --method edm"
    assert steindiff(f"{line} --num 3 --seed 7").code == 0
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["000007.png", "000008.png", "000009.png"]
    before = (tmp_path / "000008.png").stat().st_mtime_ns
    (tmp_path / "000007.png").unlink()
    done = steindiff(f"{line} --num 5 --seed 7 --json")
    assert json.loads(done.out)["new"] == 3
    assert json.loads(done.out)["kept"] == 2
    assert (tmp_path / "000008.png").stat().st_mtime_ns == before
    wrong = steindiff(f"sample --model digits --nfe 4 --out {tmp_path} --method edm")
    assert wrong.code == 1
    assert "nfe 3, not 4" in wrong.err


def test_sample_archive_goes_on(steindiff, tmp_path):
    path = tmp_path / "new" / "samples.npz"
    line = f"sample --model digits --nfe 3 --out {path} --method logsnr"
    assert steindiff(f"{line} --num 2").code == 0
    done = steindiff(f"{line} --num 5 --batch 2")
    assert "3 new images" in done.out
    assert "2 were there" in done.out
    with np.load(path) as found:
        assert found["images"].shape == (5, 8, 8, 1)
        assert found["images"].dtype == np.uint8
        assert found["seeds"].tolist() == [0, 1, 2, 3, 4]
    steindiff(f"sample --model digits --nfe 3 --out {tmp_path / 'png'} --method logsnr --num 5")
    same = np.stack([pixels(tmp_path / "png" / f"{i:06d}.png") for i in range(5)])
    with np.load(path) as found:
        np.testing.assert_array_equal(found["images"][..., 0], same)


def test_sample_refuses_a_foreign_archive(steindiff, tmp_path):
    (tmp_path / "x.npz").write_bytes(b"something else")
    done = steindiff(f"sample --model digits --out {tmp_path / 'x.npz'}")
    assert done.code == 1
    assert "not an archive of samples" in done.err


def test_calibrate_then_sample(steindiff, tmp_path):
    done = steindiff(f"calibrate --model digits --nfe 3,4 --num 16 --seed 100 --out {tmp_path} --json")
    assert done.code == 0
    assert sorted(json.loads(done.out)) == [str(tmp_path / f"digits-dpmpp-2m-{n}.json") for n in (3, 4)]
    path = tmp_path / "digits-dpmpp-2m-4.json"
    assert Calibration.load(path).nfe == 4
    assert steindiff(f"sample --model digits --calibration {path} --num 2 --out {tmp_path / 'samples'}").code == 0
    facts = json.loads((tmp_path / "samples" / "sampling.json").read_text())
    assert facts["nfe"] == 4
    wrong = steindiff(f"sample --model fashion --calibration {path} --num 2 --out {tmp_path / 'other'}")
    assert wrong.code == 1
    assert "calibration does not fit: shape" in wrong.err
    wrong = steindiff(f"sample --model digits --guidance 2 --calibration {path} --num 2 --out {tmp_path / 'other'}")
    assert "guidance: measured with 1.0, asked for 2.0" in wrong.err
    done = steindiff(
        f"compare --model hungry --nfe 3,4 --num 4 --batch 4 --calibration {path} --json --out {tmp_path / 'c'}"
    )
    titles = [(row["title"], row["nfe"]) for row in json.loads(done.out)["rows"]]
    assert ("calibrated", 4) in titles
    assert ("calibrated", 3) not in titles


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": 99}'])
def test_calibration_file_damaged(steindiff, tmp_path, content):
    path = tmp_path / "c.json"
    path.write_text(content)
    done = steindiff(f"sample --model digits --calibration {path} --out {tmp_path / 'samples'}")
    assert done.code == 1
    assert str(path) in done.err


class Pooled(torch.nn.Module):
    """A stand-in for Inception: mean and deviation of each channel."""

    def forward(self, images):
        x = images.float().flatten(2) / 255
        return torch.cat([x.mean(2), x.std(2)], dim=1)


def test_evaluate(steindiff, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.Evaluation, "inception", Pooled())
    for name, seed in (("a", 0), ("b", 50)):
        steindiff(f"sample --model digits --method edm --num 20 --seed {seed} --out {tmp_path / name}")
    steindiff(f"sample --model digits --method edm --num 20 --seed 50 --out {tmp_path / 'b.npz'}")
    metrics = "--metrics fid,kid,precision-recall --json"
    found = [
        json.loads(steindiff(f"evaluate {tmp_path / 'a'} --reference {tmp_path / b} {metrics}").out)
        for b in ("b", "b.npz", "a")
    ]
    assert found[0]["samples"] == 20
    assert found[0]["fid"] == pytest.approx(found[1]["fid"])
    assert found[0]["kid"] == pytest.approx(found[1]["kid"])
    assert found[0]["precision-recall"] == found[1]["precision-recall"]
    assert found[2]["fid"] == pytest.approx(0, abs=1e-6)
    assert found[2]["precision-recall"] == {"precision": 1, "recall": 1}
    assert "fid" in steindiff(f"evaluate {tmp_path / 'a'} --reference {tmp_path / 'b'} --metrics fid").out


def test_evaluate_says_what_it_cannot(steindiff, tmp_path, monkeypatch):
    def unavailable():
        raise datasets.Unavailable("no network")

    monkeypatch.setattr(datasets, "inception", unavailable)
    steindiff(f"sample --model digits --method edm --num 4 --out {tmp_path}")
    done = steindiff(f"evaluate {tmp_path} --reference cifar10-train --metrics fid")
    assert done.code == 1
    assert "fid: not measured: no network" in done.err
    assert "none of those asked for could be measured" in done.err
    monkeypatch.setattr(evaluate.Evaluation, "inception", Pooled())
    done = steindiff(f"evaluate {tmp_path} --reference cifar10-train --metrics kid")
    assert "holds statistics only" in done.err
    assert "needs --reference" in steindiff(f"evaluate {tmp_path} --metrics kid").err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("evaluate OUT/nowhere", "no such file or folder"),
        ("evaluate OUT", "holds no image"),
        ("evaluate OUT --metrics fid,beauty", "metrics = 'beauty': allowed are fid, kid"),
        ("evaluate OUT/bad.npz", "not an archive of images"),
        ("evaluate OUT --batch 0", "batch = 0"),
    ],
)
def test_evaluate_mistakes(steindiff, tmp_path, line, says):
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    done = steindiff(line.replace("OUT", str(tmp_path)))
    assert done.code == 1
    assert says in done.err
    assert done.err.count("\n") == 1


def test_diagnose(steindiff, tmp_path):
    done = steindiff(f"diagnose --model digits --num 8 --nfe 4 --out {tmp_path} --json")
    assert done.code == 0, done.err
    names = {"lipschitz", "certificate", "gammas", "decay", "oscillation"}
    assert set(json.loads(done.out)) == names
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png" for name in names} | {"diagnostics.json"}
    assert pixels(tmp_path / "gammas.png").std() > 0


def test_table_fits_eighty_columns(steindiff, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = steindiff(f"{COMPARE} --out {tmp_path}")
    for title in ("method", "NFE", "Fréchet", "energy", "distance", "calls", "backward", "seconds"):
        assert title in done.out
    assert "…" not in done.out
