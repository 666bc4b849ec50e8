"""What the commands do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import toys
from steindiff import GRIDS, VP, Model, Sampler, datasets
from steindiff.calibration import Calibration
from steindiff.cli.commands import evaluate
from steindiff.cli.options import MODELS
from steindiff.denoisers import Gaussian
from steindiff.metrics import InceptionFeatures, Moments
from steindiff.production import Images

COMPARE = "compare --model digits --nfe 4,5 --num 24"


def pixels(path):
    with Image.open(path) as image:
        return np.array(image)


def test_compare(steindiff, tmp_path):
    done = steindiff(f"{COMPARE} --out {tmp_path}")
    assert done.code == 0
    assert done.err.startswith("steindiff: 24 images are too few to rank by own distance")
    assert "\x1b" not in done.out
    for text in ("EDM grid", "log-SNR grid", "relaxed UniPC-3", "calibrated", "many steps (24)", "report.html"):
        assert text in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.png", "report.html", "results.json"]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["nfe"] for row in rows] == [4] * 5 + [5] * 5 + [24]
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
    assert "Inception features (FID)" in " ".join(done.out.split())
    wrong = steindiff(f"compare --model digits --features beauty --out {tmp_path / 'out'}")
    assert "features = 'beauty' is not known" in wrong.err


def test_compare_says_what_it_calibrates(steindiff, tmp_path):
    done = steindiff(f"compare --model hungry --num 4 --batch 4 --quick --json --out {tmp_path}")
    assert done.code == 0
    assert "no calibration of hungry is at hand for dpmpp-2m at 5 evaluations: calibrating on 12 seeds" in done.err
    found = json.loads(done.out)
    assert [row["method"] for row in found["rows"]] == ["edm", "logsnr", "calibrated", "reference"]
    assert found["settings"]["calibrated now"] == "[5], 12 seeds"


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


SAMPLE = "sample --model digits --nfe 3 --method edm --num 5 --seed 7 --batch 2 --shard 2"


def test_sample_goes_on_and_ends_with_the_same_bytes(steindiff, tmp_path):
    line = f"{SAMPLE} --out {tmp_path}"
    assert "5 new images" in steindiff(line).out
    whole = bytes_of(tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    (tmp_path / "shard-00002.safetensors").write_bytes(b"damaged")
    done = steindiff(f"{line} --json")
    assert (json.loads(done.out)["new"], json.loads(done.out)["kept"]) == (3, 2)
    assert "shard-00002.safetensors: 7 bytes" in done.err
    assert "made again" in done.err
    assert bytes_of(tmp_path) == whole
    assert "0 new images" in steindiff(line).out


def test_sample_refuses_other_settings(steindiff, tmp_path):
    assert steindiff(f"{SAMPLE} --out {tmp_path}").code == 0
    whole = bytes_of(tmp_path)
    for other, says in (("--nfe 4", "recipe.nfe: 3, not 4"), ("--num 4", "count: 5, not 4"), ("--batch 1", "batch: 2")):
        done = steindiff(f"{SAMPLE} --out {tmp_path} {other}")
        assert done.code == 1
        assert says in done.err
        assert done.err.count("\n") == 1
    assert bytes_of(tmp_path) == whole


def test_sample_makes_a_set_larger(steindiff, tmp_path):
    assert steindiff(f"{SAMPLE} --out {tmp_path / 'a'}").code == 0
    larger = steindiff(f"{SAMPLE} --num 9 --out {tmp_path / 'a'}")
    assert "were there" in larger.out
    assert steindiff(f"{SAMPLE} --num 9 --out {tmp_path / 'b'}").code == 0
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_sample_as_plain_files(steindiff, tmp_path):
    assert steindiff(f"{SAMPLE} --png --npz --out {tmp_path}").code == 0
    assert sorted(path.name for path in (tmp_path / "png").iterdir()) == [f"{seed:06d}.png" for seed in range(7, 12)]
    expected = torch.cat(list(Images(tmp_path).batches(5)))
    pictures = np.stack([pixels(path) for path in sorted((tmp_path / "png").iterdir())])
    np.testing.assert_array_equal(pictures, expected[:, 0])
    archive = tmp_path / "images.npz"
    with np.load(archive) as found:
        np.testing.assert_array_equal(found["images"], expected.movedim(1, -1))
        assert found["seeds"].tolist() == [7, 8, 9, 10, 11]
        assert json.loads(str(found["settings"]))["recipe"]["nfe"] == 3
    before = archive.read_bytes()
    archive.unlink()
    assert "0 new images" in steindiff(f"{SAMPLE} --npz --out {tmp_path}").out
    assert archive.read_bytes() == before


def test_sample_wants_a_folder(steindiff, tmp_path):
    done = steindiff(f"{SAMPLE} --out {tmp_path / 'x.npz'}")
    assert done.code == 1
    assert "need a folder; --npz writes" in done.err


def test_calibrate_then_sample(steindiff, tmp_path):
    done = steindiff(f"calibrate --model digits --nfe 3,4 --num 16 --seed 100 --out {tmp_path} --json")
    assert done.code == 0
    assert sorted(json.loads(done.out)) == [str(tmp_path / f"digits-dpmpp-2m-{n}.json") for n in (3, 4)]
    path = tmp_path / "digits-dpmpp-2m-4.json"
    assert Calibration.load(path).nfe == 4
    assert steindiff(f"sample --model digits --calibration {path} --num 2 --out {tmp_path / 'samples'}").code == 0
    assert json.loads((tmp_path / "samples" / "manifest.json").read_text())["recipe"]["nfe"] == 4
    wrong = steindiff(f"sample --model fashion --calibration {path} --num 2 --out {tmp_path / 'other'}")
    assert wrong.code == 1
    assert "calibration does not fit the model: shape" in wrong.err
    wrong = steindiff(f"sample --model digits --guidance 2 --calibration {path} --num 2 --out {tmp_path / 'other'}")
    assert "guidance: measured with 1.0, asked for 2.0" in wrong.err
    for other, says in (
        ("--nfe 8 --solver ddim", "--solver and --nfe: the calibration decides; leave it out"),
        (f"--calibration {path}", "a second file: the calibration decides; leave it out"),
    ):
        wrong = steindiff(f"sample --model digits --calibration {path} {other} --out {tmp_path / 'other'}")
        assert (wrong.code, says in wrong.err) == (1, True)
    for other in ("--nfe 3", "--nfe 4 --solver ddim"):
        wrong = steindiff(f"compare --model digits --calibration {path} {other} --out {tmp_path / 'other'}")
        assert "calibration: one is for dpmpp-2m at 4 evaluations; choose these, or leave it out" in wrong.err
    done = steindiff(
        f"compare --model hungry --nfe 3,4 --num 4 --batch 8 --quick --calibration {path} --json --out {tmp_path / 'c'}"
    )
    titles = [(row["title"], row["nfe"]) for row in json.loads(done.out)["rows"]]
    assert {("calibrated", 3), ("calibrated", 4)} <= set(titles)
    assert "at hand for dpmpp-2m at 3 evaluations: calibrating on 12 seeds now" in done.err
    assert "the batch of 8 is halved" in done.err


def test_calibrate_prints_ratios_of_noise_to_signal(steindiff, tmp_path, monkeypatch):
    """Under VP σ says nothing near pure noise: "σ 1 → 1 → 0.998"."""
    subject = Model(Gaussian(torch.zeros(3), torch.ones(3)), VP(), (3,), name="flat")
    monkeypatch.setitem(MODELS, "flat", lambda guidance, device, **options: subject)
    done = steindiff(f"calibrate --model flat --nfe 3 --num 6 --search 0 --out {tmp_path}")
    levels = Calibration.load(tmp_path / "flat-dpmpp-2m-3.json").levels
    assert f"σ/α {' → '.join(f'{level.ratio:.3g}' for level in levels)}\n" in done.out
    assert levels[0].ratio > 100


def test_calibrate_for_few(steindiff, tmp_path):
    done = steindiff(f"calibrate --model digits --few --nfe 3 --num 12 --search 1 --out {tmp_path}")
    assert done.code == 0, done.err
    made = Calibration.load(next(tmp_path.glob("*-dpmpp-2m-3.json")))
    assert "iterations=1" in made.provenance["search"]
    assert "start=0.75" in made.provenance["search"]
    assert "probe=3.0" in made.provenance["search"]
    wrong = steindiff(f"calibrate --model digits --few --search 0 --out {tmp_path}")
    assert "search must be >= 1 with --few, got 0" in wrong.err


@pytest.mark.parametrize("method", ["edm", "logsnr"])
def test_one_name_one_grid(steindiff, tmp_path, method):
    """`--method edm` steps where Python's `GRIDS["edm"]` does."""
    assert steindiff(f"sample --model digits --nfe 3 --method {method} --num 2 --batch 2 --out {tmp_path}").code == 0
    made = (Sampler(grid=GRIDS[method], nfe=3)(toys.model(), range(2)).x + 1.0) * 127.5
    stored = torch.cat(list(Images(tmp_path).batches(2)))
    assert (stored.float() - made.clamp(0, 255)).abs().max() <= 0.51


