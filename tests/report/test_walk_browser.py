"""Every kind of page in a real browser, at both widths and in both schemes: it fits, can be read, and has contents."""

from dataclasses import replace

import pytest
from tests.report.reading import CONTRAST, TEXTS
from tests.report.rescues import make_rescue
from tests.report.run.runs import make_run
from tests.report.validation.test_validation_browser import THREE
from tests.report.validation.validations import make_validation

from floatline.report.rescue import write_rescue
from floatline.report.run.folders import open_runs
from floatline.report.run.page import write_run_page
from floatline.report.validation.report import write_report

KINDS = ("rescued", "none", "one", "three", "bare", "run", "runs", "stopped")
OPEN = "document.querySelectorAll('details').forEach(folded => { folded.open = true; })"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of each kind."""
    folder = tmp_path_factory.mktemp("walk")
    none = replace(make_rescue(cause="bad-input-data"), plan=None, validation=None, island=None, tried=(), curves={})
    made = {}
    for name, rescue in (("rescued", make_rescue()), ("none", none)):
        write_rescue(rescue, folder / name)
        made[name] = folder / name / "report.html"
    studies = {"one": make_validation(), "three": make_validation(THREE), "bare": make_validation(bare=True)}
    made |= {name: write_report(study, folder / name) for name, study in studies.items()}
    make_run(folder / "a", planned=300)
    make_run(folder / "b", plan="bf16")
    make_run(folder / "c", stop="16 steps in a row were skipped")
    for name, runs in (("run", "a"), ("runs", "ab"), ("stopped", "c")):
        made[name] = folder / f"{name}.html"
        write_run_page([run.look() for run in open_runs([folder / run for run in runs])], made[name])
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", KINDS)
def test_the_page_fits_and_every_text_stands_out(visit, pages, kind, width, scheme):
    page = visit(pages[kind], width=width, scheme=scheme)
    page.evaluate(OPEN)
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert min(page.evaluate(CONTRAST, f"{TEXTS}, code, a, button, pre span")) >= 4.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_page_has_contents_that_lead_somewhere(visit, pages, kind):
    page = visit(pages[kind], width=1280)
    links = page.locator("nav.contents a")
    if page.evaluate("document.documentElement.scrollHeight") > 3000:
        assert links.count() > 3
    for number in range(links.count()):
        target = links.nth(number).get_attribute("href")
        assert page.locator(target).inner_text().startswith(links.nth(number).inner_text())


@pytest.mark.parametrize("kind", ["rescued", "one", "stopped"])
def test_the_first_screen_says_what_to_do(visit, pages, kind):
    page = visit(pages[kind], width=1280)
    box = page.locator(".todo").first.bounding_box()
    assert box["y"] + box["height"] <= 900


def test_a_plan_can_be_copied(visit, pages):
    page = visit(pages["rescued"])
    buttons = page.locator("button.copy")
    assert buttons.count() >= 2
    buttons.first.click()
    page.get_by_text("copied", exact=True).wait_for()
