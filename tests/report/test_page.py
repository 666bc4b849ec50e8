"""The report's content, without a browser."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from PIL import Image

from steindiff import EDM, Model, Sampler
from steindiff.comparison import default_methods, high_frequency_power, spectrum
from steindiff.denoisers import Gaussian
from steindiff.report import Entry, Report, contact_sheet, of_images, of_samplers, page, write
from steindiff.report.document import PAPER, content
from steindiff.report.page import headline, report_of, results, tiles


@pytest.fixture(scope="module")
def comparison(compare_digits):
    return compare_digits([4, 5], range(12), {"model": "digits", "note": "</script><b>&"})


def test_one_file_without_requests(comparison):
    text = page(comparison)
    addresses = set(re.findall(r"https?://[^\s\"'`<>)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert addresses >= {PAPER}
    assert not re.search(r"(src|url\(|fetch\(|import).{0,3}https?:", text)  # links to follow, nothing to load
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:)[^#]", text)
    assert "default-src 'none'" in text


def test_data_survives_the_page(comparison):
    text = page(comparison)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1)
    found = json.loads(data)
    assert found == json.loads(json.dumps(content(report_of(comparison))))
    assert ["note", "</script><b>&"] in found["settings"]


def test_content(comparison):
    found = content(report_of(comparison))
    assert found["nfes"] == [4, 5]
    assert found["seeds"] == [str(seed) for seed in range(12)]
    assert [m["key"] for m in found["methods"]] == [*default_methods(), "reference"]
    assert len(found["pictures"]) == len(found["rows"]) == 9
    assert all(len(strip) == 12 for strip in found["pictures"])
    charts = {chart["id"]: chart for chart in found["charts"]}
    wanted = {"frechet-nfe", "frechet-time", "spectrum", "grids", "rho", "tau", "gamma", "lipschitz"}
    assert set(charts) == wanted
    for chart in charts.values():
        lines = [line for frame in chart["frames"].values() for line in frame]
        assert any(line["points"] for line in lines), chart["id"]
    assert "blur" in found["notes"][-1]
    assert all("drag the divider" in text for text in found["headlines"].values())
    assert "(not FID)" in next(c["title"] for c in found["columns"] if c["key"] == "honest")
    assert "random features, not FID" in found["notes"][0]
    assert set(found["tiles"]) == {"4", "5"}


def test_without_calibration(compare_digits):
    bare = compare_digits([3], range(2), calibrations=lambda *_: None, solver="ddim", lipschitz_seeds=0)
    assert content(report_of(bare))["tiles"]["3"][0]["label"].count("→ relaxation") == 1
    grids = dataclasses.replace(bare, rows=bare.rows[:2] + bare.rows[-1:], images=bare.images[:2] + bare.images[-1:])
    assert content(report_of(grids))["tiles"] == {"3": []}
    assert "SteinDiff" in page(bare)


def test_contact_sheet(comparison):
    sheet = contact_sheet(report_of(comparison).entries, columns=5)
    assert sheet.width == 150 + 5 * (8 * 8 + 2)
    assert sheet.height == 9 * (8 * 8 + 2)


def test_headline_says_what_the_numbers_say(comparison):
    def judged(**honest):
        rows = [dataclasses.replace(row, honest=honest[row.method]) for row in comparison.rows]
        return headline(dataclasses.replace(comparison, rows=tuple(rows), floor=10.0), 5)

    plain = {"edm": 50.0, "logsnr": 40.0, "relaxation": 50.0, "reference": 10.0}
    assert judged(**plain, calibrated=11.0) == "5 evaluations look like 24: drag the divider"
    assert judged(**plain, calibrated=20.0) == "5 evaluations, 50% closer to 24: drag the divider"
    assert judged(**plain | {"relaxation": 10.0}, calibrated=20.0).startswith("5 evaluations, 50% closer")
    assert judged(**plain | {"logsnr": 10.5}, calibrated=10.0).startswith("12 images cannot tell 5 evaluations from 24")
    assert judged(**plain, calibrated=41.0) == "At 5 evaluations the plain solver does as well: drag the divider"


def test_a_distance_that_ranks_nothing_is_no_figure(comparison):
    def first(floor: float) -> str:
        return tiles(dataclasses.replace(comparison, floor=floor), 5)[0]["label"]

    least = min(row.honest for row in comparison.rows)
    assert first(0.1 * least).startswith("Fréchet distance")
    assert first(10.0 * max(row.honest for row in comparison.rows)).startswith("dB PSNR to the many-step image")


def test_command_is_shown_and_not_repeated(comparison):
    settings = {**comparison.settings, "command": "steindiff compare --num 12"}
    found = content(report_of(dataclasses.replace(comparison, settings=settings)))
    assert found["command"] == "steindiff compare --num 12"
    assert all(name != "command" for name, _ in found["settings"])


def test_new_fields_of_a_row_need_no_edit(comparison):
    """Fields that only some comparisons have become columns, intervals stay with their number."""
    fields = [("sharpness", float)]
    wider = dataclasses.make_dataclass("Row", fields, bases=(type(comparison.rows[0]),), frozen=True, kw_only=True)
    rows = [
        wider(**vars(row) | {"honest_interval": (row.honest - 1, row.honest + 1)}, sharpness=0.5)
        for row in comparison.rows
    ]
    found = content(report_of(dataclasses.replace(comparison, rows=tuple(rows))))
    titles = [column["title"] for column in found["columns"]]
    assert "sharpness" in titles
    assert "PSNR, dB" in titles
    assert not any("interval" in title for title in titles)
    first = found["rows"][0]
    assert first["honest_interval"] == (first["honest"] - 1, first["honest"] + 1)
    line = next(chart for chart in found["charts"] if chart["id"] == "frechet-nfe")["frames"]["*"][0]
    assert all(len(point) == 4 for point in line["points"])


COLOURS = {"grey": (1, 20, 12), "colour": (3, 12, 20)}


@pytest.mark.parametrize("shape", COLOURS.values(), ids=COLOURS)
def test_ones_own_pictures(shape, tmp_path):
    """Tensors in [−1, 1], bytes and PIL images of any size, with captions and without charts."""
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    pixels = ((x + 1) * 127.5).round().byte()
    mode = {1: "L", 3: "RGB"}[shape[0]]
    pil = [Image.fromarray(p.movedim(0, -1).squeeze(-1).numpy(), mode=None).convert(mode) for p in pixels]
    entries = [Entry("tensors", 5, x), Entry("bytes", 5, 255 - pixels), Entry("PIL", 30, pil, reference=True)]
    report = of_images(entries, [7, 8], captions=["a cat", "a dog"], command="mine.py", settings={"model": "mine"})
    found = content(report)
    assert found["pictures"][0] == found["pictures"][2]
    assert found["pictures"][0] != found["pictures"][1]
    assert found["captions"] == ["a cat", "a dog"]
    assert found["headlines"] == {"5": "5 evaluations beside 30: drag the divider"}
    assert (found["left"], found["right"], found["charts"]) == ("tensors", "bytes", [])
    write(report, tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["title"] for row in rows] == ["tensors", "bytes", "PIL"]
    with Image.open(tmp_path / "grid.png") as sheet:
        assert sheet.height == 3 * (round(64 / shape[1]) * shape[1] + 2)


def test_report_of_ones_own_model(tmp_path):
    """`report_of_samplers`: any model with images, samplers by title, one of them the reference."""
    mine = Model(Gaussian(torch.zeros(3, 6, 8), torch.ones(3, 6, 8)), EDM(), (3, 6, 8), name="mine")
    samplers = {"DDIM": Sampler("ddim", nfe=4), "2M": Sampler("dpmpp-2m", nfe=4), "many": Sampler("heun", nfe=20)}
    report = of_samplers(mine, samplers, range(3), captions="abc", reference="many")
    found = content(report)
    assert [row["title"] for row in found["rows"]] == ["DDIM", "2M", "many"]
    assert [row["reference"] for row in found["rows"]] == [False, False, True]
    assert found["rows"][1]["psnr"] > found["rows"][0]["psnr"]
    assert found["rows"][2]["network_calls"] == 20
    assert ["model", "mine"] in found["settings"]
    assert found["captions"] == ["a", "b", "c"]
    write(report, tmp_path)
    with pytest.raises(ValueError, match="reference must be one of the samplers"):
        of_samplers(mine, samplers, range(3), reference="most")


def test_large_pictures_stay_bearable():
    image = Image.effect_noise((1024, 512), 60)
    found = content(of_images([Entry("one", 4, [image] * 60)], range(60)))
    assert len(found["seeds"]) == len(found["pictures"][0]) == 48
    assert found["pictures"][0][0].startswith("data:image/jpeg")
    assert found["smooth"]


def test_reports_that_cannot_be(comparison):
    image = torch.zeros(1, 4, 4)
    with pytest.raises(ValueError, match="one image per label: 2 labels"):
        of_images([Entry("one", 4, [image])], [0, 1])
    with pytest.raises(ValueError, match="captions must be one per label"):
        of_images([Entry("one", 4, [image])], [0], captions=["a", "b"])
    with pytest.raises(ValueError, match="entries must not be empty"):
        Report(title="none", entries=[], labels=[])
    with pytest.raises(ValueError, match=r"must have shape .* got \(2, 4, 4\)"):
        content(of_images([Entry("one", 4, [torch.zeros(2, 4, 4)])], [0]))


def test_write_replaces_whole_files(comparison, tmp_path):
    (tmp_path / "report.html").write_text("old")
    write(comparison, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.png", "report.html", "results.json"]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert rows == json.loads(json.dumps(results(comparison)["rows"]))


def test_spectrum_keeps_the_energy():
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    power = spectrum(images)
    assert float((power * (2 * torch.arange(16) + 1)).sum()) == pytest.approx(float(images.square().mean()) * 256)
    smooth = torch.nn.functional.avg_pool2d(images, 3, stride=1, padding=1)
    assert high_frequency_power(spectrum(smooth)) < 0.2 * high_frequency_power(power)


def test_same_seed_same_image_whatever_the_batch(compare_digits):
    methods = {name: default_methods()[name] for name in ("edm", "logsnr")}
    runs = [compare_digits([4], range(6), methods=methods, batch=batch, lipschitz_seeds=0) for batch in (6, 2)]
    for one, two in zip(runs[0].images, runs[1].images, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=0)
