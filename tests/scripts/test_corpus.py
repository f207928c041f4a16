"""The table of planted failures fits the scripts it edits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.scripts.planted import FOLDER, HEALTHY, PLANTED, SCRIPTS, Planted, make_script

from floatline.causes import find_cause


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.script}-{planted.name}")
def test_edit_fits(planted: Planted, tmp_path: Path) -> None:
    healthy = (FOLDER / f"{planted.script}.py").read_text(encoding="utf-8")
    for old, _ in planted.edits:
        assert healthy.count(old) == 1, old
    text = make_script(planted, tmp_path).read_text(encoding="utf-8")
    assert text != healthy
    compile(text, planted.name, "exec")
    lines = {line.strip() for line in text.splitlines()}
    assert planted.line
    for line in planted.line:
        assert line in lines


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.script}-{planted.name}")
def test_cause_is_in_the_catalogue_and_gives_the_verdict(planted: Planted) -> None:
    assert planted.cause
    for name in planted.cause:
        cause = find_cause(name)
        assert cause.id == name
        assert (cause.family == "not-precision") == (planted.verdict == "not-precision")


def test_corpus_is_large_enough() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {
        "planted",
        "test_corpus",
        "test_corpus_scored",
        "test_fixes_scored",
        "__init__",
    }
    assert files == set(SCRIPTS)
    assert len(SCRIPTS) >= 12
    for script, count in Counter(planted.script for planted in PLANTED).items():
        assert count >= 3, script


def test_names_are_unique() -> None:
    assert len({(planted.script, planted.name) for planted in PLANTED}) == len(PLANTED)


def test_most_failures_are_loud() -> None:
    assert sum(not planted.loud for planted in PLANTED) * 4 <= len(PLANTED)


def test_healthy_scripts_learn_in_every_precision() -> None:
    assert set(HEALTHY) == set(SCRIPTS)
    for script, runs in HEALTHY.items():
        assert len(runs) == 3, script
        for first, last in runs:
            assert last < 0.8 * first, script
