"""Every rule by its own examples: bad is flagged and fixed, good is silent, fixed code is the same function."""

import ast
import re

import pytest
from tests.lint.properties import run_example

from floatline.lint import RULES, lint_text
from floatline.lint.fixing import fix_text
from floatline.lint.rule import Bad, read_examples

ALIASED = re.compile(r"import [\w.]+ as |from [\w.]+ import .*\w as |from torch[\w.]* import (?!nn\b)")
EXAMPLES = [(rule, bad) for rule in RULES.values() for bad in read_examples(rule.bad)]
COMMENTED = [(rule, bad) for rule, bad in EXAMPLES if not bad.file.endswith(".json")]  # JSON has no comments
FIXED = [(rule, bad) for rule, bad in EXAMPLES if bad.fixed is not None]
NUMERIC = [(rule, bad) for rule, bad in FIXED if rule.code.startswith("FL1")]
SILENT = [(rule, good) for rule in RULES.values() for good in read_examples(rule.good)]


def names(values):
    counts: dict[str, int] = {}
    result = []
    for rule, _ in values:
        counts[rule.code] = counts.get(rule.code, 0) + 1
        result.append(f"{rule.code}-{counts[rule.code]}")
    return result


def flags(rule, example: Bad, source: str | None = None):
    from floatline.hardware import find_hardware

    text = example.source if source is None else source
    on = find_hardware(example.on) if example.on else None
    return lint_text(text, example.file, rules=[rule], on=on, half=True)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_states_its_claim(rule):
    assert re.fullmatch(r"FL\d{3}", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    assert "## Why is this bad?" in rule.__doc__
    assert rule.message and rule.advice
    assert ("## Fix safety" in rule.__doc__) == (rule.fix_safety != "no")
    examples = read_examples(rule.bad)
    assert any(bad.fixed is not None for bad in examples) == (rule.fix_safety != "no")
    assert len(examples) >= 3
    python = [bad.source for bad in examples if bad.file.endswith(".py")]
    assert not python or any(ALIASED.search(source) for source in python)
    assert len(rule.good) >= 3


def test_codes_and_names_are_unique_and_every_file_holds_one_rule():
    assert len({rule.name for rule in RULES.values()}) == len(RULES)
    assert len({rule.__module__ for rule in RULES.values()}) == len(RULES)


@pytest.mark.parametrize(("rule", "bad"), EXAMPLES, ids=names(EXAMPLES))
def test_bad_code_is_flagged(rule, bad):
    assert [one.rule for one in flags(rule, bad)]


@pytest.mark.parametrize(("rule", "good"), SILENT, ids=names(SILENT))
def test_a_near_miss_is_not(rule, good):
    assert [str(one) for one in flags(rule, good)] == []


@pytest.mark.parametrize(("rule", "bad"), COMMENTED, ids=names(COMMENTED))
def test_an_allowing_comment_silences_it(rule, bad):
    allowed = f"# floatline: allow[{rule.name}]\n{bad.source}"
    assert flags(rule, bad, f"# floatline: allow[another-rule]\n{bad.source}")
    assert not flags(rule, bad, allowed)


@pytest.mark.parametrize(("rule", "bad"), FIXED, ids=names(FIXED))
def test_the_fix_is_the_one_that_is_shown_and_fixing_twice_is_fixing_once(rule, bad):
    fixed, _ = fix_text(bad.source, bad.file, rules=[rule], unsafe=True)
    assert fixed == bad.fixed
    if bad.file.endswith(".py"):
        ast.parse(fixed)
    assert fix_text(fixed, bad.file, rules=[rule], unsafe=True)[0] == fixed
    assert not flags(rule, bad, fixed)
    if rule.fix_safety == "safe":
        assert fix_text(bad.source, bad.file, rules=[rule])[0] == bad.fixed


@pytest.mark.parametrize(("rule", "bad"), EXAMPLES, ids=names(EXAMPLES))
def test_what_is_not_shown_as_fixed_stays(rule, bad):
    if bad.fixed is None:
        assert fix_text(bad.source, bad.file, rules=[rule], unsafe=True)[0] == bad.source


@pytest.mark.parametrize(("rule", "bad"), NUMERIC, ids=names(NUMERIC))
def test_the_fix_is_the_same_function_in_fp64_and_no_worse_in_fp16(rule, bad):
    before, after = run_example(bad.source), run_example(bad.fixed)
    if rule.fix_safety == "safe" or rule.code in ("FL104", "FL108"):
        assert before.fp64_equals(after)
        assert after.fp64.dtype is before.fp64.dtype
    assert after.fp16_error() <= before.fp16_error()
    assert after.fp16_error() < float("inf")
