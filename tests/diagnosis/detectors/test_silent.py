"""Silent damage: each failure is named at its line, and each rule on traces made by hand has a twin that is quiet."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.slow import mostly_slow, slow

from floatline.diagnosis.detectors import silent
from floatline.diagnosis.detectors.numbers import _lost_decay, name_shares
from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import TargetError
from floatline.probe.runs.records import RunRecord
from floatline.probe.runs.runs import trace_target
from floatline.probe.trace.recorder import Recorder
from floatline.probe.trace.trace import Op, Operand, Trace, Values
from floatline.workload import Target, load_target

TARGETS = Path(__file__).parents[1] / "targets" / "silent_failures.py"
LINES = TARGETS.read_text().splitlines()

FAILURES = {
    "underflow_of_weighted_loss": "gradient-underflow",
    "counter_that_stops": "accumulator-stagnation",
    "average_that_stops": "accumulator-stagnation",
    "positions_from_arange": "integer-not-exact",
    "timestamps_as_floats": "integer-not-exact",
    "timestamps_under_autocast": "integer-not-exact",
    "identities_promoted": "integer-not-exact",
    "finite_difference": "cancellation",
    "near_equal_inputs": "cancellation",
    "offset_and_back": "cancellation",
    "capped_loss": "clamp-kills-gradient",
    "positions_before_the_forward_pass": "integer-not-exact",
    "learns_in_spite_of_a_spread_of_nothing": "cancellation",
}


@slow
@pytest.mark.parametrize("name", mostly_slow(FAILURES, every=3))
def test_a_silent_failure_is_named_at_its_line(name):
    found = diagnose(f"{TARGETS}:{name}").findings
    assert found[0].cause.id == FAILURES[name]
    assert (Path(found[0].file), "# HERE" in LINES[found[0].line - 1]) == (TARGETS, True)


@slow
def test_updates_that_are_lost_show_in_a_loss_that_falls_by_a_fraction_of_a_percent(tmp_path):
    (found,) = diagnose(f"{TARGETS}:tuned_at_a_small_rate").findings
    assert (found.cause.id, found.module) == ("update-lost-to-rounding", "optimizer.step")
    kept = tmp_path / "kept.py"
    kept.write_text(TARGETS.read_text() + "\ndef kept(steps=40): tuned_at_a_small_rate(steps, dtype=torch.float32)\n")
    assert diagnose(f"{kept}:kept").verdict == "healthy"


def stuck_in(*names):
    """An operation of an update that reads these."""
    operands = [Operand(Values("bfloat16", (4,), 4), role=name) for name in names]
    return Op(0, "aten.sub_", "update", inputs=operands)


def test_a_weight_of_several_operations_is_named_once_by_the_first():
    ops = [stuck_in("param:a", "state:a.m"), stuck_in("param:a"), stuck_in("inputs[0]"), stuck_in("param:b")]
    assert name_shares(list(zip(ops, (0.99, 0.98, 0.97, 0.5), strict=True))) == "99 % of a, 50 % of b"


def test_an_offset_that_leaves_the_digits_is_left_in_peace(tmp_path):
    target = tmp_path / "small.py"
    target.write_text(TARGETS.read_text() + "\ndef train(steps=20): offset_and_back(steps, offset=0.5)\n")
    assert diagnose(str(target)).verdict == "healthy"


@slow
def test_a_converged_loss_below_what_16_bits_tell_from_0_is_left_in_peace(tmp_path):
    source = TARGETS.read_text()
    target, squared = tmp_path / "converged.py", tmp_path / "squared.py"
    target.write_text(source + "\ndef train(steps=30): cosine_of_a_converged_student(steps)\n")
    squared.write_text(source + "\ndef train(steps=30): cosine_of_a_converged_student(steps, squared=True)\n")
    assert diagnose(str(target)).verdict == "healthy"
    # Squared, its value is in each gradient. A GPU takes the cosine in FP32, and gradients are what is too small.
    assert [one.cause.id for one in diagnose(str(squared), as_device="cpu").findings] == ["cancellation"]
    assert [one.cause.id for one in diagnose(str(squared)).findings] == ["gradient-underflow"]


def test_an_evaluation_before_the_forward_pass_is_no_part_of_the_step(tmp_path):
    target = tmp_path / "evaluates.py"
    target.write_text(
        TARGETS.read_text() + "\ndef train(steps=30): positions_before_the_forward_pass(steps, evaluates=True)\n"
    )
    loaded = load_target(str(target))
    names = [op.name for op in trace_target(loaded, step=15).ops]
    assert names.count("aten.addmm") == 1
    plain = [op.name for op in trace_target(load_target(f"{TARGETS}:positions_before_the_forward_pass"), step=15).ops]
    assert names.count("aten.sin") == 0 and plain.count("aten.sin") == 1


def test_a_step_that_only_clears_its_gradients_is_none(tmp_path):
    target = tmp_path / "clears.py"
    target.write_text(
        "import torch\n"
        "def train():\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    for _ in range(3):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
    )
    loaded = load_target(str(target))
    assert trace_target(loaded, step=2).ops
    with pytest.raises(TargetError, match="has no step 3 to record"):
        trace_target(loaded, step=3)


@slow
@pytest.mark.parametrize("name", mostly_slow(["shuffled_tokens", "shuffled_yes_and_no"], every=2))
def test_labels_that_do_not_follow_from_the_inputs_are_no_matter_of_precision(name):
    result = diagnose(f"{TARGETS}:{name}")
    assert (result.verdict, result.findings[0].cause.id) == ("not-precision", "bad-input-data")
    assert result.findings[0].module == "batches[*].targets[0]"


def values(dtype="float16", numel=100, **figures):
    return Values(dtype, (numel,), numel, **{"twin_largest": 1.0, "lost": 0, "blown": 0, "error": 0.0, **figures})


def trace(*ops, gradients=None, **meta):
    for index, op in enumerate(ops):
        op.index = index
    return Trace(list(ops), {name: Operand(value) for name, value in (gradients or {}).items()}, meta)


def op(name, *inputs, out, phase="forward", line=1, **rest):
    return Op(0, f"aten.{name}", phase, file="net.py", line=line, inputs=list(inputs), outputs=[out], **rest)


LOST = values(zeros=90, lost=90, smallest=1e-7, largest=1e-6, twin_largest=1e-6)


def test_gradients_below_the_format_are_lost():
    assert silent.lost_gradients(trace(op("mul", out=LOST, phase="backward"), gradients={"w": LOST})) == {"w": 0.9}


def test_gradients_that_cancel_to_zero_are_not_lost():
    cancels = replace(LOST, smallest=0.01, largest=0.1, twin_largest=0.1)
    assert silent.lost_gradients(trace(op("add", out=cancels, phase="backward"), gradients={"w": cancels})) == {}


def test_bf16_does_not_underflow_where_fp16_does():
    assert silent.is_underflow(LOST)
    assert not silent.is_underflow(replace(LOST, dtype="bfloat16"))


def row_of_sums(count, stuck):
    return trace(*(op("add", Operand(values()), out=values(), moved=100, stuck=stuck) for _ in range(count)))


def test_a_row_of_sums_stands_still():
    assert [share for _, share in silent.stuck_sums(row_of_sums(8, 90), ruinous=False)] == [0.9]


@pytest.mark.parametrize(("count", "stuck"), [(7, 90), (8, 40)])
def test_few_sums_and_sums_that_move_are_no_row(count, stuck):
    assert silent.stuck_sums(row_of_sums(count, stuck), ruinous=False) == []


@pytest.mark.parametrize(("error", "found"), [(0.9, 1), (0.02, 0)])
def test_a_row_of_sums_ruins_what_is_wrong_after_it(error, found):
    given = row_of_sums(8, 90)
    given.ops.append(op("sub", Operand(values(), made_by=7), out=values(error=error)))
    given.ops[-1].index = 8
    given.ops[7].stuck = 91  # the worst is named
    assert len(silent.stuck_sums(given, ruinous=True)) == found


def average(phase, role=""):
    """`d * old + new`, as it is computed outside of a model."""
    old = op("mul", Operand(values(), role=role), out=values(), phase=phase)
    total = op("add", Operand(values(), made_by=0), Operand(values()), out=values(), phase=phase, moved=100, stuck=100)
    total.inputs[1].made_by = 0
    return trace(old, total)


def test_an_average_outside_the_model_is_a_state():
    assert [found.name for found, _ in silent.stuck_states(average("outside"))] == ["aten.add"]


@pytest.mark.parametrize(("phase", "role"), [("forward", ""), ("outside", "inputs[0]"), ("outside", "param:w")])
def test_a_sum_of_activations_data_or_weights_is_no_state(phase, role):
    assert silent.stuck_states(average(phase, role)) == []


def cast(largest, grown, *, dtype="float16", source="int64"):
    whole = Operand(values(source, largest=largest))
    made = op("_to_copy", whole, out=values(dtype, largest=largest, error=1e-4))
    return trace(made, op("sin", Operand(made.outputs[0], made_by=0), out=values(dtype, error=grown), line=2))


def test_a_cast_collides_where_its_error_grows():
    assert [largest for _, largest in silent.colliding_casts(cast(5000.0, 0.9))] == [5000.0]
    assert silent.colliding_casts(cast(300.0, 0.9, dtype="bfloat16"))


def test_a_cast_that_is_exact_harmless_or_of_fractions_does_not_collide():
    assert silent.colliding_casts(cast(2048.0, 0.9)) == []
    assert silent.colliding_casts(cast(5000.0, 0.01)) == []
    assert silent.colliding_casts(cast(5000.0, 0.9, source="float32")) == []


def test_a_batch_of_whole_numbers_in_floats_collides():
    given = cast(5000.0, 0.9, source="float16")
    given.ops[0].inputs[0].role = "inputs[0]"
    assert silent.colliding_casts(given) == []
    given.meta["whole"] = ["inputs[0]"]
    assert silent.colliding_casts(given)


def test_large_numbers_of_the_batch_collide_where_autocast_casts_them():
    given = cast(5000.0, 0.9, source="float32")
    assert silent.colliding_casts(given) == []
    given.ops[0].inputs[0].role = "inputs[0]"
    assert silent.colliding_casts(given)
    for quiet in (cast(2000.0, 0.9, source="float32"), cast(5000.0, 0.01, source="float32")):
        quiet.ops[0].inputs[0].role = "inputs[0]"
        assert silent.colliding_casts(quiet) == []


@slow
def test_a_loss_that_stays_behind_fp32_without_a_known_cause_is_never_healthy(monkeypatch):
    monkeypatch.setattr("floatline.diagnosis.target_diagnosis._find", lambda evidence: [])
    behind = diagnose(f"{TARGETS}:timestamps_as_floats")
    assert behind.verdict == "precision"
    assert "and in FP32, from the same seed" in behind.unexplained
    healthy = diagnose(f"{TARGETS.with_name('silent_healthy.py')}:whole_numbers_used_smoothly")
    assert (healthy.verdict, healthy.unexplained) == ("healthy", "")
    assert healthy.notes[-1].startswith("beside FP32 from the same seed")


def difference(error, operand_error, size):
    operands = [Operand(values(largest=40.0, error=operand_error)) for _ in range(2)]
    return trace(op("sub", *operands, out=values(error=error, twin_largest=size)))


def test_a_difference_of_near_equals_cancels():
    assert [error for _, error in silent.cancelled(difference(0.5, 0.001, 0.1))] == [0.5]


@pytest.mark.parametrize("figures", [(0.1, 0.001, 0.1), (0.5, 0.2, 0.1), (0.5, 0.001, 30.0)])
def test_a_good_difference_a_damaged_operand_and_a_large_result_do_not_cancel(figures):
    assert silent.cancelled(difference(*figures)) == []


def update(stuck):
    return trace(op("add_", Operand(values(), role="param:w"), out=values(), phase="update", moved=100, stuck=stuck))


def test_updates_are_lost_where_most_elements_stand_still():
    assert [share for _, share in silent.stuck_updates(update(90))] == [0.9]
    assert silent.stuck_updates(update(30)) == []


def falling(*ends):
    """Evidence of two runs that fall in straight lines from 1, the given one and FP32's."""
    runs = [
        RunRecord("build", "build", "", losses=[1 + (end - 1) * i / 39 for i in range(40)], loss_steps=list(range(40)))
        for end in ends
    ]
    return Evidence(Target("t", None, None, Path()), 0, *runs, on_progress=lambda _: None)


