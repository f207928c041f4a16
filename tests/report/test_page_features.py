"""What every page has to have: a way in, an answer first, code as code, nothing empty, and colours that can be read."""

import math
import re
from dataclasses import replace

import pytest
from tests.report.reading import Page
from tests.report.rescues import make_rescue
from tests.report.run.runs import make_run
from tests.report.validation.validations import make_validation
from tests.slow import slow

from floatline.report.document.detail import MOST_BYTES
from floatline.report.document.html import coded, diff_lines, page_of, read_text
from floatline.report.rescue import write_rescue
from floatline.report.run.folders import open_runs
from floatline.report.run.page import write_run_page
from floatline.report.step_ranges import draw_step_ranges
from floatline.report.validation.layers import layer_part
from floatline.report.validation.report import document_of, write_report
from floatline.report.validation.texts import TONES
from floatline.validation.result import LayerNumbers, PeakMemory

FOUND = "exp-overflow at net.py:31: exp(12) is 162754; write torch.sigmoid(x)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of each kind, as text."""
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    none = replace(make_rescue(cause="bad-input-data"), plan=None, validation=None, island=None, tried=(), curves={})
    for name, rescue in (("rescued", make_rescue()), ("none", none)):
        write_rescue(rescue, folder / name)
        made[name] = folder / name / "report.html"
    for name, candidates in (("one", None), ("three", {"fp16-mixed": 0.0, "bf16-mixed": 0.03, "fp16-true": math.inf})):
        made[name] = write_report(make_validation(candidates), folder / name)
    ledger = make_run(folder / "run", close=False)
    ledger.event("diagnosis", FOUND)
    ledger.event(
        "stop", f"Stopped at step 300: 16 skips in a row. The diagnosis of step 300: {FOUND} State: run/stopped."
    )
    ledger.close()
    made["stopped"] = folder / "stopped.html"
    write_run_page([run.look() for run in open_runs([folder / "run"])], made["stopped"])
    return {name: path.read_text(encoding="utf-8") for name, path in made.items()}


KINDS = ("rescued", "none", "one", "three", "stopped")


@pytest.mark.parametrize("kind", KINDS)
def test_the_contents_lead_to_every_part(pages, kind):
    elements = Page(pages[kind]).elements
    links = [attrs["href"][1:] for tag, attrs in elements if tag == "a" and attrs.get("href", "").startswith("#")]
    names = [attrs["id"] for tag, attrs in elements if "id" in attrs]
    assert names == [f"part-{number + 1}" for number in range(len(names))]
    assert links == (names if len(names) > 3 else [])
    assert len(names) > 3 or kind == "none"  # three headings need no list


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_light_and_shows_no_backticks_and_no_nan_in_small_letters(pages, kind):
    assert len(pages[kind].encode()) <= MOST_BYTES
    text = Page(pages[kind]).text
    assert "`" not in text
    assert not re.search(r"\bnan\b|-0\.0000 %", text)


@pytest.mark.parametrize(
    ("kind", "todo"),
    [
        ("rescued", "Train with the plan: floatline train net.py --plan plan.yaml"),
        ("one", "Sign it off: floatline approve"),
        ("stopped", "Make that change, and go on from the last checkpoint: floatline train TARGET"),
        ("none", "At energy.py:22"),
    ],
)
def test_the_head_says_what_to_do(pages, kind, todo):
    head = pages[kind].partition("</header>")[0]
    assert 'class="todo"' in head and todo in Page(head).text


def test_a_stopped_run_tells_its_cause_first_and_once(pages):
    text = Page(pages["stopped"].partition("<nav")[0]).text
    assert text.count(FOUND) == 1
    assert text.index(FOUND) < text.index("16 skips in a row")


