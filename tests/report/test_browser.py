"""The report in a real browser: nothing is asked for, sliders and keys work, pictures change, it fits a phone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from browsers import FLAGS, chromium
from steindiff.report import Entry, of_images, write


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory, compare_digits) -> str:
    folder = tmp_path_factory.mktemp("report")
    settings = {"model": "digits", "command": "steindiff compare --nfe 4,5,6"}
    comparison = compare_digits([4, 5, 6], range(8), settings)
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
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [report]


def sources(page: Page) -> list[str]:
    return page.eval_on_selector_all("#cards img", "images => images.map(image => image.src)")


def loaded(page: Page) -> bool:
    script = "images => Promise.all(images.map(image => image.decode())).then(() => true, () => false)"
    return page.eval_on_selector_all("img[src]", script)


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
    def focused() -> str:
        page.keyboard.press("Tab")
        return page.evaluate("document.activeElement.id")

    before = sources(page)
    assert [focused() for _ in range(3)][1:] == ["command", "seed"]
    page.keyboard.press("ArrowRight")
    assert sources(page) != before
    assert focused() == "nfe"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#nfe-value").inner_text() == "4"
    assert focused() == "left"
    page.keyboard.press("Home")
    assert page.locator("#left").input_value() == "edm"
    assert [focused() for _ in range(6)] == ["right", "split", "smooth", "save", "copy", "link"]


def test_grid_of_seeds_is_one_tab_stop(page):
    def stops() -> int:
        return page.eval_on_selector_all("#sheet button", "all => all.filter(one => one.tabIndex === 0).length")

    assert page.locator("#sheet button").count() == 40
    assert stops() == 1
    page.locator("#sheet button[tabindex='0']").focus()
    for key, seed in (("ArrowRight", "1"), ("ArrowDown", "1"), ("End", "7"), ("ArrowRight", "7"), ("ArrowLeft", "6")):
        page.keyboard.press(key)
        assert page.locator("#seed-value").inner_text() == seed
        assert stops() == 1
        assert page.evaluate("document.activeElement.matches('#sheet .strip button[aria-pressed=true]')")
    everything = "a[href], button, input, select, summary, [tabindex='0']"
    count = page.eval_on_selector_all(
        everything, "all => all.filter(one => one.tabIndex >= 0 && one.checkVisibility()).length"
    )
    assert count < 35


def clip(page: Page) -> str:
    return page.eval_on_selector("#swipe-right", "image => getComputedStyle(image).clipPath")


def test_divider(page):
    middle = clip(page)
    page.locator("#split").fill("20")
    assert clip(page) != middle
    first = page.locator("#swipe-left").get_attribute("src")
    page.locator("#left").select_option("reference")
    assert page.locator("#swipe-left").get_attribute("src") != first


def test_divider_follows_a_mouse(page):
    """Press on the picture, drag across it and beyond its edge; the browser must not drag the image instead."""
    page.locator("#stage").scroll_into_view_if_needed()
    box = page.locator("#stage").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.5 * box["width"], y)
    page.mouse.down()
    seen = []
    for share in (0.4, 0.3, 0.25, 0.8, 1.4):
        page.mouse.move(box["x"] + share * box["width"], y, steps=4)
        seen.append(int(page.locator("#split").input_value()))
    page.mouse.up()
    assert seen == pytest.approx([40, 30, 25, 80, 100], abs=1)
    page.mouse.move(box["x"] + 0.1 * box["width"], y)
    assert page.locator("#split").input_value() == "100"  # let go
    assert "at=100" in page.url


def test_address_shows_what_its_sender_saw(browser, report):
    def view(opened: Page) -> tuple[str, ...]:
        return (
            *(opened.locator(f"#{name}-value").inner_text() for name in ("seed", "nfe")),
            *(opened.locator(f"#{name}").input_value() for name in ("left", "right", "split")),
        )

    sender = browser.new_page()
    sender.goto(report)
    assert "#" not in sender.url
    sender.locator("#seed").fill("6")
    sender.locator("#nfe").fill("0")
    sender.locator("#left").select_option("logsnr")
    sender.locator("#right").select_option("reference")
    sender.locator("#split").fill("30")
    assert view(sender) == ("6", "4", "logsnr", "reference", "30")
    receiver = browser.new_page()
    receiver.goto(sender.url)
    assert view(receiver) == view(sender)
    receiver.evaluate("location.hash = 'seed=2&nfe=5&left=nonsense&at=70'")
    expect(receiver.locator("#seed-value")).to_have_text("2")
    assert view(receiver) == ("2", "5", "logsnr", "reference", "70")
    sender.close()
    receiver.close()


def test_picture_can_be_saved(page, tmp_path):
    page.locator("#seed").fill("3")
    with page.expect_download() as download:
        page.locator("#save").click()
    assert download.value.suggested_filename == "steindiff-seed-3-nfe-5.png"
    download.value.save_as(tmp_path / "saved.png")
    with Image.open(tmp_path / "saved.png") as saved:
        assert saved.size == (5 * 268 + 12, 256 + 56 + 12)
        assert len(saved.convert("RGB").getcolors(1 << 20)) > 10
    assert "Saved" in page.locator("#status").inner_text()


def test_picture_and_link_can_be_copied(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#copy").click()
    expect(page.locator("#status")).to_have_text("Copied the picture.")
    kinds = page.evaluate("navigator.clipboard.read().then(all => all.flatMap(one => one.types))")
    assert kinds == ["image/png"]
    page.locator("#link").click()
    expect(page.locator("#status")).to_have_text("Copied the link to this view.")
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_enlarging(page):
    rendering = "image => getComputedStyle(image).imageRendering"
    assert page.eval_on_selector("#swipe-left", rendering) == "pixelated"
    page.locator("#smooth").check()
    assert page.eval_on_selector("#swipe-left", rendering) == "auto"
    page.locator("#cards button").nth(3).click()
    assert page.locator("#zoom").is_visible()
    assert page.locator("#zoom-image").bounding_box()["height"] > 400
    assert "calibrated" in page.locator("#zoom-text").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#zoom").is_visible()


def test_choosing_from_all_seeds(page):
    page.locator("#sheet .strip").nth(3).locator("button").nth(5).click()
    assert page.locator("#seed-value").inner_text() == "5"
    assert page.locator("#sheet button[aria-pressed=true]").count() == 5


def test_first_screen_says_what_this_is(page):
    assert "evaluations" in page.locator("#headline").inner_text()
    assert page.locator("#headline").inner_text().endswith("drag the divider")
    assert page.locator("#command").inner_text() == "steindiff compare --nfe 4,5,6"
    assert page.locator("#links a").count() >= 1


def test_hover_shows_values(page):
    dot = page.locator("#chart-frechet-nfe circle.dot").first
    dot.scroll_into_view_if_needed()
    box = dot.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    tip = page.locator("#chart-frechet-nfe .tip")
    assert tip.is_visible()
    assert "network evaluations 4" in tip.inner_text()
    page.mouse.move(0, 0)
    assert not tip.is_visible()


def test_every_line_has_its_own_colour(page):
    """Colours follow from place, so that a new method or a longer run needs no edit."""
    for chart, count in (("rho", 5), ("spectrum", 5)):
        items = f"#chart-{chart} .legend li"
        script = "all => all.map(one => getComputedStyle(one, '::before').backgroundColor)"
        colours = page.eval_on_selector_all(items, script)
        assert len(colours) >= count - 1
        assert len(set(colours)) == len(colours)


def test_charts(page):
    assert page.locator(".chart:visible").count() == 8
    assert page.locator(".chart svg[role=img][aria-label]").count() == 8
    assert page.locator("#chart-gamma circle:not(.mark)").count() == 5
    page.locator("#chart-spectrum summary").click()
    assert page.locator("#chart-spectrum tbody tr").count() == 5 * 8


def test_flat_charts_have_room(browser, tmp_path, compare_digits):
    """γ = 1 at every step, one number of evaluations, no calibration: nothing may come out as NaN."""
    bare = compare_digits([2], range(2), calibrations=lambda *_: None, solver="ddim", lipschitz_seeds=0)
    flat = dataclasses.replace(bare, rows=tuple(dataclasses.replace(row, gamma=(1.0, 1.0)) for row in bare.rows))
    opened = browser.new_page()
    troubles: list[str] = []
    opened.on("console", lambda message: troubles.append(message.text))
    opened.goto(f"file://{write(flat, tmp_path)[0]}")
    assert not opened.locator("#nfe").is_visible()  # nothing to choose
    assert opened.locator("#chart-gamma circle:not(.mark)").count() > 0
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


@pytest.mark.parametrize("size", [(40, 64), (512, 320)], ids=["small and wide", "large and tall"])
def test_ones_own_pictures(browser, tmp_path, size):
    """Any size, prompts as captions, no charts, one number of evaluations."""
    images = [Image.effect_noise(size[::-1], 40 + 10 * k).convert("RGB") for k in range(3)]
    entries = [
        Entry("plain", 6, images),
        Entry("calibrated", 6, images[::-1]),
        Entry("many", 30, images, reference=True),
    ]
    prompts = ["a lighthouse at dawn", "a dragonfly on a reed", "a bowl of lemons, " * 30]
    opened = browser.new_page()
    troubles: list[str] = []
    opened.on("console", lambda message: troubles.append(message.text))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.goto(f"file://{write(of_images(entries, [0, 1, 2], captions=prompts), tmp_path)[0]}")
    assert opened.locator("#caption").inner_text() == prompts[0]
    opened.locator("#seed").fill("2")
    assert opened.locator("#caption").inner_text() == prompts[2].strip()
    assert prompts[2] in opened.locator("#swipe-left").get_attribute("alt")
    assert not opened.locator("#charts-title").is_visible()
    assert loaded(opened)
    box = opened.locator("#swipe-left").bounding_box()
    assert box["height"] / box["width"] == pytest.approx(size[0] / size[1], rel=0.02)
    for width in (320, 1400):
        opened.set_viewport_size({"width": width, "height": 700})
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.close()
    assert troubles == []
