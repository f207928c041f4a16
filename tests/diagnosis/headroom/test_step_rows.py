"""The rows of a step's chart: what is beyond a limit is said to be, and nothing else."""

import math

import pytest

from floatline.causes import CAUSES
from floatline.diagnosis.headroom.step_rows import chart_rows, narrow_format, rows_of_diagnosis, rows_that_matter
from floatline.findings import Finding
from floatline.formats import FP16
from floatline.probe.trace.trace import Op, Operand, Trace, Values


def values(smallest: float = 0.01, largest: float = 2.0, *, dtype: str = "float16", **changes) -> Values:
    fields = {"zeros": 0, "twin_largest": largest, "twin_nonfinite": 0, "lost": 0, "blown": 0, "error": 0.0}
    return Values(dtype, (10, 10), 100, smallest=smallest, largest=largest, **{**fields, **changes})


def op(index: int, module: str, *outputs: Values, phase: str = "forward", **changes) -> Op:
    return Op(index=index, name="aten.mm", phase=phase, module=module, outputs=list(outputs), **changes)


OVERFLOW = {"largest": 3e4, "pos_inf": 5, "blown": 5, "twin_largest": 1e5}
SUNK = {"smallest": math.inf, "largest": 0.0, "zeros": 100, "lost": 100, "twin_largest": 1e-9}


def step(*, forward: dict | None = None, backward: dict | None = None) -> Trace:
    """Three modules; something may be planted into the second."""
    ops = [op(0, "a", values()), op(1, "b.c", values(**(forward or {}))), op(2, "", values())]
    ops += [op(3, "b.c", values(**{"smallest": 1e-5, "largest": 0.5, **(backward or {})}), phase="backward")]
    return Trace(ops)


def found(module: str = "b.c", **changes) -> Finding:
    return Finding(CAUSES["activation-overflow"], "seen", "fix", module=module, **changes)


def states(rows) -> dict:
    return {row.module: tuple(span.state for span in row.spans) for row in rows}


def test_a_healthy_step_has_a_row_for_each_module_in_order_and_no_mark():
    rows = chart_rows(step(), "fp16")
    assert [row.module for row in rows] == ["a", "b.c", ""]
    assert all(row.fits for row in rows)
    assert not any(row.blamed for row in rows)
    assert (rows[1].backward.smallest, rows[1].backward.largest) == (1e-5, 0.5)
    assert rows[0].backward is None


@pytest.mark.parametrize(
    ("planted", "state"),
    [
        ({"forward": OVERFLOW}, ("overflows", "fits")),
        ({"forward": {"nan": 5, "blown": 5}}, ("nonfinite", "fits")),
        ({"backward": SUNK}, ("fits", "sinks")),
        ({"backward": {**SUNK, "twin_largest": 0.5}}, ("fits", "sinks")),
        ({"forward": {"smallest": 6e-8, "zeros": 60, "lost": 60}}, ("sinks", "fits")),
        ({"backward": {"pos_inf": 1, "blown": None, "twin_largest": None}}, ("fits", "nonfinite")),
    ],
    ids=["overflow", "NaN", "sunk gradients", "no gradient arrives", "half below the floor", "inf without a twin"],
)
def test_what_is_planted_is_marked_where_it_is(planted, state):
    assert states(chart_rows(step(**planted), "fp16")) == {"a": ("fits",), "b.c": state, "": ("fits",)}


@pytest.mark.parametrize(
    "harmless",
    [
        {"neg_inf": 50, "twin_nonfinite": 50},
        {"neg_inf": 50, "blown": None, "lost": None, "twin_largest": None},
        {"zeros": 60, "lost": 0},
        {"zeros": 30, "lost": 30},
        {"zeros": 80, "lost": 80},
        {**SUNK, "twin_largest": 0.5},
        {"largest": 65504.0},
        {"smallest": 6e-8},
    ],
    ids=[
        "a mask",
        "a mask without a twin",
        "zeros of FP32",
        "a tail of small values",
        "zeros by rounding",
        "only zeros by rounding",
        "the largest number",
        "the smallest number",
    ],
)
def test_what_healthy_steps_hold_is_not_marked(harmless):
    assert all(row.fits for row in chart_rows(step(forward=harmless), "fp16"))


