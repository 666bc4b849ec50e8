"""The frame: every command is found, documented alike, and fails in one line."""

from __future__ import annotations

import errno
import json
import pkgutil
import re
import signal
import subprocess
import sys

import pytest
from typer.main import get_command

import steindiff as package
from steindiff.cli import commands
from steindiff.cli.app import build, main, run
from steindiff.cli.commands import doctor
from steindiff.cli.output import note, written
from steindiff.production import generating, verify

COMMANDS = [info.name for info in pkgutil.iter_modules(commands.__path__)]


def one_line(err: str) -> bool:
    return err.startswith("steindiff: ") and err.count("\n") == 1 and "Traceback" not in err


def test_commands_found():
    assert {"calibrate", "compare", "diagnose", "doctor", "evaluate", "sample"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_examples(steindiff, name):
    done = steindiff(f"{name} --help")
    assert done.code == 0
    assert "Examples" in done.out
    assert f"steindiff {name}" in done.out


def test_same_option_same_help():
    texts: dict[str, set[str]] = {}
    for name, command in get_command(build()).commands.items():
        assert command.help, name
        for parameter in command.params:
            texts.setdefault(parameter.opts[0], set()).add(re.split("[;,(]", parameter.help)[0].rstrip(". "))
    shared = ("--model", "--solver", "--seed", "--device", "--guidance", "--json", "--num", "--batch")
    assert {name: texts[name] for name in shared if len(texts[name]) > 1} == {}


def test_version(steindiff):
    assert steindiff("--version") == (0, f"steindiff {package.__version__}\n", "")


def test_no_arguments_is_help(steindiff):
    done = steindiff("")
    assert "compare" in done.out + done.err
    assert "Traceback" not in done.out + done.err


def test_doctor(steindiff):
    done = steindiff("doctor --json")
    found = json.loads(done.out)
    assert done.code == 0
    assert found["versions"]["steindiff"] == package.__version__
    assert "shipped" in found["offline"]["model cifar10"]
    assert "torch" in steindiff("doctor").out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("compare --model nonesuch", "model = 'nonesuch' is not known"),
        ("compare --model digits --solver nonesuch", "solver = 'nonesuch' is not known"),
        ("compare --model digits --nfe 0", "nfe must be a whole number >= 1, got 0"),
        ("compare --model digits --nfe 5,x", "nfe must be whole numbers >= 1, several as 4,5,6, got '5,x'"),
        ("compare --model digits --num 1", "must"),
        ("compare --model digits --num 0", "num must be a whole number >= 1, got 0"),
        ("compare --model digits --prompt fox", "--prompt does nothing for model = 'digits'; leave it out"),
        ("compare --model digits --seed -1", "seed must be a whole number >= 0, got -1"),
        ("compare --model digits --batch 0", "batch must be a whole number >= 1, got 0"),
        ("compare --model digits --device tpu", "device = 'tpu' is not on this machine; choose from auto, cpu"),
        ("compare --model digits --device cpu:x", "device = 'cpu:x'"),
        ("compare --model fashion --guidance -1", "guidance must be >= 0, got -1.0"),
        ("compare --model digits --solver heun --nfe 5", "nfe must be one"),
        ("compare --num many", "--num"),
        ("compare --colour red", "--colour"),
        ("nonesuch", "nonesuch"),
        ("sample --model digits --method nonesuch --out OUT", "method = 'nonesuch' is not known"),
        ("sample --model hungry --out OUT", "no calibration of hungry ships for this solver at 5 evaluations"),
        ("sample --model fashion --guidance 2 --out OUT", "of fashion ships for this solver with guidance 2; make one"),
        ("sample --model digits --nfe 0 --method edm --out OUT", "nfe must be a whole number >= 1, got 0"),
        ("sample --model digits --calibration nowhere.json --out OUT", "nowhere.json: No such file"),
        ("sample", "--out"),
        ("sample --model digits --out=", "--out must not be empty"),
        ("sample --model digits --seed 9223372036854775807 --out OUT", "seed must leave all seeds below 2**31, got 92"),
        ("calibrate --model digits --nfe 0 --num 4 --out OUT", "nfe must be"),
    ],
)
def test_mistakes_are_one_line(steindiff, tmp_path, monkeypatch, line, says):
    monkeypatch.chdir(tmp_path)
    done = steindiff(line.replace("OUT", str(tmp_path / "out")))
    assert done.code != 0
    assert one_line(done.err), done.err
    assert says in done.err
    assert done.out == ""


def test_folder_that_cannot_be(steindiff, tmp_path):
    (tmp_path / "file").write_text("")
    done = steindiff(f"compare --model digits --out {tmp_path / 'file' / 'out'}")
    assert done.code == 1
    assert one_line(done.err)
    assert "Not a directory" in done.err


@pytest.mark.parametrize(("number", "says"), [(errno.EACCES, "Permission denied"), (errno.ENOSPC, "No space left")])
def test_folder_that_cannot_be_written(steindiff, tmp_path, monkeypatch, number, says):
    def refuse(*args, **options):
        raise OSError(number, says)

    monkeypatch.setattr("steindiff._files.TemporaryFile", refuse)
    done = steindiff(f"compare --model digits --out {tmp_path}")
    assert done.code == 1
    assert one_line(done.err)
    assert says in done.err
    assert str(tmp_path) in done.err


