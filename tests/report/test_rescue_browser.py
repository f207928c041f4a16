"""A rescue's report.html in a real browser: it renders in silence, fits a phone, and no name in it is markup."""

from dataclasses import replace

import pytest
from tests.report.reading import CONTRAST, TEXTS
from tests.report.rescues import make_rescue
from tests.report.validation.validations import EVIL

from floatline.report.rescue import write_rescue


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Rescued; with names that would run; not precision, without a plan."""
    folder = tmp_path_factory.mktemp("rescues")
    none = replace(make_rescue(cause="bad-input-data"), plan=None, validation=None, island=None, tried=(), curves={})
    made = {"rescued": make_rescue(), "evil": make_rescue("".join(EVIL), EVIL[0]), "none": none}
    for kind, rescue in made.items():
        write_rescue(rescue, folder / kind)
    return {kind: folder / kind / "report.html" for kind in made}


@pytest.mark.parametrize(("kind", "verdict"), [("rescued", "PASS"), ("evil", "PASS"), ("none", "FAIL")])
def test_the_page_renders_in_silence(visit, pages, kind, verdict):
    page = visit(pages[kind])
    assert page.locator(".verdict").inner_text() == verdict
    headings = page.locator("h2").all_inner_texts()
    assert headings[0] == ("What is wrong" if kind == "none" else "Before and after")
    assert "What is wrong" in headings and "Stages" in headings
    assert ("The plan" in headings, "The evidence" in headings) == (kind != "none",) * 2


def test_names_are_text(visit, pages):
    page = visit(pages["evil"])
    assert page.locator("main img, main script:not([type])").count() == 0
    assert all(piece in page.locator("main").inner_text() for piece in (EVIL[0], EVIL[1]))


@pytest.mark.parametrize("kind", ["rescued", "evil", "none"])
def test_a_phone_needs_no_sideways_scrolling(visit, pages, kind):
    page = visit(pages[kind], width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(visit, pages, scheme):
    page = visit(pages["rescued"], scheme=scheme)
    assert min(page.evaluate(CONTRAST, TEXTS)) >= 4.5


def test_a_page_in_which_a_name_were_markup_would_be_found(browser, pages, tmp_path):
    text = pages["evil"].read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace("&lt;script&gt;alert(1)&lt;/script&gt;", "<script>alert(1)</script>"))
    page = browser.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(broken.as_uri())
    assert page.locator("main script:not([type])").count() > 0 and said
    page.close()
