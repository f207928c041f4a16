"""Every kind of page in a real browser, at both widths, in both schemes and on paper: it can be read and used."""

from dataclasses import replace

import pytest
from tests.agreement.models import make_decoder, make_ids
from tests.report.auditing import UNFOLD, find_faults, find_focus_faults
from tests.report.rescues import make_rescue
from tests.report.run.runs import make_run
from tests.report.validation.test_validation_browser import THREE
from tests.report.validation.test_validation_report import still
from tests.report.validation.validations import make_validation
from tests.slow import mostly_slow, slow

import floatline as fl
from floatline.report.parity import write_parity
from floatline.report.rescue import write_rescue
from floatline.report.run.folders import open_runs
from floatline.report.run.page import write_run_page
from floatline.report.validation.report import write_report

KINDS = (
    "rescued", "none", "one", "three", "bare", "failed", "marginal", "inconclusive", "refused",
    "run", "runs", "stopped", "interrupted", "died", "empty", "parity",
)  # fmt: skip
RUNS = {"run": "a", "runs": "abc", "stopped": "c", "died": "d", "empty": "e", "interrupted": "f"}
HEAVIEST = 150_000
PAPER, SHEET = 700, 1016  # an A4 page without its margins


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of each kind."""
    folder = tmp_path_factory.mktemp("walk")
    none = replace(make_rescue(cause="bad-input-data"), plan=None, validation=None, island=None, tried=(), curves={})
    made = {}
    for name, rescue in (("rescued", make_rescue()), ("none", none)):
        write_rescue(rescue, folder / name)
        made[name] = folder / name / "report.html"
    studies = {"one": None, "three": THREE, "failed": {"fp16-mixed": 0.05}}
    made |= {name: write_report(make_validation(arms), folder / name) for name, arms in studies.items()}
    others = {
        "bare": make_validation(bare=True),
        "marginal": still(0.015, spread=0.001),
        "inconclusive": still(0.0, spread=0.05),
        "refused": make_validation(num_seeds=3, spread=0.02),
    }
    made |= {name: write_report(validation, folder / name) for name, validation in others.items()}
    make_run(folder / "a", planned=300)
    make_run(folder / "b", plan="bf16")
    make_run(folder / "c", stop="Stopped at step 300: 16 steps in a row were skipped.")
    make_run(folder / "d", planned=300, steps=200, close=False)
    make_run(folder / "e", steps=0, plan=None, layers=(), skips=False)
    make_run(folder / "f", planned=900, steps=500)
    for name, runs in RUNS.items():
        made[name] = folder / f"{name}.html"
        looks = [run.look() for run in open_runs([folder / run for run in runs])]
        write_run_page([replace(run, state="died") for run in looks] if name == "died" else looks, made[name])
    write_parity(compare_decoders(), folder / "parity")
    return made | {"parity": folder / "parity" / "report.html"}


def compare_decoders():
    """Two decoders in BF16, one of which has another eps."""
    with fl.HalfOnCPU():
        return fl.parity(make_decoder(), make_decoder({}, {"eps": 1e-3}), make_ids())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", mostly_slow(KINDS, every=100))
def test_the_page_has_no_fault(visit, pages, kind, width, scheme):
    page = visit(pages[kind], width=width, scheme=scheme)
    page.evaluate(UNFOLD)
    page.wait_for_timeout(100)
    assert find_faults(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", mostly_slow(KINDS, every=100, rare=2))
def test_on_paper_it_is_whole_and_dark_on_white(visit, pages, kind, scheme):
    page = visit(pages[kind], width=PAPER, scheme=scheme)
    page.emulate_media(media="print", color_scheme=scheme)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_timeout(100)
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not [button for button in page.locator("button, .hint").all() if button.is_visible()]
    assert find_faults(page) == []
    assert find_breaks(page) == []


def find_breaks(page) -> list[str]:
    """What a printer would tear apart: blocks that stay whole and fill a sheet, and heads that stand alone."""
    return page.evaluate(
        """sheet => [
          ...[...document.querySelectorAll("main *")].filter(element => element.getBoundingClientRect().height > sheet
            && getComputedStyle(element).breakInside === "avoid").map(element => `${element.className} is too long`),
          ...[...document.querySelectorAll("h2, h3, caption, .label, .chart-title")].filter(element =>
            getComputedStyle(element).breakAfter !== "avoid").map(element => `${element.textContent} may end a sheet`),
          ...[...document.styleSheets].some(sheet => [...sheet.cssRules].some(rule => rule instanceof CSSPageRule))
            ? [] : ["no margins"],
        ]""",
        SHEET,
    )


@slow
def test_what_a_printer_would_tear_apart_would_be_found(visit, pages):
    page = visit(pages["run"], width=PAPER)
    assert find_breaks(page)  # on a screen nothing says where a sheet ends
    page.emulate_media(media="print")
    assert find_breaks(page) == []
    page.evaluate("document.querySelector('figure.curves').style.breakInside = 'avoid'")
    assert find_breaks(page) == ["curves is too long"]


@pytest.mark.parametrize("kind", mostly_slow(KINDS, every=100))
def test_the_tab_key_reaches_everything_in_order_and_in_sight(visit, pages, kind):
    assert find_focus_faults(visit(pages[kind], width=1280)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_light(pages, kind):
    assert pages[kind].stat().st_size <= HEAVIEST


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_page_has_contents_that_lead_somewhere(visit, pages, kind):
    page = visit(pages[kind], width=1280)
    links = page.locator("nav.contents a")
    if page.evaluate("document.documentElement.scrollHeight") > 3000:
        assert links.count() > 3
    for number in range(links.count()):
        target = links.nth(number).get_attribute("href")
        assert page.locator(target).inner_text().startswith(links.nth(number).inner_text())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bare", "run")])
def test_the_first_screen_says_what_to_do(visit, pages, kind):
    page = visit(pages[kind], width=1280)
    box = page.locator(".todo").first.bounding_box()
    assert box["y"] + box["height"] <= 900


@pytest.mark.parametrize("kind", ["rescued", "one"])
def test_what_a_button_copies_can_be_pasted(visit, pages, kind):
    page = visit(pages[kind])
    page.evaluate("document.body.append(document.createElement('textarea'))")
    blocks, buttons = page.locator("pre[data-copy]"), page.locator("button.copy")
    assert blocks.count() == buttons.count() >= 2
    for number in range(buttons.count()):
        buttons.nth(number).click()
        page.get_by_text("copied", exact=True).first.wait_for()
        paste = page.locator("textarea")
        paste.fill("")
        paste.press("ControlOrMeta+v")
        assert paste.input_value().strip() == blocks.nth(number).evaluate("block => block.textContent").strip()


SPOILT = {
    "contrast": "document.querySelector('h1').style.color = '#bbbbbb'",
    "the page is": "document.querySelector('main').style.width = '2000px'",
    "cut off by": "document.querySelector('h1').style = 'width: 60px; overflow: hidden; white-space: nowrap'",
    "label outside": "document.querySelector('svg.drawing text').setAttribute('x', '-60')",
    "labels over": "document.querySelectorAll('svg.drawing text').forEach(text => text.setAttribute('x', '50%'))",
    "broken in a word": "document.querySelector('.meaning').style = 'width: 2.2em; word-break: break-all'",
    "shown": "document.querySelector('h1').textContent = 'worse by -0.0000 %'",
    "said twice": "document.querySelector('.hero').append(document.querySelector('.reason').cloneNode(true))",
    "h5 follows": "document.querySelector('section').innerHTML += '<h5>too deep</h5>'",
    "without a name": "document.querySelector('button').textContent = ''",
    "without words": "document.querySelector('svg.drawing').removeAttribute('aria-label')",
    "id": "document.querySelectorAll('h3').forEach(heading => { heading.id = 'same'; })",
}  # fmt: skip


@pytest.mark.parametrize("fault", mostly_slow(SPOILT, every=8))
def test_a_fault_would_be_found(visit, pages, fault):
    page = visit(pages["one"], width=1280)
    page.evaluate(SPOILT[fault])
    assert any(found.startswith(fault) or fault in found for found in find_faults(page))


def test_a_label_that_a_chart_cuts_off_would_be_found(visit, pages):
    page = visit(pages["one"], width=1280)
    draw = "document.querySelector('canvas').getContext('2d').fillText('+20.00 %', -20, 40)"
    assert find_faults(page) == []
    page.evaluate(draw)
    assert find_faults(page) == ["cut off in a chart: +20.00 %"]


def test_a_focus_without_a_sign_would_be_found(visit, pages):
    page = visit(pages["one"], width=1280)
    page.evaluate("document.querySelectorAll('a').forEach(link => { link.style.outline = 'none'; })")
    assert any(fault.startswith("no sign of the focus on a") for fault in find_focus_faults(page))
