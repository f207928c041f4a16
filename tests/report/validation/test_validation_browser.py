"""report.html in a real browser: it renders, answers to the pointer, fits a phone, and runs nothing a name brings."""

import math
import re

import pytest
from tests.report.reading import CONTRAST, TEXTS
from tests.report.validation.validations import EVIL, make_validation
from tests.slow import slow

from floatline.report.validation.report import write_report

THREE = {"fp16-mixed": 0.0002, "bf16-mixed": 0.03, "fp16-true": math.inf}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One report of each kind."""
    folder = tmp_path_factory.mktemp("reports")
    evil = make_validation(dict(zip(EVIL, (0.0, 0.03, 0.04), strict=True)), evil=True)
    made = {"one": make_validation(), "three": make_validation(THREE), "bare": make_validation(bare=True), "evil": evil}
    return {name: write_report(validation, folder / name) for name, validation in made.items()}


@pytest.mark.parametrize("kind", ["one", "three", "bare", "evil"])
def test_the_page_renders_without_a_word_in_the_console(visit, pages, kind):
    page = visit(pages[kind])
    assert page.locator(".verdict").inner_text() == "PASS"
    assert page.locator("h1").is_visible()
    assert page.locator(".chart canvas").count() == (0 if kind == "bare" else 2)


def test_trouble_would_be_seen(browser, tmp_path, pages):
    text = pages["one"].read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("<main>", "<main><script>alert(1)</script><img src=https://example.com/x.png>"))
    page = browser.new_page()
    said, failed = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("dialog", lambda dialog: (failed.append("a dialog"), dialog.dismiss()))
    page.goto(broken.as_uri())
    page.close()
    assert len(said) == 2  # the policy stops both, and says so
    assert failed == []


@slow
def test_the_pointer_reads_the_curves(visit, pages):
    page = visit(pages["one"])
    chart, readouts = page.locator(".chart").first, page.locator(".readout")
    before = readouts.all_inner_texts()
    assert re.fullmatch(r"step 2,000: fp32 2\.3\d+, fp16-mixed 2\.3\d+", before[0])
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    after = readouts.all_inner_texts()
    assert after[0].startswith("step 1,0") and after[0] != before[0]
    assert after[1].startswith("step 1,0")  # both charts follow one pointer
    assert "%" in after[1]


@slow
def test_arrow_keys_read_the_curves(visit, pages):
    page = visit(pages["one"])
    page.locator(".chart").first.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".readout").first.inner_text().startswith("step 1,950:")
    page.keyboard.press("Home")
    assert page.locator(".readout").first.inner_text().startswith("step 50:")


def shown_series(page) -> list[list[bool]]:
    return page.evaluate(
        "[...document.querySelector('figure.curves').plots].map(plot => plot.series.slice(1).map(s => s.show))"
    )


@slow
def test_a_click_hides_a_curve_and_shows_a_seed(visit, pages):
    page = visit(pages["one"])
    seeds = page.get_by_role("button", name=re.compile(r"^seed \d")).count()
    assert shown_series(page)[0] == [True, True] + [False] * 2 * seeds
    picture = page.locator(".chart canvas").first.screenshot()
    page.get_by_role("button", name="fp32", exact=True).click()
    assert shown_series(page)[0][:2] == [True, False]  # the reference is drawn last, over the candidate
    page.get_by_role("button", name="seed 1").click()
    assert shown_series(page)[0][2:6] == [False, False, True, True] and not any(shown_series(page)[0][6:])
    assert shown_series(page)[1][:5] == [True, True, True, False, True] and not any(shown_series(page)[1][5:])
    assert page.get_by_role("button", name="seed 1").get_attribute("aria-pressed") == "true"
    assert page.locator(".chart canvas").first.screenshot() != picture


@slow
def test_a_folded_candidate_draws_its_curves_when_it_is_opened(visit, pages):
    page = visit(pages["three"])
    assert page.locator("figure.curves").count() == 3
    page.locator("details.chapter > summary").first.click()
    page.locator("details.chapter canvas").first.wait_for()
    assert page.locator(".chart canvas").count() == 4
    assert page.locator("details.chapter .chart").first.bounding_box()["width"] > 700


@pytest.mark.parametrize("kind", ["one", "three", "bare", "evil"])
def test_a_phone_has_nothing_to_scroll_sideways(visit, pages, kind):
    page = visit(pages[kind], width=390)
    page.evaluate("document.querySelectorAll('details').forEach(folded => { folded.open = true; })")
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_charts_follow_the_width(visit, pages):
    page = visit(pages["one"])
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("document.querySelector('.chart .u-wrap').clientWidth < 390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["three", "bare"])
def test_every_text_stands_out_from_its_ground(visit, pages, scheme, kind):
    page = visit(pages[kind], scheme=scheme)
    found = page.evaluate(CONTRAST, TEXTS)
    assert len(found) > 50
    assert min(found) >= 4.5


def test_a_text_that_does_not_would_be_found(visit, pages):
    page = visit(pages["one"])
    page.evaluate("document.querySelector('h1').style.color = '#bbbbbb'")
    assert min(page.evaluate(CONTRAST, "h1")) < 4.5


@slow
def test_dark_is_dark_and_the_charts_follow(visit, pages):
    page = visit(pages["one"])
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    picture = page.locator(".chart canvas").first.screenshot()
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == "rgb(13, 17, 23)"
    page.wait_for_timeout(100)
    assert page.locator(".chart canvas").first.screenshot() != picture


@slow
def test_paper_is_light_and_has_no_buttons(visit, pages):
    page = visit(pages["one"], scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".chips").first.is_visible()


def test_the_focus_can_be_seen(visit, pages):
    page = visit(pages["one"])
    page.keyboard.press("Tab")
    style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert page.evaluate("document.activeElement.tagName") != "BODY"
    assert style == "solid"


def test_names_are_texts_and_nothing_more(visit, pages):
    page = visit(pages["evil"])
    page.evaluate("document.querySelectorAll('details').forEach(folded => { folded.open = true; })")
    page.wait_for_timeout(200)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 4  # three sets of curves, and the page's own
    assert page.locator("h1").inner_text().startswith("<script>alert(1)</script> against")
    assert page.get_by_role("button", name=EVIL[0]).count() >= 1