def test_a_run_without_a_finite_number_has_no_empty_chart_and_no_empty_bar(tmp_path):
    import floatline as fl

    ledger = fl.Ledger.create(tmp_path / "run", metadata={"plan": {"name": "fp16-mixed", "compute": "fp16"}})
    for _ in range(20):
        ledger.append(loss=math.nan, scale=1.0, grad_norm=math.nan, layer_norms={"head": math.inf}, reason="overflow")
    ledger.close()
    write_run_page([run.look() for run in open_runs([tmp_path / "run"])], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"loss":null' in text and '"norm":null' in text
    assert 'class="zone' not in text and "No layer has had a finite norm." in text


def test_the_picture_of_a_rescue_comes_first_and_its_tiles_are_speed_and_memory(pages):
    page = Page(pages["rescued"])
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", pages["rescued"])
    assert headings[0] == "Before and after"
    assert "Speed — measured by --prove Peak memory — measured by --prove" in page.text
    assert "Tried" not in [attrs.get("class") for _, attrs in page.elements] and "Took" not in page.text


def test_code_is_code_and_a_diff_is_coloured_and_can_be_copied(pages):
    assert str(coded("with `a < b` in 12 s")) == "with <code>a &lt; b</code> in 12\u00a0s"
    assert str(coded("a lone ` stays")) == "a lone ` stays"
    assert str(diff_lines("--- a/x\n@@ -1 +1 @@\n-a\n+<b>\n c")) == "\n".join(
        f'<span class="{kind}">{line}</span>'
        for kind, line in (
            ("hunk", "--- a/x"),
            ("hunk", "@@ -1 +1 @@"),
            ("del", "-a"),
            ("ins", "+&lt;b&gt;"),
            ("", " c"),
        )
    )
    blocks = [attrs for tag, attrs in Page(pages["rescued"]).elements if tag == "pre"]
    copied = [attrs["aria-label"] for attrs in blocks if "data-copy" in attrs]
    assert {"plan.yaml", "fix.patch"} <= set(copied)
    assert 'class="ins"' in pages["rescued"] and 'class="del"' in pages["rescued"]


def test_ranges_are_a_drawing_that_says_the_same_in_words():
    drawn = draw_step_ranges(make_rescue().diagnosis.chart)
    assert drawn is not None and drawn.svg.startswith('<svg class="drawing"')
    assert "energy: forward overflow, backward overflow" in drawn.summary
    assert "overflow in both" in drawn.svg and "forward overflow" in drawn.svg
    assert "▀" not in drawn.svg and "▀" in drawn.plain
    assert draw_step_ranges(()) is None


def test_the_modules_most_worth_a_look_begin_with_the_least_headroom():
    layers = [LayerNumbers(f"m{k}", float(k % 7), 0.0, 0.999 - 0.05 * (k == 3), 1.0) for k in range(30)]
    table = layer_part(layers).blocks[2]
    rooms = [float(row[1].split()[0]) for row in table.rows]
    assert rooms == sorted(rooms) and len(rooms) == 10
    assert "m3" in [row[0] for row in table.rows]  # its gradient differs most


def test_times_of_a_cpu_are_marked_in_the_tile():
    gpu = make_validation()
    labels = [tile.label for tile in document_of(gpu).tiles]
    cpu = replace(gpu, memory=tuple(PeakMemory(m.arm, m.peak, m.parts, device="cpu") for m in gpu.memory))
    assert labels[2] == "Speed" and document_of(cpu).tiles[2].label == "Speed on a CPU, emulated"


def colours(dark: bool) -> dict[str, tuple[float, ...]]:
    """The colours of one scheme, as the style names them."""
    light, _, rest = read_text("templates/look.css").partition("@media screen and (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", light))
    found |= dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", rest)) if dark else {}
    return {name: tuple(int(code[at : at + 2], 16) / 255 for at in (0, 2, 4)) for name, code in found.items()}


def contrast(ink: tuple[float, ...], ground: tuple[float, ...]) -> float:
    """As WCAG 2 defines it."""

    def light(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((light(ink), light(ground)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_ink_stands_out_from_every_ground_that_it_is_set_on(dark):
    found = colours(dark)
    tones = ("good", "warn", "bad", "unsure")
    pairs = [(ink, ground) for ink in ("ink", "muted", "link") for ground in ("page", "panel")]
    pairs += [(ink, f"{tone}-tint") for tone in tones for ink in ("ink", "muted", tone)]
    pairs += [(tone, "page") for tone in tones]
    assert {pair: ratio for pair in pairs if (ratio := contrast(found[pair[0]], found[pair[1]])) < 4.5} == {}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_curve_stands_out_from_the_page(dark):
    found = colours(dark)
    names = ["reference", "candidate", *(f"p{number}" for number in range(8))]
    assert {name: ratio for name in names if (ratio := contrast(found[name], found["page"])) < 3} == {}


def test_a_colour_that_does_not_stand_out_would_be_found():
    assert contrast((0.73, 0.73, 0.73), (1.0, 1.0, 1.0)) < 3 < 4.5 < contrast((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@slow
def test_a_heavy_study_has_a_light_page_and_a_light_one_is_shown_whole(tmp_path):
    arms = {"fp16-mixed": 0.0, "bf16-mixed": 0.01, "fp16-true": 0.02}
    heavy = make_validation(arms, num_seeds=20, spread=0.02)
    runs = tuple(replace(run, curve=tuple((k, 2 + 1 / (k + run.seed)) for k in range(1, 401))) for run in heavy.runs)
    layers = {arm: tuple(LayerNumbers(f"blocks.{k}.ff", 9.0, 0.0, 0.99, 1.0) for k in range(700)) for arm in arms}
    page = write_report(replace(heavy, runs=runs, layers=layers), tmp_path / "heavy")
    assert page.stat().st_size <= MOST_BYTES
    assert len(page_of(document_of(replace(heavy, runs=runs, layers=layers)), tones=TONES)) > 2 * MOST_BYTES
    whole = make_validation()
    assert write_report(whole, tmp_path / "one").read_text(encoding="utf-8") == page_of(document_of(whole), tones=TONES)


@slow
def test_the_page_of_many_runs_is_light(tmp_path):
    for number in range(8):
        make_run(tmp_path / f"run-{number}", steps=450, layers=tuple(f"blocks.{k}.weight" for k in range(40)))
    write_run_page([run.look() for run in open_runs([tmp_path / f"run-{k}" for k in range(8)])], tmp_path / "runs.html")
    assert (tmp_path / "runs.html").stat().st_size <= MOST_BYTES


def test_an_option_in_a_sentence_is_code_and_a_dash_is_not():
    assert str(coded("--rare 0.1 runs 29 seeds -- or not, a--b")) == (
        '<code class="option">--rare 0.1</code> runs 29 seeds -- or not, a--b'
    )
