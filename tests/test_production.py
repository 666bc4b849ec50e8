"""Producing many images: nothing lost, nothing twice, to the bit, whatever happens on the way."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import drills
from ablations import Balance
from damage import Trap
from drills import LEVELS, PLAIN, SHAPE, SOLVER, Ears, files, label, make, model
from steindiff import SOLVERS, Sampler, noise, sample
from steindiff._files import atomic, unfinished, write_bytes
from steindiff._serialization import with_checksum
from steindiff.bases import DCT
from steindiff.calibration import Calibration
from steindiff.corrections import FirstSteps, Plain, Relaxation
from steindiff.corrections.replay import StepWeights
from steindiff.grids import GRIDS
from steindiff.images import Folder
from steindiff.model import Model
from steindiff.production import Images, Manifest, to_png, verify
from steindiff.production.manifest import setting
from steindiff.sampler import levels_for
from steindiff.schedules import SCHEDULES

SEEDS = range(5, 23)
FIVE = levels_for(SOLVER, GRIDS["edm"], SCHEDULES["edm"], 5)
EMPTY = Calibration.empty(SOLVER, LEVELS, DCT(SHAPE))
SCALED = replace(EMPTY, steps=(StepWeights((1.0, 1.01, 1.0, 1.0)), *EMPTY.steps[1:]))
NUDGED = replace(EMPTY, steps=(StepWeights((1.0, 1.01 + 1e-9, 1.0, 1.0)), *EMPTY.steps[1:]))


class Told(drills.Toy):
    """The toy under another guidance that changes nothing else."""

    @property
    def conditions(self):
        return {"guidance": 2.0}


GUIDED = Model(lambda seeds: Told(seeds, 1.0, None, drills.nothing), SCHEDULES["edm"], SHAPE, name="toy")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("production") / "whole"
    assert make(folder) == (18, 0)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "set"))


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], str]:
    """The exit status of every drill, and what they said; one process, since each imports torch."""
    command = [sys.executable, "-W", "error", drills.__file__, *drills.DRILLS, str(tmp_path_factory.mktemp("drills"))]
    done = subprocess.run(command, capture_output=True, text=True)
    return {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}, done.stderr


@pytest.mark.parametrize("drill", drills.DRILLS)
def test_drill(drill: str, drilled: tuple[dict[str, int], str]):
    found, said = drilled
    if found[drill] == 77:
        pytest.skip("a small disk cannot be mounted here; the limit on the size of files was tested")
    assert found[drill] == 0, said


@pytest.mark.parametrize("sampler", [PLAIN, drills.RELAXED], ids=["plain", "relaxed"])
def test_images_are_those_of_the_sampling_loop(tmp_path: Path, sampler: Sampler):
    make(tmp_path, sampler=sampler)
    images = torch.cat(list(Images(tmp_path).batches(100)))
    for seeds in (range(5, 8), range(8, 9), range(9, 12)):  # shards of four, by three at most
        x = noise(seeds, SHAPE, LEVELS[0])
        out = sample(model().denoiser_for(seeds), x, LEVELS, SOLVER, sampler.correction).x
        expected = ((out.clamp(-1, 1) + 1) * 127.5).round().byte()
        assert torch.equal(images[seeds.start - 5 : seeds.stop - 5], expected)


def test_images_come_in_order_with_seeds_and_labels(whole: Path):
    shards = list(Images(whole).shards())
    assert [len(shard.images) for shard in shards] == [4, 4, 4, 4, 2]
    assert torch.cat([shard.seeds for shard in shards]).tolist() == list(SEEDS)
    assert torch.cat([shard.labels for shard in shards]).tolist() == [label(seed) for seed in SEEDS]
    batches = list(Images(whole).batches(3))
    assert [len(batch) for batch in batches] == [3, 1, 3, 1, 3, 1, 3, 1, 2]
    assert all(batch.dtype == torch.uint8 and batch.shape[1:] == SHAPE for batch in batches)
    assert torch.equal(torch.cat(batches), torch.cat([shard.images for shard in shards]))
    assert len(torch.cat(batches).unique(dim=0)) == 18
    with pytest.raises(ValueError, match="size must be a whole number >= 1, got 0"):
        Images(whole).batches(0)


def test_manifest_is_readable_and_checksums_are_those_of_sha256sum(whole: Path):
    manifest = json.loads((whole / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["seeds"] == {"first": 5, "count": 18}
    assert manifest["recipe"]["solver"] == {"kind": "DPMSolverMultistep", "nominal_order": 2, "lower_order_final": True}
    assert manifest["recipe"]["levels"] == [list(level) for level in LEVELS]
    assert manifest["recipe"]["correction"] == {"kind": "Plain"}
    for k in range(5):
        name = f"shard-{k:05d}.safetensors"
        digest = hashlib.sha256((whole / name).read_bytes()).hexdigest()
        assert (whole / f"{name}.sha256").read_text() == f"{digest}  {name}\n"


def test_a_finished_set_is_left_alone(folder: Path):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    told = []
    assert make(folder, listener=Ears(begin=told.append, advance=told.append, note=told.append)) == (0, 18)
    assert told == [0]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("begun", [8, 10], ids=["whole shards", "a part of a shard"])
def test_a_set_can_be_made_larger(tmp_path: Path, whole: Path, begun: int):
    assert make(tmp_path, begun) == (begun, 0)
    told = []
    assert make(tmp_path, listener=Ears(note=told.append)) == (10, 8)
    assert told == []
    assert files(tmp_path) == files(whole)
    with pytest.raises(ValueError, match="other labels"):
        make(tmp_path, 20, labels=lambda seed: 0)
    with pytest.raises(ValueError, match="labels: "):
        make(tmp_path, 20, labels=None)
    with pytest.raises(ValueError, match="batch: 3, not 2"):
        make(tmp_path, 20, batch=2)


def test_progress_is_told(tmp_path: Path):
    total, done = [], []
    make(tmp_path, listener=Ears(begin=total.append, advance=done.append))
    assert total == [18]
    assert done == [3, 1, 3, 1, 3, 1, 3, 1, 2]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, alter])
@pytest.mark.parametrize("suffix", ["", ".sha256"])
def test_damaged_shard_is_said_and_made_again(whole: Path, folder: Path, damage, suffix: str):
    damage(folder / f"shard-00002.safetensors{suffix}")
    condition = verify(folder)
    assert condition.sound == (0, 1, 3, 4)
    assert not condition.missing
    assert list(condition.damaged) == [2]
    with pytest.raises(ValueError, match=r"4 of 5 shards are sound; damaged: .*shard-00002.safetensors: .* checksum"):
        Images(folder)
    notes: list[str] = []
    assert make(folder, listener=Ears(note=notes.append)) == (4, 14)
    (text,) = notes
    assert "shard-00002.safetensors" in text
    assert "made again" in text
    assert files(folder) == files(whole)


@pytest.mark.parametrize("names", [["shard-00001.safetensors"], ["shard-00001.safetensors.sha256"]])
def test_missing_shard_is_said_and_made(whole: Path, folder: Path, names: list[str]):
    for name in names:
        (folder / name).unlink()
    assert verify(folder).missing == (1,)
    with pytest.raises(ValueError, match="4 of 5 shards are sound; missing: 1; produce the same set again"):
        Images(folder)
    assert make(folder) == (4, 14)
    assert files(folder) == files(whole)


def test_shard_damaged_while_reading_is_refused(folder: Path):
    images = Images(folder)
    alter(folder / "shard-00000.safetensors")
    with pytest.raises(ValueError, match=r"shard-00000.safetensors: .* checksum"):
        next(images.batches(2))


def test_shard_of_another_set_is_refused_and_made_again(whole: Path, folder: Path, tmp_path: Path):
    make(tmp_path / "other", sampler=drills.RELAXED)
    for path in (tmp_path / "other").glob("shard-00003.*"):
        shutil.copy(path, folder)
    assert "another set" in verify(folder).damaged[3]
    make(folder)
    assert files(folder) == files(whole)


def test_shard_in_the_place_of_another_is_refused(folder: Path):
    data = (folder / "shard-00000.safetensors").read_bytes()
    resum(folder / "shard-00001.safetensors", data)
    assert "another set" in verify(folder).damaged[1]


def resum(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.with_name(path.name + ".sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")


DIFFERENT = {
    "seeds.count: 18, not 17": {"count": 17},
    "shard_size: 4, not 5": {"size": 5},
    "batch: 3, not 2": {"batch": 2},
    "labels: ": {"labels": None},
    "recipe.nfe: 4, not 5; recipe.levels": {"sampler": Sampler(SOLVER, FIVE)},
    "recipe.correction.kind: 'Plain', not 'Replay'": {"sampler": Sampler(SOLVER, LEVELS, correction=EMPTY.replay())},
    "recipe.correction.kind: 'Plain', not 'Relaxation'": {"sampler": drills.RELAXED},
    "recipe.solver.nominal_order: 2, not 3": {"sampler": Sampler(SOLVERS["dpmpp-3m"], LEVELS)},
    "recipe.model: 'toy', not 'toys'": {"of": model(name="toys")},
    "recipe.compiled: None, not True": {"facts": {"compiled": True}},
    "recipe.conditions.guidance: None, not 2.0": {"of": GUIDED},
    "fingerprint: the model's weights": {"of": model(scale=0.999)},
}


@pytest.mark.parametrize("message", DIFFERENT)
def test_another_setting_is_refused_by_name(folder: Path, message: str):
    before = files(folder)
    with pytest.raises(ValueError, match="holds images made with other settings") as caught:
        make(folder, **DIFFERENT[message])
    assert message in str(caught.value)
    assert files(folder) == before


def test_another_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("steindiff.production.generating.__version__", "9.9")
    with pytest.raises(ValueError, match=r"recipe.steindiff: .*, not '9.9'"):
        make(folder)


def test_calibrations_are_told_apart_beyond_the_digits_of_their_file(tmp_path: Path):
    assert SCALED.to_dict()["sha256"] == NUDGED.to_dict()["sha256"]
    make(tmp_path, sampler=Sampler(SOLVER, LEVELS, correction=SCALED.replay()))
    with pytest.raises(ValueError, match=r"recipe\.correction\.weights"):
        make(tmp_path, sampler=Sampler(SOLVER, LEVELS, correction=NUDGED.replay()))


def test_settings_of_every_correction_can_be_recorded():
    for correction in (
        Plain(),
        Relaxation(activation=FirstSteps()),
        EMPTY.replay(),
        Balance(DCT(SHAPE), torch.ones(1, 4)),
    ):
        text = json.dumps(setting(correction), allow_nan=False)
        assert "0x" not in text  # no addresses, which change from process to process
        assert json.loads(text)["kind"] == type(correction).__name__
    with pytest.raises(ValueError, match="object: cannot be recorded"):
        setting(object())


@pytest.mark.parametrize("k", [1, 3])
def test_nan_names_seeds_and_step_and_leaves_nothing(tmp_path: Path, whole: Path, k: int):
    with pytest.raises(RuntimeError, match=rf"shard 1, seeds 9 to 11: step {k} of 4, .* the network's output"):
        make(tmp_path, of=model(nan=(10, k)))
    assert set(files(tmp_path)) == {"manifest.json", "shard-00000.safetensors", "shard-00000.safetensors.sha256"}
    assert make(tmp_path) == (14, 4)
    assert files(tmp_path) == files(whole)


def test_batch_that_does_not_fit_is_said_and_the_folder_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("steindiff.sampler.sample", full)
        with pytest.raises(MemoryError, match="shard 0, seeds 5 to 7: batch = 3 does not fit in memory"):
            make(tmp_path)
    assert not files(tmp_path)
    assert make(tmp_path, batch=2).made == 18


def test_unwritable_folder_is_named_before_any_work(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file") as caught:
            make(place, listener=Ears(advance=lambda amount: pytest.fail("work was done")))
        assert caught.value.filename == str(place)


def test_folder_without_a_set(tmp_path: Path):
    for look in (verify, Images):
        with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
            look(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "shard_size must be a whole number >= 1, got 0"),
        ({"batch": 0}, "batch must be a whole number >= 1, got 0"),
        ({"count": 0}, "seeds must hold at least one"),
        ({"count": 100_001, "size": 1, "labels": None}, "shard_size must be >= 2 for 100001 images, got 1"),
    ],
)
def test_arguments_out_of_range_are_named(tmp_path: Path, options, message: str):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **options)
    assert not files(tmp_path)


@pytest.mark.parametrize("seeds", [range(0, 10, 2), range(-1, 5), range(2**32 - 1, 2**32 + 1)])
def test_seeds_out_of_range_are_named(seeds: range):
    with pytest.raises(ValueError, match=r"^seeds must be "):
        Manifest(SHAPE, seeds, 4, 3, None, {})


def test_manifest_that_was_removed_comes_back(whole: Path, folder: Path):
    (folder / "manifest.json").unlink()
    (folder / "shard-00004.safetensors").unlink()
    assert make(folder) == (2, 16)
    assert files(folder) == files(whole)


def test_damaged_manifest_is_refused(folder: Path):
    alter(folder / "manifest.json")
    for look in (verify, Images, make):
        with pytest.raises(ValueError, match=r"manifest\.json"):
            look(folder)


def test_a_shard_cannot_carry_code(folder: Path, tmp_path: Path):
    sprung = tmp_path / "sprung"
    pickled, array = io.BytesIO(), io.BytesIO()
    torch.save(Trap(sprung), pickled)
    np.savez(array, images=np.array([Trap(sprung)], dtype=object))
    for data in (pickle.dumps(Trap(sprung)), pickled.getvalue(), array.getvalue()):
        resum(folder / "shard-00000.safetensors", data)
        assert "not a file of tensors" in verify(folder).damaged[0]
    assert not sprung.exists()


def test_unfinished_files_of_a_killed_run_are_never_counted_and_are_removed(folder: Path):
    """Before, `.….000007.png` was one image more to `Folder` and to `glob("*.png")`."""
    images = Images(folder)
    place = folder / "png"
    to_png(images, place)
    pid = drills.fork(lambda: killed_while_writing(place / "000007.png"))
    assert drills.result(pid) == -signal.SIGKILL
    (left,) = place.glob(".*")
    assert len(Folder(place)) == len(list(place.glob("*.png"))) == 18
    with unfinished(place) as alive:
        to_png(images, place)
        assert not left.exists()
        assert alive.exists()
    assert drills.leftovers(folder) == []


def killed_while_writing(path: Path) -> None:
    with atomic(path) as temporary:
        temporary.write_bytes(b"half")
        drills.die()


def test_files_and_their_names_reach_the_disk_before_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    real, replace_ = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (told.append("folder" if is_folder(fd) else "file"), real(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (told.append("rename"), replace_(a, b)))
    write_bytes(tmp_path / "a", b"data")
    assert told == ["file", "rename", "folder"]


def is_folder(descriptor: int) -> bool:
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def test_a_claim_of_many_images_takes_no_memory(folder: Path):
    """Before, the seeds of 4e8 images were written out, 3.2 GB, before shapes were compared."""
    content = json.loads((folder / "manifest.json").read_text())
    body = {name: value for name, value in content.items() if name != "sha256"}
    claimed = {**body, "seeds": {"first": 0, "count": 4 * 10**8}, "shard_size": 4 * 10**8}
    (folder / "manifest.json").write_text(json.dumps(with_checksum(claimed)))
    tracemalloc.start()
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            condition = verify(folder)
        allocated = [event.cpu_memory_usage for event in profile.key_averages() if hasattr(event, "cpu_memory_usage")]
        assert max([0, *allocated]) < 2**20
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert "holds" in condition.damaged[0]


def test_a_set_is_finished_with_the_threads_it_was_begun_with(whole: Path, folder: Path):
    """Before, nothing was recorded, and the bytes differed silently."""
    (folder / "shard-00002.safetensors").unlink()
    used, notes = [], []
    torch.set_num_threads(2)
    try:
        make(folder, tick=lambda: used.append(torch.get_num_threads()), listener=Ears(note=notes.append))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert set(used[1:]) == {1}  # the first call takes the fingerprint
    assert notes == ["threads: the set was begun with 1, so it is finished with as many"]
    assert files(folder) == files(whole)


def test_other_instructions_are_another_set(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX1024")
    with pytest.raises(ValueError, match=r"recipe\.instructions: .*, not 'AVX1024'"):
        make(folder)
