"""The benchmark measures what it says: counts are exact, fields are there; no test looks at how long anything took."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import toys
from bench import SECTIONS, Cost, Scope, Spread, Timing, bench, hosts, interleaved
from bench.__main__ import main
from bench.plot import plot
from bench.report import HEAD, markdown, rows
from bench.sections import distance, random_unet
from bench.timing import Stopwatch, Watched, on_gpu, wait
from bench.writing import write
from problems import FLOAT
from steindiff import SOLVERS, Model, noise, sample
from steindiff.denoisers import Autocast, EDMDenoiser
from steindiff.models import ByLabel
from steindiff.schedules import EDM

CPU = torch.device("cpu")
SCRIPTS = sorted(path.stem for path in Path(hosts.__file__).parents[1].glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_can_be_imported(script: str):
    """What they take from the package is still there."""
    module = importlib.import_module(script)
    assert callable(getattr(module, "main", None)) or script in ("pages", "recording", "training_data")


BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
TINY = Scope((2,), (2,), 1, 2, (1, 2), (2, 3), (8, 16), (1, 2), memory=1)


def random_subject() -> Model:
    """A random network, wired as those that ship."""
    return Model(ByLabel(random_unet(8, CPU, seed=0), EDMDenoiser, 1), EDM(), (3, 8, 8), name="random")


@pytest.fixture(scope="module")
def result():
    return bench(
        random_subject(), SOLVERS["dpmpp-2m"], 2, TINY, sections=["loop", "corrections", "scaling", "precision"]
    )


def by(result, section: str, name: str):
    return [r for r in result["records"] if r["section"] == section and r["name"] == name]


def test_the_record_says_what_it_ran_on(result):
    assert {"seed", "model", "solver", "nfe", "rounds", "device", "kind", "threads", "versions"} <= set(result)
    assert {"torch", "python", "steindiff", "diffusers"} <= set(result["versions"])
    assert json.loads(json.dumps(result)) == result
    measured = [record for record in result["records"] if "ratio" in record]
    for record in measured:
        low, median, high = (record["ratio"][key] for key in ("low", "median", "high"))
        assert 0 < low <= median <= high < math.inf
        assert record["against"]
        assert "seconds" not in record  # absolute times are a GPU's
    own = [record for record in measured if record["name"] == record["against"]]
    assert all(record["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0} for record in own)


def test_calls_and_backward_passes_are_counted(result):
    for record in by(result, "loop", "plain"):
        assert (record["nfe"], record["network_calls"], record["backward_passes"]) == (2, 2, 0)
        assert 0 < record["outside"]["median"] < 1
    passes = {r["name"]: (r["network_calls"], r["backward_passes"]) for r in result["records"] if "grid" in r}
    # The last step goes to sigma = 0, where the relaxation does not act.
    assert passes["relaxation, 1 probe"] == passes["network alone, 1 backward pass"] == (2, 1)
    assert passes["relaxation, 5 probes"] == passes["network alone, 5 backward passes"] == (2, 5)
    assert passes["relaxation, 5 probes together"] == (2, 5)
    assert passes["relaxation, analytical"] == (2, 0)


def test_the_other_loops_make_the_same_samples(result):
    for record in by(result, "loop", "diffusers"):
        assert record["network_calls"] == 2
        assert record["difference"] < 0.1  # a random network magnifies rounding
    assert all(record["difference"] < 0.01 for record in by(result, "precision", "channels-last"))
    assert all(0 < record["difference"] < 1.0 for record in by(result, "precision", "bfloat16"))


def test_the_loop_of_diffusers_is_ours_to_rounding():
    denoiser = toys.denoiser()
    theirs, levels = hosts.diffusers_loop(denoiser, EDM(), 6, CPU)
    x = noise(range(3), toys.SHAPE, levels[0])
    assert distance(theirs(x / levels[0].sigma), sample(denoiser, x, levels, SOLVERS["dpmpp-2m"]).x) < 1e-4


def test_sweeps_cover_every_axis(result):
    found = {axis: [r["value"] for r in result["records"] if r.get("axis") == axis] for axis in ("batch", "nfe")}
    assert found == {"batch": [1, 2], "nfe": [2, 3]}
    assert [r["network_calls"] for r in result["records"] if r.get("axis") == "nfe"] == [2, 3]
    assert [r["backward_passes"] for r in result["records"] if r.get("axis") == "probes"] == [0, 1, 2]
    bounded = by(result, "memory", "bounded")
    assert [record["resolution"] for record in bounded] == [8, 16]
    assert all(record["samples_at_a_time"] == 1 for record in bounded)  # one byte is room for no more


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.schedulers.scheduling_dpmsolver_multistep", None)
    short = Scope((1,), (1,), 1, 1, (1,))
    missing = bench(random_subject(), SOLVERS["dpmpp-2m"], 2, short, sections=["loop"])["records"]
    reasons = {record["name"]: record["missing"] for record in missing if "missing" in record}
    assert reasons["diffusers"].startswith("diffusers: not installed")
    assert reasons["replay"] == "no calibration at 2 evaluations ships"
    other = bench(toys.model(), SOLVERS["ddim"], 2, short, sections=["loop", "compile"])["records"]
    reasons = {record["name"]: record["missing"] for record in other if "missing" in record}
    assert reasons.pop("replay") == "no calibration at 2 evaluations ships"
    assert reasons == {
        "diffusers": "diffusers: compared for dpmpp-2m only",
        "compile": "the model has no network with labels",
    }
    with pytest.raises(hosts.Missing):
        hosts.diffusers_loop(toys.denoiser(), EDM(), 2, CPU)


def test_a_section_that_fails_does_not_take_the_others_along(monkeypatch):
    def failing(here):
        yield {"section": "compile", "name": "first", "missing": "nothing"}
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setitem(SECTIONS, "compile", failing)
    short = Scope((1,), (1,), 1, 1, (1,))
    found = bench(toys.model(), SOLVERS["ddim"], 2, short, sections=["compile", "loop"])["records"]
    assert found[1] == {"section": "compile", "name": "rest of compile", "missing": "CUDA out of memory."}
    assert [record["name"] for record in found if "ratio" in record] == ["plain"]


def test_a_solver_of_several_stages_is_compared_with_as_many_calls():
    bare = toys.model()
    records = bench(bare, SOLVERS["heun"], 5, Scope((2,), (2,), 1, 1, (1,)), sections=["loop", "corrections"])
    calls = {record["name"]: record["network_calls"] for record in records["records"] if "ratio" in record}
    halved = {calls.pop(f"relaxation, {n} on half of the batch") for n in ("1 probe", "5 probes")}
    assert (set(calls.values()), halved) == ({5}, {9})  # two parts where probes act, which is not in the last step
    passes = {record["name"]: record["backward_passes"] for record in records["records"] if "ratio" in record}
    assert passes["network alone, 1 backward pass"] == passes["relaxation, 1 probe"] == 4


def test_ratios_are_formed_within_a_round():
    a, b = (Timing(Cost(1, 1), seconds) for seconds in ([1.0, 10.0, 4.0], [2.0, 20.0, 8.0]))
    assert b.against(a) == Spread(2.0, 2.0, 2.0)  # a machine that slows down for a round slows both
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)


def test_every_run_is_timed_once_a_round_in_changing_order():
    order: list[str] = []
    runs = {name: partial(lambda name: order.append(name) or Cost(1, 1), name) for name in "abc"}
    timings = interleaved(runs, CPU, 6)
    assert order[:6] == ["a", "a", "b", "b", "c", "c"]  # warm-up, cost
    rounds = [tuple(order[i : i + 3]) for i in range(6, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(rounds) == 6
    assert len(set(rounds)) > 1
    assert all(len(timing.seconds) == 6 for timing in timings.values())


def test_a_stopwatch_adds_up_its_blocks_alone(monkeypatch):
    now = iter([0.0, 1.0, 5.0, 7.0])
    monkeypatch.setattr(time, "process_time", lambda: next(now))
    watch = Stopwatch(CPU)
    denoiser = Watched(toys.denoiser(), watch)
    level = EDM().level(1.0)
    for _ in range(2):
        denoiser(noise([0], toys.SHAPE, level), level)
    assert watch.seconds == 3.0


def test_a_gpu_is_watched_without_being_stopped(monkeypatch):
    """The calls made of a GPU, on a stand-in for it."""
    device = torch.device("cuda")
    held = iter([100, 350])

    class Event:
        now = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = Event.now

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: next(held))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(held))
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def run() -> Cost:
        for message in ("called a synchronizing CUDA operation", "something else"):
            warnings.warn(message, stacklevel=1)
        return Cost(3, 3)

    assert on_gpu(run, device) == Timing(Cost(3, 3), [], 250, 1)
    watch = Stopwatch(device)
    for _ in range(2):
        with watch.running():
            Event.now += 500.0
        Event.now += 9.0  # outside
    assert watch.seconds == 1.0


def test_every_kind_of_gpu_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device.type))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    for kind in ("cpu", "cuda", "mps"):
        wait(torch.device(kind))
    assert waited == ["cuda", "mps"]


def test_half_precision_stays_inside_the_network():
    network, level = random_unet(8, CPU, seed=0), EDM().level(1.0)
    full = EDMDenoiser(network)
    half = Autocast(full)
    x = noise(range(3), (3, 8, 8), level)
    assert half(x, level).dtype == torch.float32
    assert half(x.to(FLOAT), level).dtype == FLOAT
    assert not torch.equal(half(x, level), full(x, level))
    assert distance(half(x, level), full(x, level)) < 0.2
    assert distance(half.subset(slice(1, 2), 3)(x[1:2], level), half(x, level)[1:2]) < 0.1
    assert half.calls == full.calls
    with pytest.raises(ValueError, match=r"dtype must be torch\.bfloat16 or torch\.float16, got torch\.float64"):
        Autocast(full, torch.float64)


def test_files_and_table(result, tmp_path, monkeypatch):
    paths = write(result, tmp_path, pytest.fail)
    assert [path.name for path in paths] == ["bench-cpu.json", "bench-cpu.png"]
    assert json.loads(paths[0].read_text()) == result
    assert plot(result)[:4] == b"\x89PNG"
    assert all(len(cells) == len(HEAD) for cells in rows(result))
    assert markdown(result).count("\n") == 1 + len(rows(result))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    notes: list[str] = []
    assert write(result, tmp_path / "bare", notes.append) == [tmp_path / "bare" / "bench-cpu.json"]
    assert notes[0].startswith("no plot: ")


def test_runs_without_the_packages_of_the_command_line(tmp_path):
    """Neither typer nor matplotlib nor diffusers: as on a machine that has torch and little else."""
    code = (
        f"import sys; sys.path.insert(0, {BENCHMARKS!r});"
        "sys.modules.update(dict.fromkeys(['typer', 'matplotlib', 'matplotlib.figure', 'diffusers']));"
        "from bench.__main__ import main; main()"
    )
    line = [sys.executable, "-c", code, "--model", "fashion", "--out", str(tmp_path), "--section"]  # none of them
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no plot: " in done.stderr
    assert json.loads((tmp_path / "bench-cpu.json").read_text())["model"] == "fashion"


@pytest.mark.parametrize("option", ["--device abacus", "--nfe 0", "--repeats 0"])
def test_a_mistake_is_named_without_a_traceback(monkeypatch, capsys, tmp_path, option: str):
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path), *option.split()])
    with pytest.raises(SystemExit):
        main()
    assert f"argument {option.split()[0]} must be " in capsys.readouterr().err
