"""Every code block of README and documentation runs, so do notebook and examples; the site needs no network."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
import torch
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_digits
from typer.main import get_command

from browsers import FLAGS, chromium
from networks.mixture import Mixture
from steindiff import EDM, Model, Recipe, calibrate
from steindiff.cli import options
from steindiff.cli.app import build, run
from steindiff.cli.commands import evaluate

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "comfyui/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [dedent(code) for _, name, code in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_found(page):
    """Of a kind that runs, or output."""
    text = page.read_text(encoding="utf-8")
    assert {language for _, language, _ in FENCE.findall(text)} <= {"python", "console", "text"}
    assert len(re.findall(r"^[ \t>]*(?:```|~~~)", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes defined in a block look their module up
    for number, code in enumerate(blocks(page, "python"), 1):
        exec(compile(code, f"{page.name}, block {number}", "exec"), vars(module))


@cache
def digits() -> torch.Tensor:
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1


def toy(guidance: float = 1.0, device: str = "cpu", name: str = "digits", **options: bool) -> Model:
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
    commands = [shlex.split(line) for code in blocks(page, "console") for line in code.splitlines()]
    for before, (program, *arguments) in zip([[], *commands], commands, strict=False):
        if program == "source":
            assert before == ["make", "demo"]
            assert arguments == [f"{re.search('^VENV [?]= (.*)$', MAKEFILE, re.MULTILINE)[1]}/bin/activate"]
        elif program in ("steindiff", "torchrun"):
            own = arguments[arguments.index("steindiff.cli") + 1 :] if program == "torchrun" else arguments
            assert run(own) == 0, (own, capsys.readouterr().err)
        else:
            assert program in ("make", "pip")
            for own in re.findall(r"^\S*/steindiff (.*)$", check(program, *arguments), re.MULTILINE):  # of a recipe
                assert run(shlex.split(own)) == 0, (own, capsys.readouterr().err)


def check(program: str, *arguments: str) -> str:
    """What a command names is there: target, extra, script, subcommand and options. The lines `make` would run."""
    options = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
    if program == "make":
        return subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if program == "pip":
        extras = re.fullmatch(r"\.(?:\[(.*)\])?", arguments[-1])
        assert extras, f"pip {arguments}: the package is on no index"
        assert set(filter(None, (extras[1] or "").split(","))) <= declared("project.optional-dependencies")
    elif program == "python":
        path = ROOT / ("benchmarks/bench/__main__.py" if arguments[:2] == ("-m", "bench") else arguments[0])
        text = path.read_text(encoding="utf-8")
        if " options" in text and "from recording import" in text:  # what all measurements of many samples take
            text += (ROOT / "benchmarks" / "recording.py").read_text(encoding="utf-8")
        known = re.findall(r"--[\w-]+", text)
        assert options <= set(known), (arguments, options - set(known))
    else:
        group = get_command(build())
        command = group if arguments[0].startswith("-") else group.commands[arguments[0]]
        assert options <= {option for parameter in command.params for option in parameter.opts}, arguments
    return ""


def declared(table: str) -> set[str]:
    """The keys of a table of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split(f"[{table}]\n")[1].split("\n[")[0]
    return set(re.findall(r"^(\w+) =", text, re.MULTILINE))


INLINE = re.compile(r"`((?:make|pip|python|steindiff) [^`]+)`")


@pytest.mark.parametrize("page", [page for page in PAGES if INLINE.search(page.read_text(encoding="utf-8"))], ids=name)
def test_commands_in_sentences(page):
    for line in INLINE.findall(page.read_text(encoding="utf-8")):
        check(*shlex.split(line))


def test_readme_starts_with_the_demo_and_its_environment():
    assert [line for code in blocks(ROOT / "README.md", "console") for line in code.splitlines()][:3] == [
        "make demo",
        "source .venv/bin/activate",
        "pip install .",
    ]


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