def test_one_image_is_not_images(steindiff, tmp_path):
    assert "1 new image in" in steindiff(f"{SAMPLE} --num 1 --out {tmp_path}").out


@pytest.mark.parametrize(("options", "measured"), [("", True), ("--no-lipschitz", False), ("--quick", False)])
def test_lipschitz_constants_have_a_switch(steindiff, tmp_path, options, measured):
    done = steindiff(f"compare --model digits --nfe 3 --num 2 --json {options} --out {tmp_path}")
    assert any(row["lipschitz"] for row in json.loads(done.out)["rows"]) is measured


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
        steindiff(f"sample --model digits --method edm --num 20 --seed {seed} --png --npz --out {tmp_path / name}")
    metrics = "--metrics fid,kid,precision-recall --json"
    found = [
        json.loads(steindiff(f"evaluate {tmp_path / 'a'} --reference {tmp_path / b} {metrics}").out)
        for b in ("b", "b/images.npz", "b/png", "a")
    ]
    assert found[0]["samples"] == 20
    for other in found[1:3]:
        assert [other[name] for name in ("fid", "kid", "precision-recall")] == [
            found[0][name] for name in ("fid", "kid", "precision-recall")
        ]
    assert found[3]["fid"] == pytest.approx(0, abs=1e-6)
    assert found[3]["precision-recall"] == {"precision": 1, "recall": 1}
    assert "fid" in steindiff(f"evaluate {tmp_path / 'a'} --reference {tmp_path / 'b'} --metrics fid").out