@pytest.mark.parametrize(
    ("given", "fp32", "behind"),
    [(0.9, 0.1, True), (0.15, 0.1, False), (0.25, 0.1, True), (1.0, 0.995, False), (1.0, 1.1, False)],
)
def test_a_run_is_behind_where_fp32_gains_what_counts(given, fp32, behind):
    assert falling(given, fp32).falls_behind is behind


def test_a_slow_run_is_behind_by_little():
    assert falling(1.0, 0.99).falls_behind_by(0.002)
    assert not falling(1.0, 0.999).falls_behind_by(0.002)


def test_steps_that_a_search_for_a_scale_took_are_not_held_against_a_run():
    late = falling(0.1, 0.1)
    late.given.losses = [1.0] * 20 + late.fp32.losses[:20]
    assert late.falls_behind
    late.given.skipped = list(range(20))
    assert not late.falls_behind


def decayed(rate, *, dtype):
    """A recorded step of AdamW whose factor is 1 - rate, and whose updates arrive."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=rate / 0.1)
    with Recorder(model) as recorder:
        model(torch.ones(2, 8, dtype=dtype)).float().square().sum().backward()
        optimizer.step()
    return recorder.trace


def test_a_decay_that_weights_cannot_hold_is_told_from_an_update():
    trace = decayed(1e-3, dtype=torch.bfloat16)
    stuck = silent.stuck_decays(trace)
    assert {share for _, share in stuck} == {1.0}
    assert {op.inputs[0].role for op, _ in stuck} == {"param:weight", "param:bias"}
    assert silent.stuck_updates(trace) == []


def test_a_decay_that_moves_the_weights_is_left_in_peace():
    assert silent.stuck_decays(decayed(0.05, dtype=torch.bfloat16)) == []
    assert silent.stuck_decays(decayed(1e-3, dtype=torch.float32)) == []


def grown_evidence(*, own, theirs, apart=False):
    """A run of 40 steps in BF16 whose weights have a size, beside FP32's."""
    models = [torch.nn.Linear(8, 8, bias=True) for _ in range(2)]
    for model, size in zip(models, (own, theirs), strict=True):
        for weight in model.parameters():
            torch.nn.init.constant_(weight, size)
    runs = [RunRecord(kind="build", entry="build", precision="", file="", num_steps=40, model=m) for m in models]
    return Evidence(Target("", None, None, Path()), 0, *runs, on_progress=print, is_apart=apart)


def test_a_lost_decay_is_told_where_the_weights_are_larger_for_it_at_the_end():
    trace = decayed(1.9e-3, dtype=torch.bfloat16)  # 7 % in 40 steps
    (found,) = _lost_decay(grown_evidence(own=1.0, theirs=0.93), trace)
    assert found.cause.id == "decay-lost-to-rounding"
    assert "in FP32 it takes 7 % of them in 40 steps" in found.seen
    assert _lost_decay(grown_evidence(own=1.0, theirs=1.0), trace) == []
    assert _lost_decay(grown_evidence(own=1.0, theirs=0.93), decayed(1e-3, dtype=torch.bfloat16)) == []  # 4 %
