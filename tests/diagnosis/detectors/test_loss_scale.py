"""Loss-scale verdicts: each kind on runs and traces made by hand, with a twin that is judged otherwise."""

from pathlib import Path

import pytest
from tests.slow import slow

from floatline.causes import find_cause
from floatline.diagnosis.detectors.loss_scale import (
    ScaleOutcome,
    best_factor,
    judge_scale,
    largest_gradient,
    span_of,
    written_scale,
)
from floatline.diagnosis.detectors.resuming import find_lost_scale
from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.target_diagnosis import diagnose
from floatline.findings import Finding
from floatline.probe.runs.records import RunRecord
from floatline.probe.trace.trace import Op, Operand, Trace, Values
from floatline.probe.watch.events import ScalerStepEvent, ScaleUpdateEvent
from floatline.workload import Target

FAILURES = Path(__file__).parents[1] / "targets" / "adversarial_failures.py"
HEALTHY = FAILURES.with_name("adversarial_healthy.py")


def half(largest, dtype="float16", numel=8):
    return Values(dtype, (numel,), numel, largest=largest, twin_largest=largest, lost=0, blown=0, error=0.0)


def trace(*tops, exponents=None, lost=0.0, step=39):
    ops = [Op(i, "aten.mm", "backward", outputs=[half(top)]) for i, top in enumerate(tops)]
    return Trace(ops, meta={"step": step, "gradients": {"exponents": exponents or {}, "lost": lost, "error": 0.1}})


def run(*applied, scale=65536.0):
    """A run of a scaler that halves at each skipped step."""
    record = RunRecord("build", "build", "fp16-mixed")
    for step, fine in enumerate(applied):
        event = ScalerStepEvent(0, 0, scale, num_gradients=1, halves=[], applied=fine)
        event.step = step
        record.events.append(event)
        scale = scale if fine else scale / 2
    record.skipped = [event.step for event in record.events if not event.applied]
    return Evidence(Target("x.py", None, None, Path()), 0, record, RunRecord("build", "build", "fp32"), print)


def finding(cause, **rest):
    return [Finding(find_cause(cause), "seen", "fix", **rest)]


def never(factor):
    raise AssertionError("nothing is to be replayed")


def test_skips_that_end_are_a_search():
    found = judge_scale(run(False, False, *[True] * 38), [], None, never)
    assert (found.kind, found.present) == ("search", 16384.0)
    assert "2 steps were skipped while the loss scale went from 2^16 to 2^14" in found.text


def test_a_run_without_skips_has_no_verdict():
    assert judge_scale(run(*[True] * 40), [], None, never) is None


def test_skips_without_end_are_no_search():
    found = judge_scale(run(*[False] * 40), [], None, never)
    assert (found.kind, found.recommended) == ("collapse", None)


def test_a_forward_overflow_is_beyond_any_scale():
    found = judge_scale(run(*[False] * 40), finding("activation-overflow", module="blocks.1"), None, never)
    assert found.kind == "forward-overflow"
    assert "blocks.1" in found.text
    assert "2^16 to 2^-23" in found.text


def test_a_collapse_names_what_drives_it():
    found = judge_scale(run(*[False] * 40), finding("bad-input-data"), None, never)
    assert found.kind == "collapse"
    assert "bad-input-data drives it" in found.text


@pytest.mark.parametrize(
    ("top", "factor"), [(1.0, 2.0**13), (1e-6, 2.0**33), (65504.0, 0.25), (16376.0, 1.0), (16377.0, 0.5)]
)
def test_the_best_scale_leaves_two_bits_below_the_end_of_half(top, factor):
    assert best_factor(trace(top)) == factor
    assert 65504 / 8 < top * factor <= 65504 / 4


def test_gradients_between_the_layers_count_and_those_in_fp32_do_not():
    found = trace(1.0, 8.0)
    found.ops.append(Op(2, "aten.mul", "backward", outputs=[half(1e9, "float32")]))
    assert largest_gradient(found) == 8.0


def test_a_starved_gradient_gets_a_scale_that_saves_it():
    asked = []

    def measure(factor):
        asked.append(factor)
        return ScaleOutcome(0.001, finite=True)

    found = judge_scale(run(), finding("gradient-underflow"), trace(1e-6, lost=0.63), measure)
    assert (found.kind, found.present, found.recommended, asked) == ("underflow", 1.0, 2.0**33, [2.0**33])
    assert found.text == "at scale 2^33, 0.1 % of the gradient elements are lost, was 63 % at 2^0"


