"""The page of `floatline report` in a real browser: it renders, answers, fits a phone, and fetches nothing."""

import re
import time

import pytest
from tests.report.reading import CONTRAST
from tests.report.run.runs import EVIL, make_run
from tests.slow import slow

from floatline.report.run.folders import open_runs
from floatline.report.run.page import write_run_page


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of each kind, and what was measured of each."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", steps=900, planned=900)
    make_run(folder / "two", steps=500, plan="bf16", layers=("head.weight", "body.weight"))
    make_run(folder / "bare", steps=0, plan=None, layers=(), skips=False)
    evil = folder / EVIL.replace("/", "∕")  # a folder may be called so, but for the slash
    make_run(evil, layers=(EVIL, '"><img src=x onerror=alert(2)>'), stop=f"{EVIL}<img src=x onerror=alert(3)>")
    kinds = {"one": ["one"], "two": ["one", "two"], "bare": ["bare"], "evil": [evil.name]}
    made = {}
    for kind, names in kinds.items():
        made[kind] = folder / f"{kind}.html"
        write_run_page([run.look() for run in open_runs([folder / name for name in names])], made[kind])
    return made


@pytest.mark.parametrize(
    ("kind", "word", "num"),
    [("one", "FINISHED", 5), ("two", "2 RUNS", 5), ("bare", "EMPTY", 0), ("evil", "STOPPED", 5)],
)
def test_the_page_renders_without_a_word_in_the_console(visit, pages, kind, word, num):
    page = visit(pages[kind])
    assert page.locator(".verdict").inner_text() == word
    assert page.locator("h1").is_visible()
    assert page.locator(".chart canvas").count() == num
    assert page.title().startswith(word)


def test_a_broken_page_would_be_noticed(browser, tmp_path, pages):
    broken = tmp_path / "broken.html"
    text = pages["one"].read_text(encoding="utf-8")
    broken.write_text(text.replace("<main>", "<main><script>alert(1)</script><img src=https://example.com/x.png>"))
    page = browser.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(broken.as_uri())
    page.close()
    assert len(said) == 2  # the policy stops both, and says so


@slow
def test_the_pointer_reads_all_curves_at_one_step(visit, pages):
    page = visit(pages["one"])
    before = page.locator(".readout").all_inner_texts()
    # 900 steps in 450 points of two: the mean of the last two losses, and the last scale.
    assert before[0].startswith("step 900: 1.00167") and "skipped: 1 overflow" in before[0]
    assert before[2] == "step 900: 0.5"
    chart = page.locator(".chart").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    after = page.locator(".readout").all_inner_texts()
    steps = {re.match(r"step ([\d,]+):", text).group(1) for text in after}
    assert len(steps) == 1 and 440 <= int(steps.pop()) <= 460
    assert after[0] != before[0]


@slow
def test_arrow_keys_read_the_curves(visit, pages):
    page = visit(pages["one"])
    page.locator(".chart").first.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".readout").first.inner_text().startswith("step 898:")
    page.keyboard.press("Home")
    assert page.locator(".readout").first.inner_text().startswith("step 2:")


def x_ranges(page) -> list[tuple[float, float]]:
    return page.evaluate(
        "document.querySelector('figure.curves').plots.map(plot => [plot.scales.x.min, plot.scales.x.max])"
    )


@slow
def test_a_drag_looks_closer_and_a_double_click_goes_back(visit, pages):
    page = visit(pages["one"])
    chart = page.locator(".chart").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    whole = x_ranges(page)
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40, steps=4)
    page.mouse.up()
    close = x_ranges(page)
    assert all(330 < low < high < 570 for low, high in close)  # all charts together
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + 40)
    assert x_ranges(page) == whole


@slow
def test_a_click_hides_a_run(visit, pages):
    page = visit(pages["two"])
    shown = "document.querySelector('figure.curves').plots.map(plot => plot.series.slice(1).map(s => s.show))"
    assert page.evaluate(shown) == [[True, True]] * 5
    picture = page.locator(".chart canvas").first.screenshot()
    chip = page.get_by_role("button", name="two", exact=True)
    chip.click()
    assert page.evaluate(shown) == [[True, False]] * 5
    assert chip.get_attribute("aria-pressed") == "false"
    assert page.locator(".chart canvas").first.screenshot() != picture