def test_tensors_of_other_formats_have_no_limit_to_hurt_themselves_on():
    trace = Trace([op(0, "loss", values(1e-30, 1e30, dtype="float32")), op(1, "a", values())])
    assert [row.module for row in chart_rows(trace, "fp16")] == ["a"]
    assert chart_rows(trace, "bf16") == []
    assert chart_rows(Trace(), "fp16") == []


def test_the_copy_of_a_weight_counts_only_where_it_is_not_finite():
    def cast(**changes) -> Op:
        weight = Operand(values(dtype="float32"), role="param:a.weight")
        return Op(0, "aten._to_copy", "forward", "a", inputs=[weight], outputs=[values(**changes)])

    assert chart_rows(Trace([cast(**SUNK)]), "fp16") == []
    assert states(chart_rows(Trace([cast(**OVERFLOW)]), "fp16")) == {"a": ("overflows",)}


def test_what_the_optimizer_writes_is_not_the_step_s():
    assert chart_rows(Trace([op(0, "a", values(), phase="update")]), "fp16") == []


def test_a_recomputed_forward_stays_a_forward():
    rows = chart_rows(Trace([op(0, "a", values(), phase="backward", recomputed=True)]), "fp16")
    assert rows[0].forward is not None
    assert rows[0].backward is None


@pytest.mark.parametrize(
    ("finding", "blamed"),
    [
        (found("b.c"), ["b.c"]),
        (found("b.c.weight"), ["b.c"]),
        (found("gone"), []),
        (found("", op="aten.exp"), [""]),
        (found(""), []),
        (None, []),
    ],
    ids=["a module", "its parameter", "unknown", "the root", "nowhere", "no finding"],
)
def test_the_row_of_the_finding_is_marked(finding, blamed):
    assert [row.module for row in chart_rows(step(), FP16, finding=finding) if row.blamed] == blamed


def test_the_format_is_the_16_bit_one_that_the_step_writes():
    assert narrow_format(step()).name == "fp16"
    assert narrow_format(Trace([op(0, "a", values(dtype="bfloat16"))])).name == "bf16"
    assert narrow_format(Trace([op(0, "a", values(dtype="float32"))])) is None


def test_a_diagnosis_shows_the_trace_that_shows_its_finding():
    healthy, broken = step(), step(forward=OVERFLOW)
    assert states(rows_of_diagnosis([healthy, broken], found()))["b.c"][0] == "overflows"
    assert states(rows_of_diagnosis([healthy], found()))["b.c"][0] == "fits"
    assert rows_of_diagnosis([broken], None) == ()
    assert rows_of_diagnosis([], found()) == ()


def long_step(num_beyond: int) -> Trace:
    quiet = [op(i, f"m{i}", values(largest=2.0 ** (i % 14))) for i in range(30)]
    return Trace(quiet + [op(30 + i, f"x{i}", values(**OVERFLOW)) for i in range(num_beyond)])


def test_rows_beyond_a_limit_come_before_those_within_and_all_keep_their_order():
    rows = chart_rows(long_step(3), "fp16", finding=found("m1"))
    kept = [row.module for row in rows_that_matter(rows)]
    assert kept == ["m1", "m12", "m13", "m26", "m27", "x0", "x1", "x2"]  # of the quiet ones those nearest to a limit


@pytest.mark.parametrize("num_beyond", [20, 25, 60])
def test_no_more_than_twenty_rows_are_kept_and_the_blamed_one_is_among_them(num_beyond):
    rows = chart_rows(long_step(num_beyond), "fp16", finding=found(f"x{num_beyond - 1}"))
    kept = [row.module for row in rows_that_matter(rows)]
    assert len(kept) == 20
    assert kept == [f"x{i}" for i in (*range(19), num_beyond - 1)]