def test_a_scale_that_failed_in_another_step_is_not_recommended():
    evidence = run(False, False, *[True] * 38)
    found = judge_scale(
        evidence, finding("gradient-underflow"), trace(1e-3, lost=0.63), lambda _: ScaleOutcome(0.6, True)
    )
    assert (found.kind, found.recommended) == ("no-scale", None)


def test_no_scale_works_where_the_large_and_the_small_are_too_far_apart():
    spread = trace(6e4, exponents={"-40": 500, "15": 500}, lost=0.5)
    found = judge_scale(run(), finding("gradient-underflow"), spread, lambda _: ScaleOutcome(0.5, finite=True))
    assert found.kind == "no-scale"
    assert "2^-40 to 2^15" in found.text
    assert "56 bits" in found.text
    assert "40 bits" in found.text


def test_a_scale_that_is_too_large_is_told_from_no_scale():
    def judge(outcome):
        return judge_scale(run(), finding("gradient-overflow"), trace(1e6), lambda _: outcome)

    assert (judge(ScaleOutcome(0.0, True)).kind, judge(ScaleOutcome(0.0, True)).recommended) == ("overflow", 2.0**-6)
    assert judge(ScaleOutcome(0.0, False)).kind == "no-scale"
    assert judge(ScaleOutcome(0.4, True)).kind == "no-scale"


def test_the_span_leaves_out_a_thousandth_of_the_smallest():
    assert span_of(trace(1.0, exponents={"-60": 1, "-20": 9999})) == (-20, 0)
    assert span_of(trace(1.0, exponents={"-60": 20, "-20": 9979})) == (-60, 0)
    assert span_of(trace()) is None


def scaled(name, *, scalars=(), numel=1):
    loss = Operand(half(1.0, "float32", numel), 0)
    ops = [
        Op(0, "aten.mean", "forward", outputs=[half(1.0, "float32", numel)]),
        Op(1, name, "forward", inputs=[loss], scalars=scalars, outputs=[half(1.0, "float32", numel)]),
        Op(2, "aten.ones_like", "forward", outputs=[half(1.0, "float32", numel)]),
    ]
    return Trace(ops)


def test_a_scale_written_by_hand_is_read_from_the_last_product():
    assert written_scale(scaled("aten.mul", scalars=(1024.0,))) == 1024.0
    assert written_scale(scaled("aten.add", scalars=(1024.0,))) == 1.0
    assert written_scale(scaled("aten.mul", scalars=(0.1,))) == 1.0
    assert written_scale(scaled("aten.mul", scalars=(1024.0,), numel=4)) == 1.0


# Whole runs.


@slow
def test_a_search_is_a_note_and_no_finding():
    result = diagnose(f"{HEALTHY}:scale_from_far_above", steps=20)
    assert (result.verdict, result.scale.kind) == ("healthy", "search")
    assert "a search for the scale, and no fault" in result.notes[0]


def test_a_missing_scale_is_recommended_and_was_tried():
    result = diagnose(f"{FAILURES}:rare_event_weight", steps=12)
    assert result.scale.kind == "underflow"
    assert result.scale.recommended > 2.0**20
    assert "GradScaler(init_scale=2.0**" in result.primary.fix
    assert any("of the gradient elements are lost, was" in text for text in result.tried)
    assert result.as_json()["scale"] == result.scale.as_json()


@slow
def test_a_scale_beyond_what_a_half_loss_holds_is_named():
    result = diagnose(f"{FAILURES}:scale_beyond_half", steps=12)
    assert (result.primary.cause.id, result.scale.kind) == ("gradient-overflow", "overflow")
    assert result.scale.present == 2.0**17
    assert result.scale.recommended < 65504


@slow
def test_losses_far_apart_have_no_scale():
    result = diagnose(f"{FAILURES}:losses_far_apart")
    assert (result.primary.cause.id, result.scale.kind) == ("gradient-underflow", "no-scale")
    assert diagnose(f"{FAILURES}:losses_far_apart_fixed").verdict == "healthy"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_scale_that_fell_to_zero_under_two_optimizers_did_not_start_again(restarts):
    record, scale = RunRecord("build", "build", "fp16-mixed"), 2.0**-148
    for step in range(12):
        if restarts and step == 8:
            scale = 65536.0
        for optimizer in (0, 1):
            record.events.append(ScalerStepEvent(optimizer, 0, scale, num_gradients=1, halves=[], applied=False))
        scale = scale / 2 if scale > 2.0**-149 else 0.0
        record.events.append(ScaleUpdateEvent(0, scale))
    found = find_lost_scale(record)
    assert len(found) == restarts
    if restarts:
        assert found[0].seen.startswith("the loss scale went back from 0 to 65536, 1 times")
