"""Outputs with NaN that is meant, several outputs with several causes, and code that refuses 16 bits itself."""

import math
from pathlib import Path

import torch
from tests.slow import slow

from floatline.diagnosis.forward.forward_diagnosis import diagnose_captured
from floatline.probe.steps.captured_forward import capture_forward

FILE = str(Path(__file__))


def diagnose(function, *inputs):
    return diagnose_captured(capture_forward(function, inputs), "it", searches=False)


def line_of(words):
    return next(n for n, line in enumerate(Path(FILE).read_text().splitlines(), 1) if words in line)


def rows():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def mark_invalid(x):
    return torch.where(x[..., :1] > 0, x.exp(), torch.full_like(x, math.nan))


def mark_and_square(x):
    y = 300 * x
    return torch.where(x[..., :1] > 0, y * y, torch.full_like(x, math.nan))


def take_a_root(x):
    return (x - 5).sqrt()


@slow
def test_nan_that_fp32_writes_from_a_constant_is_a_mark():
    found = diagnose(mark_invalid, rows())
    assert found.verdict == "healthy"
    assert 0 < found.outputs[0].worst.distance < 0.01  # of what is valid


@slow
def test_what_goes_wrong_beside_marks_is_found():
    found = diagnose(mark_and_square, rows())
    assert found.primary.cause.id == "product-overflow"
    assert found.primary.line == line_of("    return torch.where(x[..., :1] > 0, y * y")


@slow
def test_nan_that_fp32_computes_is_no_mark():
    assert diagnose(take_a_root, rows()).verdict == "not-precision"


def swallow_overflow(x):
    radius = (x * x).sum(-1, keepdim=True)
    return x / radius.sqrt()


def two_results(x, y):
    far = (y + 1000.0) - 1000.0
    return swallow_overflow(x), far


@slow
def test_two_outputs_that_are_off_for_two_causes_have_two_findings():
    found = diagnose(two_results, 300 * rows(), 0.1 * rows())
    assert {finding.line for finding in found.findings} == {
        line_of("    radius = (x * x).sum"),
        line_of("    far = (y + 1000.0)"),
    }
    assert "With line" in found.tried[0]


@slow
def test_two_outputs_that_are_off_for_one_cause_have_one_finding():
    found = diagnose(lambda x: (swallow_overflow(x), 2 * swallow_overflow(x)), 300 * rows())
    assert [finding.line for finding in found.findings] == [line_of("    radius = (x * x).sum")]


def check(condition, message):
    if not condition:
        raise ValueError(message)


def solve(x):
    check(x.dtype in (torch.float32, torch.float64), f"points must be float32 or float64, got {x.dtype}")
    return x * 2


def reject(x):
    check(x.abs().max() < 1.5 or x.dtype == torch.float32, "points must be normalized")
    return x * 2


@slow
def test_code_that_refuses_16_bits_is_named_where_it_words_the_refusal():
    found = diagnose(solve, rows())
    assert found.primary.cause.id == "unsupported-half-op"
    assert found.primary.line == line_of("    check(x.dtype in")
    assert "refuses 16 bits" in found.primary.fix


@slow
def test_an_exception_that_names_no_16_bit_format_is_not_taken_for_a_refusal():
    found = diagnose(reject, rows())
    assert found.primary is None
    assert "points must be normalized" in found.unexplained
