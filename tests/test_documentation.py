"""Every code block of README and documentation runs, every example runs, and the site builds without a warning."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import toys
from steindiff.cli.app import run
from steindiff.cli.commands import evaluate
from steindiff.models import MODELS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOSTS = {"diffusers.md", "comfyui.md"}
"""Pages whose Python runs in tests/integrations, where their hosts are."""
KNOWN = {"python", "console", "json", "text", "yaml", "bibtex"}


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_are_of_a_known_kind(page):
    assert {language for language, _ in FENCE.findall(page.read_text(encoding="utf-8"))} <= KNOWN


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page.name not in HOSTS], ids=name
)
def test_python_blocks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes defined in a block look their module up
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), vars(module))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=name)
def test_console_blocks(page, tmp_path, monkeypatch, capsys):
    """The commands as written, with the digits in the place of the slow models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate.Evaluation, "inception", staticmethod(lambda images: images.float().mean((2, 3))))
    for model in MODELS:
        monkeypatch.setitem(MODELS, model, lambda guidance, device, compiled=False: toys.subject())
    monkeypatch.setattr(
        evaluate.references, "load", lambda _: evaluate.Moments.of(toys.digits().mean((2, 3)).expand(-1, 3))
    )
    lines = [line for code in blocks(page, "console") for line in code.splitlines()]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in lines:
        program, *arguments = line.split()
        if program == "make":
            assert arguments[0] in targets
        elif program in ("steindiff", "torchrun"):
            own = arguments[arguments.index("steindiff.cli") + 1 :] if program == "torchrun" else arguments
            assert run(own) == 0, (line, capsys.readouterr().err)
        elif program == "python":
            assert (ROOT / arguments[0]).exists(), line
        else:
            assert program in ("pip", "git", "mkdocs"), line


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if not path.name.startswith("diffusers_")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [example.name])
    runpy.run_path(str(example), run_name="__main__")


def test_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "api" / "index.html").read_text().count("steindiff.loop") > 1