def test_disk_full_at_the_end(steindiff, tmp_path, monkeypatch):
    def full(self, data):
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    done = steindiff(f"compare --model digits --num 4 --out {tmp_path}")
    assert done.code == 1
    assert one_line(done.err)
    assert "report.html: No space left on device" in done.err
    assert list(tmp_path.iterdir()) == []


def test_batch_is_halved(steindiff, tmp_path):
    done = steindiff(f"compare --model hungry --num 10 --batch 16 --nfe 3 --quick --json --out {tmp_path}")
    assert done.code == 0
    halvings = {line for line in done.err.splitlines() if "halved" in line}
    assert halvings == {f"steindiff: out of memory: the batch of {size} is halved" for size in (16, 10, 8, 5)}
    small = steindiff(f"compare --model hungry --num 10 --batch 2 --nfe 3 --quick --json --out {tmp_path}")
    for row, other in zip(json.loads(done.out)["rows"], json.loads(small.out)["rows"], strict=True):
        assert row["distance"] == pytest.approx(other["distance"], abs=1e-5)


def test_not_even_one_fits(steindiff, tmp_path):
    done = steindiff(f"sample --model starving --method edm --batch 1 --out {tmp_path}")
    assert done.code == 1
    assert one_line(done.err)
    assert "out of memory: choose a smaller --batch or another --device" in done.err


def test_sample_does_not_change_the_batch(steindiff, tmp_path):
    done = steindiff(f"sample --model hungry --method edm --batch 5 --out {tmp_path}")
    assert done.code == 1
    assert one_line(done.err)
    assert "shard 0, seeds 0 to 4: batch = 5 does not fit in memory; choose a smaller one" in done.err
    assert list(tmp_path.iterdir()) == []


def test_traceback_on_demand(steindiff, monkeypatch):
    monkeypatch.setenv("STEINDIFF_DEBUG", "1")
    with pytest.raises(ValueError, match="nonesuch"):
        steindiff("compare --model nonesuch")


def test_interrupt_leaves_whole_files(steindiff, tmp_path, monkeypatch):
    write = generating.write

    def then_interrupt(*args) -> None:
        write(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generating, "write", then_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with it ignored
    try:
        done = steindiff(f"sample --model digits --method edm --nfe 1 --num 4 --batch 2 --shard 2 --out {tmp_path}")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.code == 130
    assert done.err.count("\n") == 1
    assert "interrupted" in done.err
    condition = verify(tmp_path)
    assert (condition.sound, condition.missing) == ((0,), (1,))


def test_shell_completion(monkeypatch, capsys):
    words = {"_STEINDIFF_COMPLETE": "complete_bash", "COMP_WORDS": "steindiff compare --model ", "COMP_CWORD": "3"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["steindiff"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.split() == ["cifar10", "fashion"]


def test_an_empty_path_is_not_the_current_folder(steindiff, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["sample", "--model", "digits", "--out", ""]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ("compare --model nonesuch --json", "ValueError", "nonesuch"),
        ("compare --json --colour red", "NoSuchOption", "--colour"),
        ("sample --model digits --calibration nowhere.json --json --out OUT", "FileNotFoundError", "nowhere.json"),
    ],
)
def test_machines_read_errors_too(steindiff, tmp_path, line, kind, says):
    done = steindiff(line.replace("OUT", str(tmp_path)))
    assert one_line(done.err)
    told = json.loads(done.out)
    assert told["kind"] == kind
    assert says in told["error"]


def test_brackets_are_not_markup(steindiff, tmp_path, monkeypatch, capsys):
    """Before, `doctor` lost `[diffusers]`, `cal[bold]x` was printed as `calx`, and `diag[/]x` was a traceback."""
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    assert "pip install 'steindiff[diffusers]'" in steindiff("doctor").out
    for name in ("cal[bold]x", "diag[/]x"):
        done = steindiff(f"diagnose --model digits --num 2 --nfe 2 --out {tmp_path / name}")
        assert f"{tmp_path / name}/gammas.png\n" in done.out
        written(tmp_path / name, ": [1]")
        note(f"see {name}")
        done = capsys.readouterr()
        assert done.out == f"{tmp_path / name}: [1]\n"
        assert done.err == f"steindiff: see {name}\n"


LOADED = """
import sys
{code}
heavy = {{"matplotlib", "PIL", "rich", "diffusers", "sklearn"}}
print(sorted({{name.partition(".")[0] for name in sys.modules}} & heavy))
"""


def loads(code: str) -> str:
    command = [sys.executable, "-c", LOADED.format(code=code)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def test_nothing_is_imported_that_is_not_used():
    assert loads("import steindiff; from steindiff.cli.app import run; run(['--version'])") == "[]"
    every = "; ".join(f"import steindiff.cli.commands.{name}" for name in COMMANDS)
    assert "matplotlib" not in loads(every)
