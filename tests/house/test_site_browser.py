"""The built site from the disk, in a browser: pages fit, long lines scroll, nothing is fetched, the search answers."""

from pathlib import Path

import pytest
from tests.report.conftest import browser  # noqa: F401
from tests.slow import exhaustive, slow

SITE = Path(__file__).parents[2] / "site"
PAGES = ("index", "first_proof", "messages", "peers", "diagnose", "api", "compatibility", "workloads/mmgcn")
TOO_WIDE = """[...document.querySelectorAll('pre code')].filter(code => code.scrollWidth > code.clientWidth + 1
  && !/auto|scroll/.test(getComputedStyle(code).overflowX)).length"""

pytestmark = [slow, pytest.mark.skipif(not (SITE / "index.html").exists(), reason="make site has not been run")]


@pytest.fixture
def visit(browser):  # noqa: F811
    """Opens a page; nothing may go wrong in it, nor be fetched from elsewhere."""
    trouble, contexts = [], []

    def visit(name, *, width=1280, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda said: trouble.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith("http") and trouble.append(f"fetched {asked.url}"))
        page.goto((SITE / f"{name}.html").as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert trouble == []


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        *(pytest.param(*one, marks=exhaustive) for one in ((1280, "dark"), (390, "light"), (390, "dark"))),
    ],
)
def test_pages_are_as_wide_as_the_window_and_long_lines_of_code_scroll(visit, width, scheme):
    for name in PAGES:
        page = visit(name, width=width, scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(TOO_WIDE) == 0, name


@pytest.mark.parametrize("name", ["index", "workloads/mmgcn"])
def test_the_search_answers_without_a_server(visit, name):
    page = visit(name)
    opened = page.locator(".md-search__input:focus")
    while not opened.count():  # the page hears keys once its script is there
        page.keyboard.press("s")
        page.wait_for_timeout(200)
    page.keyboard.type("Attempting to unscale FP16 gradients")
    page.locator(".md-search-result__item").first.wait_for()
    found = page.locator(".md-search-result__item h1").all_inner_texts()
    assert "Error messages" in found or "FP16 parameters" in " ".join(found)
