"""The verdict in the terminal: first, short, plain where it is piped."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from tests.report.validation.validations import EVIL, make_validation

from floatline.report.validation.drawings import draw_line
from floatline.report.validation.terminal import print_validation


def printed(validation, *, width=100, terminal=False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, highlight=False)
    print_validation(validation, console, report=Path("runs/report.html"))
    return file.getvalue()


def test_the_verdict_is_the_first_word_and_the_report_the_last():
    lines = printed(make_validation()).splitlines()
    assert lines[0] == "PASS  fp16-mixed against fp32 on validation loss"
    assert lines[-1].split() == ["report", "runs/report.html"]


@pytest.mark.parametrize(("width", "most"), [(60, 24), (100, 20)])
def test_few_lines_even_with_everything_in_it_and_no_sentence_is_cut(width, most):
    candidates = {"fp16-mixed": 0.0, "bf16-mixed": 0.001, "fp16-true": 0.03, "d": 0.04, "e": 0.05, "f": math.inf}
    text = printed(make_validation(candidates), width=width)
    assert len(text.splitlines()) <= most and "…" not in text


@pytest.mark.parametrize("width", range(50, 110, 3))
def test_a_number_and_its_sign_stand_on_one_line(width):
    lines = [line.split() for line in printed(make_validation(), width=width).splitlines()]
    assert not any(words and words[0].startswith("%") for words in lines)
    assert any(words.count("%") for words in lines)


def test_there_is_colour_on_a_terminal_and_none_in_a_pipe(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in printed(make_validation(), terminal=True)
    assert "\x1b[" not in printed(make_validation())


def test_a_gate_that_did_not_pass_says_what_to_do():
    text = printed(make_validation(num_seeds=2))
    assert text.startswith("REFUSED")
    assert "Run both arms on at least 3 seeds." in text


def test_speed_and_memory_are_there_or_named_as_missing():
    assert "1.82× as fast" in printed(make_validation())
    assert printed(make_validation(bare=True)).count("not measured") == 2


def test_a_name_cannot_move_the_cursor_or_be_markup():
    text = printed(make_validation({"[red]a\x1b[2J": 0.0, EVIL[0]: 0.03}))
    assert "\x1b" not in text
    assert "[red]a" in text


def line(low, high, mean=None):
    mean = (low + high) / 2 if mean is None else mean
    return draw_line(mean, low, high, margins=(0.01, 0.02), labels=("+1.00 %", "+2.00 %"))


def test_an_interval_within_the_margin_ends_before_its_mark():
    drawn = line(-0.002, 0.004)
    assert drawn.index("├") < drawn.index("●") < drawn.index("┤") < drawn.index("┊") < drawn.index("┋")


def test_an_interval_above_the_margin_begins_behind_its_mark():
    drawn = line(0.025, 0.03)
    assert drawn.index("┋") < drawn.index("├")


def test_an_end_without_room_is_an_arrow():
    assert "▸" in line(0.0, 0.5, mean=0.25)
    assert "◂" in line(-0.5, 0.0, mean=-0.25)
    assert not set("◂▸") & set(line(-0.01, 0.03))


@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.01, 0.01), (-9.0, 9.0), (0.3, 0.4), (-0.4, -0.3)])
def test_the_line_always_has_its_width(ends):
    assert len(line(*ends).split("  ")[0]) == 44