def test_a_run_that_ended_earlier_is_said_to_have(visit, pages):
    text = visit(pages["two"]).locator(".readout").first.inner_text()
    assert re.fullmatch(r"step 900: one 1\.00167, skipped: 1 overflow, two 1\.\d+ \(ended at 500\)", text)


def test_a_phone_has_nothing_to_scroll_sideways(visit, pages):
    for kind in pages:
        page = visit(pages[kind], width=390)
        page.evaluate("document.querySelectorAll('details').forEach(folded => { folded.open = true; })")
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, kind


@slow
def test_names_and_words_do_not_meet_on_a_phone(visit, tmp_path):
    make_run(tmp_path / "run", layers=tuple(f"a.rather.long.name.of.a.module.{i}.weight" for i in range(9)))
    path = tmp_path / "page.html"
    write_run_page([run.look() for run in open_runs([tmp_path / "run"])], path)
    page = visit(path, width=390)
    boxes = page.evaluate(
        "[...document.querySelectorAll('.drawing text')].map(t => t.getBoundingClientRect().toJSON())"
    )
    lines = {}
    for box in boxes:
        lines.setdefault(round(box["top"]), []).append((box["left"], box["right"]))
    pairs = [sorted(line) for line in lines.values() if len(line) == 2]
    assert len(pairs) == 9
    assert all(first[1] + 4 < second[0] for first, second in pairs)


@slow
def test_light_and_dark_can_be_read_and_the_charts_follow(visit, pages):
    texts = "p, h1, h2, h3, td, th, caption, dt, dd, summary, li, .badge, .chip, .readout, footer, svg text"
    page = visit(pages["two"])
    picture = page.locator(".chart canvas").first.screenshot()
    for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        found = page.evaluate(CONTRAST, texts)
        assert len(found) > 50
        assert min(found) >= 4.5
    page.wait_for_timeout(50)
    assert page.locator(".chart canvas").first.screenshot() != picture


def test_names_are_texts_and_nothing_more(visit, pages):
    page = visit(pages["evil"])
    page.evaluate("document.querySelectorAll('details').forEach(folded => { folded.open = true; })")
    page.wait_for_timeout(100)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2  # the curves, and the page's own
    assert page.locator("h1").inner_text() == EVIL.replace("/", "∕")
    assert EVIL in page.locator("table").last.inner_text()


def test_the_page_says_what_the_ledger_says(visit, pages):
    page = visit(pages["one"])
    tiles = page.locator(".tiles").inner_text()
    assert "19 of 900" in tiles and "18 overflow, 1 forward-nonfinite" in tiles
    rows = page.locator("table").first.locator("tbody tr").all_inner_texts()
    cells = [row.replace("\xa0", " ").split("\t")[:2] for row in rows]
    assert cells == [["overflow", "18 (2.00 %)"], ["forward-nonfinite", "1 (0.11 %)"]]
    assert "rollback" in page.locator("table").last.inner_text()


def test_a_run_without_norms_by_layer_says_how_to_get_them(pages):
    assert "record_layers_every" in pages["bare"].read_text(encoding="utf-8")
    assert "record_layers_every" not in pages["one"].read_text(encoding="utf-8")


def test_a_run_that_goes_on_is_shown_as_it_stands(visit, tmp_path):
    ledger = make_run(tmp_path / "run", planned=100_000, close=False)
    path = tmp_path / "page.html"
    write_run_page([run.look() for run in open_runs([tmp_path / "run"])], path)
    ledger.close()
    page = visit(path)
    assert page.locator(".verdict").inner_text() == "RUNNING"
    assert "Step 300 of 100,000, ETA " in page.locator(".reason").inner_text()
    assert time.strftime("%Y", time.gmtime()) in page.locator("footer").inner_text()
