"""What a package index shows and offers: a page without a dead link, an archive that runs its own tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import steindiff

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"\]\(([^)]*)\)|^\[[^\]]*\]: *(\S+)|(?:src|href)=[\"']?([^\"'> ]*)", re.MULTILINE)
HERE = {".ci", ".github", ".gitignore"}
"""What concerns the repository only."""
LARGE = re.compile(r"benchmarks/networks/strong-\d+of\d+\.safetensors")
"""What is too large for an archive."""


def files() -> set[str]:
    """All files of the repository; of an unpacked archive, which has no git, the list it brings."""
    if not (ROOT / ".git").exists():
        return set((ROOT / "src/steindiff.egg-info/SOURCES.txt").read_text().splitlines())
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    listed = [name for name in listed if name.split("/")[0] not in HERE and not LARGE.fullmatch(name)]
    return {name for name in listed if (ROOT / name).exists()}


def backend(folder: Path, call: str) -> str:
    """What a function of the build backend says of `folder`, called in a process of its own, as pip calls it."""
    code = f"from setuptools import build_meta\nprint(build_meta.{call})"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def metadata(folder: Path, out: Path) -> Message:
    info = backend(folder, f"prepare_metadata_for_build_wheel({str(out)!r})")
    return message_from_string((out / info / "METADATA").read_text(encoding="utf-8"))


def targets(page: str) -> list[str]:
    """What its images and links point to, code aside."""
    return ["".join(groups) for groups in TARGET.findall(FENCE.sub("", page))]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The archive (sdist) built offline from a copy of the repository, unpacked."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("archive")
    for name in files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    with tarfile.open(out / backend(copy, f"build_sdist({str(out)!r})")) as archive:
        archive.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


@pytest.fixture(scope="module")
def described(unpacked, tmp_path_factory) -> Message:
    return metadata(unpacked, tmp_path_factory.mktemp("metadata"))


def test_one_version(described):
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert described["Version"] == steindiff.__version__ == cited[1]


def test_index_page_has_no_dead_link(described):
    """No address is known, so links into the repository are words and figures are gone; all else is the README."""
    page = described.get_payload()
    relative = [target for target in targets(README) if not target.startswith("http")]
    assert "docs/assets/grid.png" in relative  # there is something to replace
    assert [target for target in targets(page) if not target.startswith("https://")] == []
    assert "![" not in page
    assert FENCE.findall(page) == FENCE.findall(README)
    headings = re.compile(r"^#+ .*$|^\|.*\|$", re.MULTILINE)
    assert headings.findall(page) == headings.findall(README)
    assert "[arXiv:2606.07835](https://arxiv.org/abs/2606.07835)" in page


def test_index_page_with_an_address(unpacked, tmp_path):
    """One line in pyproject.toml makes every link absolute and keeps the figures."""
    copy = tmp_path / "copy"
    (copy / "src/steindiff").mkdir(parents=True)
    for name in ("setup.py", "README.md", "LICENSE", "src/steindiff/__init__.py", "src/steindiff/_version.py"):
        shutil.copyfile(unpacked / name, copy / name)
    project = (unpacked / "pyproject.toml").read_text(encoding="utf-8")
    address = "https://example.org/someone/steindiff"
    (copy / "pyproject.toml").write_text(f'{project}\n[project.urls]\nRepository = "{address}"\n', encoding="utf-8")
    found = metadata(copy, tmp_path)
    assert found["Project-URL"] == f"Repository, {address}"
    page = found.get_payload()
    assert len(targets(page)) == len(targets(README))
    for before, after in zip(targets(README), targets(page), strict=True):
        kind = "raw" if before.endswith(".png") else "blob"
        whole = address + before if before.startswith("#") else f"{address}/{kind}/HEAD/{before}"
        assert after == (before if before.startswith("https://") else whole)


def test_links_of_the_readme_lead_somewhere():
    """To a file of the repository, and to a heading of it."""
    for target in targets(README):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            assert not path or path in files(), target
            text = (ROOT / (path or "README.md")).read_text(encoding="utf-8") if anchor else ""
            heads = (re.sub(r"[^\w\- ]", "", head.lower()) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
            assert not anchor or anchor in {head.replace(" ", "-") for head in heads}, target


def test_archive_has_every_file(unpacked):
    there = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*")}
    assert {"tests/conftest.py", "tests/cli/conftest.py", "Makefile", "constraints.txt"} <= files() <= there


def test_archive_runs_its_tests(unpacked):
    """A file that needs conftest.py, a helper of the tests and the benchmarks, against the archive's own package."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/test_search.py"]
    environment = {**os.environ, "PYTHONPATH": str(unpacked / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ tests collected", done.stdout, re.MULTILINE), done.stdout
