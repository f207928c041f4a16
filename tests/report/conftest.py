"""A real browser for the tests of pages: opened once a file, and what a page does in it is watched."""

import os
import shutil

import pytest
from tests.report.auditing import PAINTED

# A browser that asks nobody for anything, also where there is no screen, no sandbox and no graphics card.
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    # Chromium writes into the home folder even without a profile, and a test leaves that alone.
    home = tmp_path_factory.mktemp("home")
    places = {"HOME": home, "XDG_CONFIG_HOME": home / "config", "XDG_CACHE_HOME": home / "cache"}
    with playwright.sync_playwright() as driver:
        environment = {**os.environ, **{name: str(place) for name, place in places.items()}}
        started = driver.chromium.launch(executable_path=found, env=environment, args=QUIET)
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Opens a file; afterwards nothing may have gone wrong, been fetched, or popped up."""
    contexts, trouble = [], []

    def visit(path, *, width=1100, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(300_000)  # a busy machine is slow, and no page is wrong for it
        page = context.new_page()

        def fetched(route):
            if route.request.url == path.as_uri() or route.request.url.startswith("data:"):
                return route.continue_()
            trouble.append(f"fetched {route.request.url}")
            return route.abort()

        page.route("**/*", fetched)
        page.add_init_script(PAINTED)
        page.on("console", lambda said: trouble.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(path.as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert trouble == []
