"""The report in a real browser: nothing is asked for, sliders and keys work, pictures change, it fits a phone."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import toys
from steindiff.comparison import compare
from steindiff.report import write
from steindiff.solvers import SOLVERS

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        message = "no Chromium found: on Debian, apt-get install chromium"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("report")
    comparison = compare(toys.subject(), SOLVERS["dpmpp-2m"], [4, 5, 6], range(8), settings={"model": "digits"})
    return f"file://{write(comparison, folder)[0]}"


@pytest.fixture
def page(browser: Browser, report: str, request) -> Iterator[Page]:
    """The report, opened; afterwards it must neither have complained nor asked for anything but itself."""
    options = getattr(request, "param", {})
    context = browser.new_context(viewport={"width": 1100, "height": 800}, **options)
    opened = context.new_page()
    troubles: list[str] = []
    requests: list[str] = []
    opened.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("request", lambda asked: requests.append(asked.url))
    opened.goto(report)
    yield opened
    context.close()
    assert troubles == []
    assert [url for url in requests if not url.startswith("data:")] == [report]


def sources(page: Page) -> list[str]:
    return page.eval_on_selector_all("#cards img", "images => images.map(image => image.src)")


def loaded(page: Page) -> bool:
    return page.eval_on_selector_all("img", "images => images.every(image => image.complete && image.naturalWidth > 0)")


def test_pictures_are_there(page):
    assert len(sources(page)) == 5
    assert loaded(page)
    assert page.locator("#sheet button").count() == 5 * 8
    assert page.locator("#numbers tbody tr").count() == 3 * 4 + 1
    assert page.title().startswith("digits, dpmpp-2m")


def test_seed_slider(page):
    before = sources(page)
    page.locator("#seed").fill("3")
    after = sources(page)
    assert all(one != two for one, two in zip(before, after, strict=True))
    assert page.locator("#seed-value").inner_text() == "3"
    assert "Seed 3" in page.locator("#cards img").first.get_attribute("alt")
    assert loaded(page)


def test_nfe_slider(page):
    before = sources(page)
    tiles = page.locator("#tiles").inner_text()
    grids = page.locator("#chart-grids svg").inner_html()
    page.locator("#nfe").fill("0")
    after = sources(page)
    assert all(one != two for one, two in zip(before[:4], after[:4], strict=True))
    assert before[4] == after[4]  # the reference does not depend on it
    assert page.locator("#nfe-value").inner_text() == "4"
    assert page.locator("#tiles").inner_text() != tiles
    assert page.locator("#chart-grids svg").inner_html() != grids


def test_keyboard_alone(page):
    before = sources(page)
    for _ in range(2):  # past the skip link
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "seed"
    page.keyboard.press("ArrowRight")
    assert sources(page) != before
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "nfe"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#nfe-value").inner_text() == "4"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    assert page.locator("#left").input_value() == "logsnr"
    reachable = "a[href], button, input, select, summary, [tabindex='0']"
    assert page.eval_on_selector_all(reachable, "all => all.every(one => one.tabIndex >= 0)")


def test_swipe(page):
    middle = page.eval_on_selector("#swipe-right", "image => getComputedStyle(image).clipPath")
    page.locator("#split").fill("20")
    assert page.eval_on_selector("#swipe-right", "image => getComputedStyle(image).clipPath") != middle
    first = page.locator("#swipe-left").get_attribute("src")
    page.locator("#left").select_option("reference")
    assert page.locator("#swipe-left").get_attribute("src") != first


def test_choosing_from_all_seeds(page):
    page.locator("#sheet .strip").nth(3).locator("button").nth(5).click()
    assert page.locator("#seed-value").inner_text() == "5"
    assert page.locator("#sheet button[aria-pressed=true]").count() == 5


def test_charts(page):
    assert page.locator(".chart:visible").count() == 8
    assert page.locator(".chart svg[role=img][aria-label]").count() == 8
    assert page.locator("#chart-gamma circle").count() == 5
    page.locator("#chart-spectrum summary").click()
    assert page.locator("#chart-spectrum tbody tr").count() == 5 * 8


def test_flat_charts_have_room(browser, tmp_path):
    """γ = 1 at every step, one number of evaluations, no calibration: nothing may come out as NaN."""
    bare = compare(toys.subject(lambda solver, nfe: None), SOLVERS["ddim"], [2], range(2), lipschitz_seeds=0)
    flat = dataclasses.replace(bare, rows=tuple(dataclasses.replace(row, gamma=(1.0, 1.0)) for row in bare.rows))
    opened = browser.new_page()
    troubles: list[str] = []
    opened.on("console", lambda message: troubles.append(message.text))
    opened.goto(f"file://{write(flat, tmp_path)[0]}")
    assert opened.locator("#nfe").is_disabled()
    assert opened.locator("#chart-gamma circle").count() > 0
    assert opened.locator(".chart:visible").count() == 5
    opened.close()
    assert troubles == []


@pytest.mark.parametrize("page", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True)
def test_light_and_dark(page):
    def brightness(selector: str, name: str) -> float:
        script = f"element => getComputedStyle(element).{name}.match(/\\d+/g).slice(0, 3).map(Number)"
        return sum(page.eval_on_selector(selector, script)) / 765

    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    ink, paper = brightness("body", "color"), brightness("body", "backgroundColor")
    assert (ink > 0.8 and paper < 0.2) if dark else (ink < 0.2 and paper > 0.8)


def test_fits_the_screen(page):
    for width in (320, 390, 768, 1400):
        page.set_viewport_size({"width": width, "height": 700})
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
