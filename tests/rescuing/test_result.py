"""What a rescue comes to, in one word and in a sentence."""

import html
import re
from dataclasses import replace

import pytest
from rich.console import Console
from tests.report.rescues import make_rescue
from tests.report.validation.validations import make_validation

from floatline.causes import find_cause
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding
from floatline.plans.presets import resolve_plan
from floatline.report.rescue import print_rescue, write_rescue
from floatline.rescuing.result import Rescue, Tried
from floatline.validation.verdict.comparison import Gate

PLAN = resolve_plan("fp16-mixed")
PASS, FAIL = (make_validation({"rescued": worse}, bare=True) for worse in (0.0, 0.5))


def of(cause):
    findings = (Finding(find_cause(cause), "seen", "do this", file="/x/net.py", line=7),) if cause else ()
    return Diagnosis("net.py", "fp16-mixed", findings, 1.0)


BROKEN = Rescue("net.py", of("product-overflow"), 40, tried=(Tried("a in FP32", "why", "it lags", 1.0),))


@pytest.mark.parametrize(
    ("rescue", "outcome", "words"),
    [
        (Rescue("net.py", of(""), 40), "healthy", "no plan is needed"),
        (Rescue("net.py", of("bad-input-data"), 40), "not-precision", "bad-input-data at net.py:7. Do this: do this"),
        (BROKEN, "code-change", "No plan fixes product-overflow at net.py:7; the code must change: do this: do this"),
        (replace(BROKEN, complete=False), "unsolved", "none of the 1 plans that were tried fixes it. Give more time"),
        (replace(BROKEN, plan=PLAN, does="a in FP32"), "not-verified", "That is not verified"),
        (replace(BROKEN, plan=PLAN, validation=FAIL, margin="5 %"), "not-verified", "margin 5 %) says FAIL"),
        (replace(BROKEN, plan=PLAN, validation=PASS, margin="5 %"), "rescued", "trains as FP32 does: the short"),
        (replace(BROKEN, plan=PLAN, validation=PASS, margin="1 %", proved=True), "rescued", "the full validation"),
    ],
)
def test_the_outcome_and_its_words(rescue, outcome, words):
    assert (rescue.outcome, rescue.solved) == (outcome, outcome in ("healthy", "rescued"))
    assert words in rescue.words and rescue.as_json()["words"] == rescue.words


def test_a_page_without_a_validation_says_healthy_and_not_pass(tmp_path):
    lag = replace(of(""), notes=("the last loss is 0.3, in FP32 0.1",))
    rescue = Rescue("net.py", lag, 40)
    console = Console(record=True, width=400, color_system=None)
    print_rescue(rescue, write_rescue(rescue, tmp_path), console)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "HEALTHY" in page and ">PASS<" not in page
    assert "in FP32 0.1" in page and "in FP32 0.1" in console.export_text()


def test_a_refused_check_says_what_to_do_and_does_not_send_to_the_full_one(tmp_path):
    gate = Gate("noise-floor", False, "too noisy", "More seeds.")
    best = replace(PASS.best, verdict="REFUSED", gates=(gate,))
    refused = replace(BROKEN, plan=PLAN, validation=replace(PASS, comparisons=(best,)), margin="5 %")
    console = Console(record=True, width=400, color_system=None)
    print_rescue(refused, write_rescue(refused, tmp_path), console)
    assert "do     More seeds." in console.export_text() and "--prove" not in refused.words
    assert "--prove" in replace(refused, validation=FAIL).words


def test_a_change_of_the_code_that_does_not_hold_is_told_and_no_patch_is_written(tmp_path):
    found = of("product-overflow")
    tried = replace(found.primary, tried="x.float() * x does not help: product-overflow at net.py:7.")
    rescue = replace(BROKEN, diagnosis=replace(found, findings=(tried,)))
    console = Console(record=True, width=400, color_system=None)
    files = write_rescue(rescue, tmp_path)
    print_rescue(rescue, files, console)
    assert "fix.patch" not in files and not (tmp_path / "fix.patch").exists() and rescue.as_json()["fixes"] == []
    assert "code   do this\n  code   x.float() * x does not help: product-overflow" in console.export_text()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Change of the code" in page and "x.float() * x does not help" in page and "patch -p1" not in page


def test_a_change_of_several_lines_that_was_not_tried_can_be_copied_from_terminal_and_page(tmp_path):
    found = of("product-overflow")
    code = "with torch.autocast('cuda', enabled=False):\n    y = x @ w  # wide\n    z = y"
    tried = replace(found.primary, fix=code, tried="This change was not tried: it took longer than 300 s.")
    rescue = replace(BROKEN, diagnosis=replace(found, findings=(tried,)))
    console = Console(record=True, width=400, color_system=None)
    print_rescue(rescue, write_rescue(rescue, tmp_path), console)
    shown = console.export_text().splitlines()
    at = next(number for number, line in enumerate(shown) if line.startswith("  code "))
    assert "\n".join(line[9:] for line in shown[at : at + 3]) == code
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert code in html.unescape(re.sub("<[^>]*>", "", page))
    assert "\n" not in rescue.words and rescue.words.count("enabled=False): …") == ("do this" in rescue.words)


def test_the_terminal_names_the_cause_the_trials_the_files_and_what_comes_next(tmp_path):
    console = Console(record=True, width=400, color_system=None)
    rescue = make_rescue("a\x1b[2Jb\n[red]c", "net.py")
    print_rescue(rescue, write_rescue(rescue, tmp_path), console)
    text = console.export_text()
    lines = [line.split()[0] for line in text.splitlines()]
    assert lines == [
        *("rescued", "found", "seen", "tried", "tried", "check", "code", "code", "note", "time"),
        *("plan", "patch", "report", "next", "or"),
    ]
    assert "\x1b" not in text and "[red]c" in text
    assert f"floatline approve {tmp_path} --by NAME" in text
