"""Fast and slow tests are all of the tests, and what must pass before a change lands runs both."""

import re
from pathlib import Path

import pytest
from tests.shared import folder_of, once
from tests.slow import mostly_slow

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci" / "run"


def read_recipes(text):
    """What make runs, by target."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"([\w-]+):", line):
            target = match[1]
        elif line.startswith("\t"):
            found.setdefault(target, []).append(line.strip().removeprefix("@"))
    return found


def marks_of(recipe):
    return re.findall(r' -m ("[^"]+"|\w+)$', "\n".join(recipe), re.MULTILINE)


@pytest.mark.skipif(not CI.exists(), reason="is not part of a source distribution")
def test_a_change_that_lands_has_passed_fast_and_slow_tests_the_site_the_oldest_frameworks_and_the_linters():
    recipes = read_recipes((ROOT / "Makefile").read_text(encoding="utf-8"))
    called = re.findall(r"^make ([\w-]+)$", CI.read_text(encoding="utf-8"), re.MULTILINE)
    assert called == ["test", "test-slow", "test-oldest", "lint"]
    assert marks_of(recipes["test"]) == ['"not slow and not exhaustive"']
    assert marks_of(recipes["test-slow"]) == ['"slow and not exhaustive"']
    assert marks_of(recipes["test-exhaustive"]) == ["exhaustive"]
    assert recipes["site"][0] in recipes["test-slow"]


def test_a_suite_that_runs_everything_would_be_seen():
    assert marks_of(["$(BIN)/python -m pytest -n auto"]) == []


def test_one_value_in_so_many_stays_fast_and_none_is_lost():
    params = mostly_slow(range(7), every=3)
    assert [param.values for param in params] == [(number,) for number in range(7)]
    assert [param.id for param in params if not param.marks] == ["2", "5"]
    assert {mark.name for param in params for mark in param.marks} == {"slow"}
    assert [param.id for param in mostly_slow([1.5, 2.5], every=2, ids="ab")] == ["a", "b"]


def test_of_the_slow_ones_one_in_so_many_stays_slow():
    params = mostly_slow(range(9), every=4, rare=3)
    names = [param.marks[0].name if param.marks else "fast" for param in params]
    assert names == ["slow", *["exhaustive"] * 2, "fast", *["exhaustive"] * 2, "slow", "fast", "exhaustive"]


def test_what_is_shared_is_made_once_and_a_failure_is_not_tried_again():
    made = []

    def make(folder):
        made.append(folder)
        return {"number": len(made)}

    def fail(folder):
        made.append(folder)
        raise ValueError("no such number")

    assert once("of the suites", make) == once("of the suites", make) == {"number": 1}
    assert made == [folder_of("of the suites")]
    for _ in range(2):
        with pytest.raises(AssertionError, match="ValueError: no such number"):
            once("a failure of the suites", fail)
    assert len(made) == 2