def test_fid_of_few_images_says_by_how_much_they_raise_it(steindiff, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.Evaluation, "inception", Pooled())
    steindiff(f"sample --model digits --method edm --num 20 --out {tmp_path / 'a'}")
    steindiff(f"sample --model digits --method logsnr --num 20 --seed 40 --out {tmp_path / 'b'}")
    done = steindiff(f"evaluate {tmp_path / 'a'} --reference {tmp_path / 'b'} --metrics fid --json")
    (remark,) = json.loads(done.out)["remarks"]
    assert remark.startswith("fid: 20 images raise it by about")
    assert remark in " ".join(done.err.split())
    low, high = (float(part) for part in remark.split("would give ")[1].split(";")[0].split(" to "))
    assert low <= json.loads(done.out)["fid"] <= high


def test_small_and_unlike_sets_are_remarked(steindiff, tmp_path, monkeypatch):
    """KID of eight images, and FID of small grey ones against CIFAR-10, were numbers without a word."""
    monkeypatch.setattr(evaluate.Evaluation, "inception", Pooled())
    monkeypatch.setattr(evaluate.references, "load", lambda name: Moments.of(torch.randn(9, 6)))
    line = f"sample --model digits --method edm --png --out {tmp_path}"
    assert steindiff(f"{line}/a --num 8").code == steindiff(f"{line}/b --num 8 --seed 9").code == 0
    kid = steindiff(f"evaluate {tmp_path}/a --reference {tmp_path}/b --metrics kid,precision-recall --json")
    assert json.loads(kid.out)["remarks"] == [
        "kid, precision-recall: of 8 images; fewer than 10000 compare with equal numbers only"
    ]
    for images in ("a", "a/png"):
        fid = steindiff(f"evaluate {tmp_path}/{images} --reference cifar10-train --metrics fid")
        assert "reference: it is colour, 32 × 32, the images are grey, 8 × 8; distances measure that" in fid.err


def test_what_ships_is_described():
    assert set(evaluate.SHIPPED) == {path.stem for path in evaluate.references.FOLDER.glob("*.npz")}


def test_evaluate_against_the_models_own_samples(steindiff, tmp_path, monkeypatch):
    def unavailable():
        raise datasets.Unavailable("no network")

    monkeypatch.setattr(datasets, "inception", unavailable)
    monkeypatch.setattr(datasets, "lpips", unavailable)
    found = {}
    for name, method in (("fine", "--nfe 24 --method edm"), ("coarse", "--nfe 3 --method edm")):
        steindiff(f"sample --model digits {method} --num 40 --npz --out {tmp_path / name}")
        done = steindiff(f"evaluate {tmp_path / name} --metrics own --json")
        found[name] = json.loads(done.out)["own"]
        assert "lpips: not measured: no network" in done.err
        assert "own: random features of 40 images; as many others would give" in done.err
    fine, coarse = found["fine"], found["coarse"]
    assert fine["floor"] == pytest.approx(coarse["floor"])
    assert abs(fine["distance"] - fine["floor"]) < 0.05 * fine["floor"]
    assert coarse["distance"] > 1.2 * coarse["floor"]
    assert coarse["psnr"] < fine["psnr"]
    assert fine["spread"] == pytest.approx(1, abs=0.02)
    archive = tmp_path / "coarse" / "images.npz"
    assert "own: not measured: needs --model" in steindiff(f"evaluate {archive} --metrics own").err
    named = json.loads(steindiff(f"evaluate {archive} --metrics own --model digits --json").out)["own"]
    assert named.keys() == {"distance", "floor"}
    assert named["distance"] == pytest.approx(coarse["distance"], rel=1e-4)
    other = steindiff(f"evaluate {tmp_path / 'coarse'} --metrics own --model hungry --batch 4")
    assert "own" in other.err


