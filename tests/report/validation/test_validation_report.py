"""report.html, report.md and report.json: the same facts, in order, complete, and nothing a name can break."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace

import pytest
from tests.report.reading import Page, read_markdown, shown_tables, shown_words
from tests.report.validation.validations import EVIL, make_run, make_validation
from tests.slow import slow

from floatline.report.document.html import embedded, security_policy, tied
from floatline.report.validation.evidence import gate_part
from floatline.report.validation.report import write_report
from floatline.report.validation.texts import meaning_of
from floatline.validation.result import PeakMemory, Validation
from floatline.validation.verdict.pairs import ArmRun
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.unpaired import decide_unpaired
from floatline.validation.verdict.verdict import decide

THREE = {"fp16-mixed": 0.0002, "bf16-mixed": 0.03, "fp16-true": math.inf}
EVIL_THREE = dict(zip(EVIL, (0.0, 0.03, math.inf), strict=True))


def study(kind: str) -> Validation:
    if kind == "three":
        return make_validation(THREE)
    if kind == "evil":
        return make_validation(EVIL_THREE, evil=True)
    return make_validation(bare=kind == "bare")


@pytest.fixture(scope="module", params=["one", "three", "bare", "evil"])
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    page = write_report(study(request.param), folder)
    return (
        page.read_text(encoding="utf-8"),
        (folder / "report.md").read_text(encoding="utf-8"),
        json.loads((folder / "report.json").read_text(encoding="utf-8")),
    )


def test_three_files_are_written_and_nothing_else(tmp_path):
    page = write_report(make_validation(), tmp_path / "new" / "study")
    assert page == tmp_path / "new" / "study" / "report.html"
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json", "report.md"]


def test_writing_again_gives_the_same_files(tmp_path):
    def files():
        page = write_report(make_validation(), tmp_path)
        return [page.with_suffix(end).read_bytes() for end in (".html", ".md", ".json")]

    first, again = files(), files()
    assert first == again


def test_the_tables_of_all_three_hold_the_same_cells(written):
    page, markdown, data = written
    shown = shown_tables(data["shown"])
    assert shown
    assert Page(page).tables == shown
    assert read_markdown(markdown).tables[1:] == shown  # the first one holds the tiles


def test_every_sentence_and_number_stands_in_all_three(written):
    page, markdown, data = written
    in_page, in_markdown = Page(page).text, read_markdown(markdown).text
    for words in shown_words(data["shown"]):
        assert words in in_page
        assert words in in_markdown


def test_a_number_that_differs_would_be_found(tmp_path):
    folder = write_report(make_validation(), tmp_path).parent
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    shown = shown_tables(json.loads((folder / "report.json").read_text(encoding="utf-8"))["shown"])
    assert "0.58 %" in markdown
    assert read_markdown(markdown.replace("0.58 %", "0.59 %")).tables[1:] != shown


def test_what_is_shown_is_what_was_measured(tmp_path):
    validation = make_validation()
    data = json.loads((write_report(validation, tmp_path).parent / "report.json").read_text(encoding="utf-8"))
    tiles = {tile["label"]: tile for tile in data["shown"]["tiles"]}
    best = validation.best
    assert tiles["Difference"]["value"] == f"{100 * best.difference:.2f} % worse"
    low, high = (100 * end for end in best.interval)
    assert tiles["Difference"]["detail"].startswith(f"[{-low:.2f} % better, {high:.2f} % worse]")
    assert tiles["Speed"]["value"] == f"{1 / validation.speed[0].timing.ratio:.2f}×"
    assert data["difference"] == best.difference
    assert Validation.from_json(data["validation"]).best == best


def test_the_verdict_comes_first(written):
    page, markdown, data = written
    text = Page(page).text
    assert text.index(data["verdict"]) < text.index(data["shown"]["reason"][:20])
    body = Page(page[page.index("<body>") :]).text
    assert body.startswith(data["verdict"])
    assert data["verdict"] in markdown.splitlines()[0]


def test_several_candidates_are_ranked_before_anything_else(tmp_path):
    page = Page(write_report(make_validation(THREE), tmp_path).read_text(encoding="utf-8"))
    assert [row[1:3] for row in page.tables[0][1:]] == [
        ["fp16-mixed", "PASS"],
        ["bf16-mixed", "FAIL"],
        ["fp16-true", "FAIL"],
    ]
    assert "at most 24 %" in page.text


def test_what_was_not_measured_is_said(tmp_path):
    text = Page(write_report(make_validation(bare=True), tmp_path).read_text(encoding="utf-8")).text
    for words in ("Speed was not measured", "Memory was not measured", "No curves were recorded", "layer by layer"):
        assert words in text


def test_gates_that_were_not_checked_are_not_called_those_without_which_nothing_is_meant(tmp_path):
    tables = {table.caption: table.rows for table in gate_part(make_validation(bare=True).best).blocks}
    passed = {row[1] for row in tables["Without these no verdict means anything"]}
    assert passed == {"passed"}
    unchecked = tables["Not checked: here the verdict takes the runs to be in order"]
    assert {row[1] for row in unchecked} == {"not checked"}
    assert "steps-taken" in [row[0] for row in unchecked]
    for gate in (gate.name for gate in make_validation(bare=True).best.gates if gate.passed is None):
        assert any(gate in flag for flag in make_validation(bare=True).best.flags)


def test_what_marginal_means_follows_from_the_interval():
    best = make_validation().best

    def meaning(low, high):
        return meaning_of(replace(best, verdict="MARGINAL", interval=(low, high)))

    assert meaning(-0.001, 0.004) == (
        "Within 1.00 % on average, and held back by what the reason says: a person has to weigh it."
    )
    assert meaning(0.011, 0.019).startswith("Worse by 1.00 % to 2.00 %: ")
    assert meaning(0.002, 0.019).startswith("Within 2.00 %, and not shown within 1.00 %: ")


def still(worse: float, **changes) -> Validation:
    runs = tuple(make_run(arm, seed, e, **changes) for seed in range(20) for arm, e in (("fp32", 0.0), ("mine", worse)))
    return Validation("t", (decide(runs, candidate="mine", terms=Terms()),), runs)


def unpaired() -> Validation:
    runs = tuple(make_run("fp32", seed) for seed in range(8)) + tuple(make_run("mine", seed) for seed in range(10, 18))
    return Validation("t", (decide_unpaired(runs, candidate="mine", terms=Terms()),), runs)


def in_unit() -> Validation:
    runs = tuple(
        ArmRun(arm, seed, 0.5 + 0.001 * seed + (0.002 * (seed % 2) if arm == "mine" else 0))
        for seed in range(3)
        for arm in ("fp32", "mine")
    )
    terms = Terms(metric="H-mean", higher_is_better=True, scale="difference", margins=(0.01, 0.02))
    return Validation("t", (decide(runs, candidate="mine", terms=terms),), runs)


@pytest.mark.parametrize(
    ("verdict", "make"),
    [
        ("PASS", lambda: still(0.0)),
        ("MARGINAL", lambda: still(0.015, spread=0.001)),
        ("FAIL", lambda: still(0.05)),
        ("FAIL", lambda: make_validation({"mine": math.inf})),
        ("INCONCLUSIVE", lambda: still(0.0, spread=0.05)),
        ("REFUSED", lambda: still(0.0, weights_changed=False)),
        ("REFUSED", lambda: make_validation(num_seeds=2)),
        ("PASS", unpaired),
        ("PASS", in_unit),
    ],
    ids=["pass", "marginal", "fail", "diverged", "inconclusive", "refused", "too-few", "unpaired", "own-unit"],
)
def test_every_verdict_has_a_report(verdict, make, tmp_path):
    validation = make()
    assert validation.verdict == verdict
    page = Page(write_report(validation, tmp_path).read_text(encoding="utf-8"))
    assert page.text.count(verdict) >= 2
    for gate in validation.best.failed_gates:
        assert gate.advice in page.text
    assert not re.search(r"(nan|inf)\s*(%|ms|×|bits)", page.text)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["verdict"] == verdict


@slow
def test_a_name_adds_no_element_to_the_page(tmp_path):
    evil = Page(write_report(make_validation(EVIL_THREE, evil=True), tmp_path).read_text(encoding="utf-8"))
    plain = make_validation(dict(zip("abc", EVIL_THREE.values(), strict=True)))
    tame = Page(write_report(plain, tmp_path).read_text(encoding="utf-8"))
    assert {tag for tag, _ in evil.elements} == {tag for tag, _ in tame.elements}
    assert not any(name.startswith("on") or name == "style" for _, attrs in evil.elements for name in attrs)
    assert [attrs.get("type") for tag, attrs in evil.elements if tag == "script"] == ["application/json"] * 3 + [None]


def test_nothing_is_fetched(written):
    links = [attrs[name] for _, attrs in Page(written[0]).elements for name in ("src", "href") if name in attrs]
    assert [link for link in links if not link.startswith("#part-")] == ["data:,"]
    assert "url(" not in written[0]
    assert "@import" not in written[0]


def test_only_the_own_script_and_style_may_run(written):
    page = written[0]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1).replace("&#39;", "'")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        text = page[page.rindex(f"<{tag}>") + len(tag) + 2 : page.rindex(f"</{tag}>")]
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy


def test_another_script_would_have_another_hash():
    assert security_policy(styles="a", script="b") != security_policy(styles="a", script="c")


def test_embedded_data_cannot_end_its_element():
    data = {"name": "</script><!-- \u2028\u2029 <script>", "values": [1.5, None]}
    text = embedded(data)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == data


def test_the_licence_of_the_chart_library_travels_with_the_page(tmp_path):
    page = write_report(make_validation(), tmp_path).read_text(encoding="utf-8")
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert "Permission is hereby granted" in page


def test_units_stay_with_their_numbers():
    assert tied("takes 12 ms, +1.00 %, 3 MB") == "takes 12\u00a0ms, +1.00\u00a0%, 3\u00a0MB"
    assert tied("seed 3 spreads, 4 sets") == "seed 3 spreads, 4 sets"


def test_drawings_say_their_numbers_in_words(tmp_path):
    page = Page(write_report(make_validation(), tmp_path).read_text(encoding="utf-8"))
    labels = [attrs["aria-label"] for tag, attrs in page.elements if tag == "svg" and attrs.get("role") == "img"]
    assert any("interval [0.60 % better, 0.58 % worse], PASS" in label for label in labels)
    assert any("1.82× as fast" in label for label in labels)
    assert all(label for label in labels)


def test_a_small_difference_does_not_look_like_none():
    terms = Terms()
    assert [terms.show(value) for value in (0.0, 0.00012, 0.00003, -0.0000042)] == [
        "0.00 %",
        "0.01 % worse",
        "0.0030 % worse",
        "0.0004 % better",
    ]


def test_memory_of_a_cpu_is_drawn_without_the_process(tmp_path):
    parts = {"process": 400_000_000, "weights": 1_000_000}
    memory = tuple(PeakMemory(arm, 403_000_000, parts) for arm in ("fp32", "fp16-mixed"))
    page = Page(write_report(replace(make_validation(), memory=memory), tmp_path).read_text(encoding="utf-8"))
    assert ["process", "400 MB", "400 MB", "0 %"] in next(table for table in page.tables if table[0][0] == "part")
    assert "leave out the process" in page.text
    widths = [attrs["width"] for tag, attrs in page.elements if tag == "rect" and "piece" in attrs.get("class", "")]
    assert widths == ["33.33%", "66.67%"] * 2
