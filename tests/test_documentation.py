"""Every code block of README and documentation runs, so do notebook and examples; the site needs no network."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_digits

from browsers import FLAGS, chromium
from networks.mixture import Mixture
from steindiff import EDM, Model, Recipe, calibrate
from steindiff.cli import options
from steindiff.cli.app import run
from steindiff.cli.commands import evaluate

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


@cache
def digits() -> torch.Tensor:
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1


def toy(guidance: float = 1.0, device: str = "cpu", compiled: bool = False, name: str = "digits") -> Model:
    data = digits()[:100]
    return Model(Mixture(data, torch.full((len(data),), 0.02), torch.ones(len(data))), EDM(), (1, 8, 8), name=name)


@cache
def toy_calibration(solver, nfe):
    return calibrate(toy(), nfe, solver, recipe=Recipe(seeds=range(1000, 1008), steps=8, search=None))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=name)
def test_console_blocks(page, tmp_path, monkeypatch, capsys):
    """The commands as written and in order, with digits in the place of the slow models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate.Evaluation, "inception", staticmethod(lambda images: images.float().mean((2, 3))))
    for model in options.MODELS:
        monkeypatch.setitem(options.MODELS, model, partial(toy, name=model))
    found = lambda model, solver, nfe: toy_calibration(solver, nfe)  # noqa: E731
    for place in ("steindiff.comparison", "steindiff.cli.commands.compare"):
        monkeypatch.setattr(f"{place}.shipped_calibration", found)
    monkeypatch.setattr(evaluate.references, "load", lambda _: evaluate.Moments.of(digits().mean((2, 3)).expand(-1, 3)))
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
            assert program in ("pip", "git", "mkdocs", "source"), line


def test_notebook(tmp_path, monkeypatch):
    """Its code cells, in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cells = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    for number, text in enumerate(code, 1):
        exec(compile(text, f"tutorial.ipynb, cell {number}", "exec"), vars(module))
    gaps = [float((module.__dict__[name].x - module.fine).square().mean()) for name in ("plain", "calibrated")]
    assert gaps[1] < gaps[0]


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if not re.match("diffusers_|tiny", path.name)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples(example, tmp_path, monkeypatch):
    """They run; those that compare show a gain, even in their tiny form."""
    monkeypatch.chdir(tmp_path)
    text = example.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [example.name, *(["--tiny"] if "--tiny" in text else [])])
    main = runpy.run_path(str(example))["main"]
    found = main()
    if found is not None:
        higher_is_better = "PSNR" in main.__doc__
        rest = [value for key, value in found.items() if key not in ("calibrated", "reference")]
        assert found["calibrated"] > max(rest) if higher_is_better else found["calibrated"] < min(rest), found


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_site_builds_without_a_warning(site):
    assert (site / "api" / "index.html").read_text().count("steindiff.loop") > 1


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    path = chromium()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


def test_site_needs_no_network_and_fits(site, browser):
    """Every page at three widths: nothing asked for but files, nothing wider than the screen."""
    context = browser.new_context()
    opened = context.new_page()
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    for page in sorted(site.rglob("index.html")):
        opened.goto(f"file://{page}")
        for width in (320, 390, 1400):
            opened.set_viewport_size({"width": width, "height": 800})
            assert opened.evaluate("document.documentElement.scrollWidth") <= width, (page, width)
    context.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_formulas_are_drawn(site, browser):
    """TeX became MathML, and MathML has a size."""
    opened = browser.new_page()
    opened.goto(f"file://{site / 'method' / 'index.html'}")
    source = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    sizes = opened.eval_on_selector_all("math", "all => all.map(one => one.getBoundingClientRect().height)")
    text = opened.locator("article").inner_text()
    opened.close()
    assert len(sizes) == len(re.findall(r"^\$\$", source, re.MULTILINE)) > 0
    assert min(sizes) > 10
    assert not re.search(r"\$\$|\\(frac|sum|rho|bar)", text)