def test_fid_streams(steindiff, tmp_path, monkeypatch):
    seen = []

    class Watched(Pooled):
        def forward(self, images):
            seen.append(len(images))
            return super().forward(images)

    monkeypatch.setattr(evaluate.Evaluation, "inception", Watched())
    monkeypatch.setattr(evaluate, "gather", None)  # only measures that need all features may call it
    monkeypatch.setattr(evaluate, "FEW", 0)
    steindiff(f"{SAMPLE} --out {tmp_path}")
    done = steindiff(f"evaluate {tmp_path} --reference {tmp_path} --metrics fid --batch 2 --json")
    assert json.loads(done.out)["fid"] == pytest.approx(0, abs=1e-6)
    assert seen == [2, 2, 1, 2, 2, 1]


def test_evaluate_refuses_an_incomplete_set(steindiff, tmp_path):
    steindiff(f"{SAMPLE} --out {tmp_path}")
    (tmp_path / "shard-00001.safetensors.sha256").unlink()
    done = steindiff(f"evaluate {tmp_path} --metrics fid")
    assert done.code == 1
    assert "2 of 3 shards are sound; missing: 1" in done.err


def test_compare_takes_a_solver_of_two_evaluations_a_step(steindiff, tmp_path):
    """Heun spends even numbers on grids that end above σ = 0; the many-step reference has a solver of its own."""
    done = steindiff(f"compare --model digits --solver heun --nfe 4 --num 4 --json --out {tmp_path}")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert {row["nfe"] for row in rows} == {4, 24}
    assert all(row["network_calls"] == row["nfe"] for row in rows)


def test_evaluate_says_what_it_cannot(steindiff, tmp_path, monkeypatch):
    def unavailable():
        raise datasets.Unavailable("no network")

    monkeypatch.setattr(datasets, "inception", unavailable)
    monkeypatch.setattr(datasets, "efficientnet", unavailable)
    steindiff(f"sample --model digits --method edm --num 4 --out {tmp_path}")
    done = steindiff(f"evaluate {tmp_path} --reference {tmp_path} --metrics fd-efficientnet")
    assert "fd-efficientnet: not measured: no network" in done.err
    assert "needs --reference" in steindiff(f"evaluate {tmp_path} --metrics fd-efficientnet").err
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
        ("evaluate OUT --metrics fid,beauty", "metrics = 'beauty' is not known"),
        ("evaluate OUT/bad.npz", "not an archive of images"),
        (
            "evaluate OUT/set --reference foo --metrics is",
            "reference = 'foo': no such file or folder; choose from cifar",
        ),
        ("evaluate OUT/set --reference cifar10", "no such file or folder; did you mean 'cifar10-train'?"),
        ("evaluate OUT --batch 0", "batch must be a whole number >= 1, got 0"),
    ],
)
def test_evaluate_mistakes(steindiff, tmp_path, line, says):
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    if "/set" in line:
        steindiff(f"sample --model digits --method edm --num 2 --out {tmp_path / 'set'}")
    done = steindiff(line.replace("OUT", str(tmp_path)))
    assert done.code == 1
    assert says in done.err
    assert done.err.count("\n") == 1


def test_diagnose(steindiff, tmp_path):
    done = steindiff(f"diagnose --model digits --num 8 --nfe 4 --out {tmp_path} --json")
    assert done.code == 0, done.err
    names = {"lipschitz", "certificate", "gammas"}
    assert set(json.loads(done.out)) == names
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png" for name in names} | {"diagnostics.json"}
    assert pixels(tmp_path / "gammas.png").std() > 0


def test_table_fits_eighty_columns(steindiff, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = steindiff(f"{COMPARE} --out {tmp_path}")
    for title in ("method", "NFE", "Fréchet", "energy", "distance", "calls", "backward", "seconds"):
        assert title in done.out
    assert "…" not in done.out


def test_narrow_terminals_get_fewer_columns_and_whole_numbers(steindiff, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "45")
    done = steindiff(f"{COMPARE} --out {tmp_path}")
    assert "…" not in done.out
    assert max(map(len, done.out.split("report.html")[0].splitlines()[:-1])) <= 45
    for row in json.loads((tmp_path / "results.json").read_text())["rows"]:
        assert f"{row['honest']:.1f}" in done.out
    assert "seconds the terminal is too narrow" in " ".join(done.out.split())
