"""The report's content, without a browser."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

import toys
from steindiff.comparison import METHODS, compare, high_frequency_power, spectrum
from steindiff.report import contact_sheet, page, write
from steindiff.report.page import content
from steindiff.solvers import SOLVERS


@pytest.fixture(scope="module")
def comparison():
    settings = {"model": "digits", "note": "</script><b>&"}
    return compare(toys.subject(), SOLVERS["dpmpp-2m"], [4, 5], range(12), settings=settings)


def test_one_file_without_requests(comparison):
    text = page(comparison)
    links = set(re.findall(r"https?://[^\s\"'`<>)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert links == set()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)[^#]", text)
    assert "default-src 'none'" in text


def test_data_survives_the_page(comparison):
    text = page(comparison)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1)
    found = json.loads(data)
    assert found == json.loads(json.dumps(content(comparison)))
    assert ["note", "</script><b>&"] in found["settings"]


def test_content(comparison):
    found = content(comparison)
    assert found["nfes"] == [4, 5]
    assert found["seeds"] == list(range(12))
    assert [m["key"] for m in found["methods"]] == [*METHODS, "reference"]
    assert len(found["pictures"]) == len(found["rows"]) == 9
    assert all(len(strip) == 12 for strip in found["pictures"])
    charts = {chart["id"]: chart for chart in found["charts"]}
    wanted = {"frechet-nfe", "frechet-time", "spectrum", "grids", "rho", "tau", "gamma", "lipschitz"}
    assert set(charts) == wanted
    for chart in charts.values():
        lines = [line for frame in chart["frames"].values() for line in frame]
        assert any(line["points"] for line in lines), chart["id"]
    assert "blur" in found["blur"]
    assert set(found["tiles"]) == {"4", "5"}


def test_without_calibration():
    bare = compare(toys.subject(lambda solver, nfe: None), SOLVERS["ddim"], [3], range(2), lipschitz_seeds=0)
    assert content(bare)["tiles"] == {}
    assert "SteinDiff" in page(bare)


def test_contact_sheet(comparison):
    sheet = contact_sheet(comparison, columns=5)
    assert sheet.width == 150 + 5 * (8 * 8 + 2)
    assert sheet.height == 9 * (8 * 8 + 2)


def test_write_replaces_whole_files(comparison, tmp_path):
    (tmp_path / "report.html").write_text("old")
    write(comparison, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.png", "report.html", "results.json"]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert rows == json.loads(json.dumps([dataclasses.asdict(row) for row in comparison.rows]))


def test_spectrum_keeps_the_energy():
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    power = spectrum(images)
    assert float((power * (2 * torch.arange(16) + 1)).sum()) == pytest.approx(float(images.square().mean()) * 256)
    smooth = torch.nn.functional.avg_pool2d(images, 3, stride=1, padding=1)
    assert high_frequency_power(spectrum(smooth)) < 0.2 * high_frequency_power(power)


def test_same_seed_same_image_whatever_the_batch():
    runs = [
        compare(toys.subject(), SOLVERS["dpmpp-2m"], [4], range(6), batch=batch, lipschitz_seeds=0, methods=plain)
        for batch in (6, 2)
        for plain in [{name: METHODS[name] for name in ("edm", "calibrated")}]
    ]
    for one, two in zip(runs[0].images, runs[1].images, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=0)
