"""Births: the cause and the place of the first inf or NaN, on whole trainings and on traces made by hand."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.slow import mostly_slow

from floatline.diagnosis.detectors.first_nonfinite import (
    find_births,
    find_unfit_constants,
    is_birth,
    keep_harmful,
    loss_is_blown,
)
from floatline.diagnosis.detectors.not_precision import first_birth_in_fp32
from floatline.diagnosis.evidence import is_diverging, runs_away
from floatline.diagnosis.target_diagnosis import diagnose
from floatline.probe.trace.trace import Op, Operand, Trace, Values

TARGETS = Path(__file__).parents[1] / "targets" / "failing_steps.py"
NEG_INF = float("-inf")


def _causes():
    spec = importlib.util.spec_from_file_location("failing_steps", TARGETS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CAUSES


CAUSES = _causes()
# The optimizer is to blame, not a line of the model.
WITHOUT_LINE = {"rows_without_gradients": "optimizer.step", "diverges_without_inf_in_fp32": "optimizer"}


def guilty_lines(name):
    text = TARGETS.read_text().splitlines()
    return [number for number, line in enumerate(text, 1) if line.endswith(f"# guilty: {name}")]


def has_half_huber():
    try:
        torch.nn.functional.smooth_l1_loss(*torch.zeros(2, 1, dtype=torch.float16, requires_grad=True)).backward()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("name", mostly_slow(CAUSES, every=2))
def test_a_failing_step_has_its_cause_and_place(name):
    if name == "targets_beyond_the_format" and not has_half_huber():
        pytest.skip("this torch has no smooth_l1_loss in FP16 on a CPU, and the diagnosis says that")
    found = diagnose(f"{TARGETS}:{name}", steps=16).primary
    assert found is not None
    assert found.cause.id == CAUSES[name]
    if name in WITHOUT_LINE:
        assert found.module == WITHOUT_LINE[name]
        return
    assert Path(found.file) == TARGETS
    assert found.line in guilty_lines(name)


@pytest.mark.parametrize("name", mostly_slow(CAUSES, every=4))
def test_its_fixed_twin_is_healthy(name):
    assert diagnose(f"{TARGETS}:{name}_fixed", steps=16).verdict == "healthy"


# Traces made by hand: each rule, and a twin that must not fire it.


def half(numel=8, *, twin=1.0, **figures):
    given = {"twin_largest": twin, "twin_nonfinite": 0, "lost": 0, "blown": 0, "error": 0.0, "largest": 1.0}
    given["smallest"] = given["largest"] / 2
    return Values("float16", (numel,), numel, **(given | figures))


def single(numel=8, **figures):
    given = {"twin_largest": 1.0, "twin_nonfinite": 0, "lost": 0, "blown": 0, "error": 0.0, "largest": 1.0}
    given["smallest"] = given["largest"] / 2
    return Values("float32", (numel,), numel, **(given | figures))


def blown(twin=1e5):
    return half(twin=twin, blown=1, pos_inf=1, error=0.0)


def trace_of(*steps):
    """A trace of (name, inputs, outputs, more); an input is Values, an index of an earlier step, or an Operand."""
    ops = []
    for index, (name, inputs, outputs, *more) in enumerate(steps):
        operands = [
            i if isinstance(i, Operand) else Operand(ops[i].outputs[0], i) if isinstance(i, int) else Operand(i)
            for i in inputs
        ]
        options = {"phase": "forward"} | (more[0] if more else {})
        ops.append(Op(index, f"aten.{name}", inputs=operands, outputs=list(outputs), **options))
    return Trace(ops)


def causes_of(*steps):
    return [birth.cause for birth in find_births(trace_of(*steps))]


@pytest.mark.parametrize(
    ("name", "more", "cause"),
    [
        ("mm", {}, "activation-overflow"),
        ("convolution", {}, "activation-overflow"),
        ("add", {}, "activation-overflow"),
        ("mul", {}, "product-overflow"),
        ("square", {}, "product-overflow"),
        ("sum", {}, "reduction-overflow"),
        ("index_add_", {}, "reduction-overflow"),
        ("exp", {}, "exp-overflow"),
        ("add", {"scalars": (-1e9,)}, "scalar-out-of-range"),
        ("masked_fill", {"scalars": (-1e9,)}, "scalar-out-of-range"),
    ],
)
def test_a_number_that_grew_too_large_is_named_by_its_operation(name, more, cause):
    assert causes_of((name, [half(), half()], [blown()], more)) == [cause]


@pytest.mark.parametrize(("smallest", "cause"), [(1.0, "scalar-out-of-range"), (0.1, "product-overflow")])
def test_a_large_factor_is_to_blame_where_it_is_put_into_a_mask(smallest, cause):
    steps = ("mul", [half(largest=1.0, smallest=smallest)], [blown()], {"scalars": (3e5,)})
    assert causes_of(steps) == [cause]


def test_damage_that_is_handed_on_is_no_birth():
    ops = trace_of(("mm", [half(), half()], [blown()]), ("relu", [0], [blown()])).ops
    assert [is_birth(op) for op in ops] == [True, False]


def test_inf_that_fp32_has_too_is_no_birth():
    assert causes_of(("log", [half(zeros=1)], [half(neg_inf=1, twin_nonfinite=1)])) == []


def test_a_product_with_ones_is_a_sum():
    ones = half(smallest=1.0)
    assert causes_of(("mm", [ones, half()], [blown()])) == ["reduction-overflow"]
    assert causes_of(("mm", [half(), half()], [blown()])) == ["activation-overflow"]


@pytest.mark.parametrize(("base", "size", "cause"), [(2.0, 17.0, "exp-overflow"), (3.0, 50.0, "product-overflow")])
def test_a_constant_to_a_power_is_told_from_a_power_of_a_tensor(base, size, cause):
    top = base**size if cause == "exp-overflow" else size**base
    assert causes_of(("pow", [half(largest=size)], [blown(top)], {"scalars": (base,)})) == [cause]


def test_a_cast_blames_what_made_its_source():
    steps = (("mm", [single(), single()], [single(largest=1e5)]), ("cat", [0], [single(largest=1e5)]))
    (birth,) = find_births(trace_of(*steps, ("_to_copy", [1], [blown()])))
    assert (birth.op.name, birth.cause) == ("aten.mm", "activation-overflow")


@pytest.mark.parametrize(
    ("name", "read", "scalar", "cause"),
    [
        ("mul", single(smallest=1.0), -3.4e38, "scalar-out-of-range"),  # (1 - mask) * finfo(float32).min
        ("full", single(), -1e9, "scalar-out-of-range"),
        ("mul", single(), 2.0, "product-overflow"),
        ("mul", single(smallest=0.1), 3e5, "product-overflow"),
    ],
)
def test_a_cast_of_a_mask_that_was_made_in_fp32_blames_its_constant(name, read, scalar, cause):
    steps = ((name, [read], [single(largest=1e9)], {"scalars": (scalar,)}), ("_to_copy", [0], [blown(1e9)]))
    (birth,) = find_births(trace_of(*steps))
    assert (birth.op.name, birth.cause) == (f"aten.{name}", cause)


def test_a_cast_of_data_blames_the_data_also_through_a_cat():
    data = Operand(single(largest=1e5), None, "inputs[0]")
    (birth,) = find_births(trace_of(("cat", [data], [single(largest=1e5)]), ("_to_copy", [0], [blown()])))
    assert (birth.op.name, birth.cause) == ("aten._to_copy", "input-out-of-range")


@pytest.mark.parametrize(("guard", "cause"), [(1e-8, "eps-underflow"), (1e-3, "rounded-onto-singularity")])
def test_a_guard_is_blamed_only_where_it_is_zero_in_the_format(guard, cause):
    zero = half(zeros=1, lost=1)
    steps = (("add", [half(zeros=1)], [zero], {"scalars": (guard,)}), ("log", [0], [half(blown=1, neg_inf=1)]))
    assert causes_of(*steps) == [cause]


def test_a_one_is_singular_for_acos_and_not_for_a_logarithm():
    one = half(largest=1.0, twin=0.9999)
    assert causes_of(("acos", [one], [half(blown=1, nan=1)])) == ["rounded-onto-singularity"]
    assert causes_of(("log", [one], [blown()])) == ["product-overflow"]


@pytest.mark.parametrize(("exponent", "cause"), [(0.5, "rounded-onto-singularity"), (2.0, "gradient-overflow")])
def test_a_lost_zero_is_singular_for_the_slope_of_a_root_and_not_of_a_square(exponent, cause):
    forward = ("pow", [half(zeros=1, lost=1)], [half()], {"scalars": (exponent,)})
    backward = ("mul", [half(), half()], [blown()], {"phase": "backward", "node": "PowBackward0", "forward": 0})
    assert causes_of(forward, backward) == [cause]


def test_a_difference_below_zero_is_blamed_for_the_root_of_it():
    root = ("sqrt", [0], [half(blown=1, nan=1)])
    (birth,) = find_births(trace_of(("sub", [half(), half()], [half(error=0.5)]), root))
    assert (birth.op.name, birth.cause) == ("aten.sub", "cancellation")
    (sound,) = find_births(trace_of(("sub", [half(), half()], [half(error=0.001)]), root))
    assert sound.cause != "cancellation"


def test_a_birth_that_no_gradient_sees_is_left_out():
    trace = trace_of(
        ("square", [half()], [blown()]),  # nobody reads it
        ("exp", [half()], [blown()]),
        ("mm", [1, half()], [half(error=0.5)], {"phase": "backward"}),
    )
    trace.gradients["weight"] = Operand(trace.ops[2].outputs[0], 2, "grad:weight")
    assert [birth.cause for birth in keep_harmful(find_births(trace), trace)] == ["exp-overflow"]


def test_births_that_harm_nothing_are_none():
    loss, backward = ("mean", [half()], [half()]), ("mm", [half(), half()], [half()], {"phase": "backward"})
    trace = trace_of(("exp", [half()], [blown()]), loss, backward)
    trace.gradients["weight"] = Operand(trace.ops[2].outputs[0], 2, "grad:weight")
    assert find_births(trace)
    assert keep_harmful(find_births(trace), trace) == []


def test_the_ones_that_backward_begins_with_do_not_hide_a_blown_loss():
    assert loss_is_blown(trace_of(("mean", [half()], [blown()]), ("ones_like", [0], [half()])))
    assert not loss_is_blown(trace_of(("mean", [half()], [half()]), ("ones_like", [0], [half()])))


@pytest.mark.parametrize(
    ("role", "value", "cause"),
    [
        ("targets[0]", half(pos_inf=2), "input-out-of-range"),
        ("", half(1, neg_inf=1), "scalar-out-of-range"),
        ("buffer:bias", half(zeros=4, neg_inf=4), "scalar-out-of-range"),
        ("buffer:table", half(zeros=1, pos_inf=4), "input-out-of-range"),
    ],
)
def test_inf_from_before_the_step_is_named_by_what_holds_it(role, value, cause):
    (found,) = find_unfit_constants(trace_of(("add", [half(), Operand(value, None, role)], [half(nan=1)])))
    assert found.cause == cause


def test_finite_and_fp32_operands_are_no_unfit_constants():
    assert not find_unfit_constants(trace_of(("add", [half(), half(1)], [half(nan=1)])))
    assert not find_unfit_constants(trace_of(("add", [half(), single(1, neg_inf=1)], [half(nan=1)])))


# In FP32: what no format fixes.


def fp32_cause(*steps):
    birth = first_birth_in_fp32(trace_of(*steps))
    return birth and birth.cause


FILL = ("masked_fill", [single()], [single(neg_inf=3)], {"scalars": (NEG_INF,)})
NAN = [single(nan=1)]


@pytest.mark.parametrize(
    "steps",
    [
        [("_softmax", [0], NAN)],
        [("amax", [0], [single(2, neg_inf=1)]), ("sub", [0, 1], NAN)],
        [("exp", [0], [single(zeros=3)]), ("sum", [1], [single(2, zeros=1)]), ("div", [1, 2], NAN)],
    ],
    ids=["fused", "minus the largest", "over the sum"],
)
def test_a_row_without_scores_is_a_masked_softmax_however_it_is_written(steps):
    assert fp32_cause(FILL, *steps) == "fully-masked-softmax"


def test_a_row_that_is_masked_in_part_is_no_empty_one():
    masked = ("_log_softmax", [0], [single(neg_inf=3)])  # as the diagonal of similarities is
    assert fp32_cause(FILL, masked) is None
    assert fp32_cause(FILL, masked, ("mean", [single(0)], [single(1, nan=1)])) == "empty-reduction"


def test_minus_inf_that_overflowed_is_no_mask():
    grown = ("mm", [single(largest=1e30), single(largest=1e30)], [single(neg_inf=3)])
    assert fp32_cause(grown, ("_softmax", [0], NAN)) is None


@pytest.mark.parametrize(("maker", "cause"), [("index_add", "empty-reduction"), ("norm", "singular-gradient")])
def test_a_count_of_zero_is_told_from_a_norm_of_zero(maker, cause):
    assert fp32_cause((maker, [single()], [single(4, zeros=1)]), ("div", [single(), 0], NAN)) == cause


def test_a_mean_of_nothing_is_an_empty_reduction():
    assert fp32_cause(("mean", [single(0)], [single(1, nan=1)])) == "empty-reduction"
    assert fp32_cause(("mean", [single(1)], [single(1, nan=1)])) is None


@pytest.mark.parametrize(("num_zeros", "cause"), [(1, "singular-gradient"), (0, None)])
def test_a_slope_is_singular_only_at_an_exact_zero(num_zeros, cause):
    forward = ("sqrt", [single(zeros=num_zeros)], [single(zeros=num_zeros)])
    assert fp32_cause(forward, ("div", [single(), 0], NAN, {"phase": "backward", "forward": 0})) == cause


@pytest.mark.parametrize(
    ("value", "cause"),
    [(single(nan=1), "bad-input-data"), (single(neg_inf=1), "bad-input-data"), (single(zeros=6, neg_inf=2), None)],
    ids=["NaN", "-inf among numbers", "a mask"],
)
def test_data_that_is_not_finite_is_bad_unless_it_is_a_mask(value, cause):
    assert fp32_cause(("mm", [Operand(value, None, "inputs[0]"), single()], NAN)) == cause


def test_a_loss_that_grows_without_end_runs_away_and_one_that_falls_does_not():
    growing = [1.5**step for step in range(40)]
    assert is_diverging([*growing, float("nan")])
    assert runs_away(growing)
    assert runs_away(growing, until=10)
    assert not runs_away(growing, until=2)  # what failed by then failed of something else
    assert not runs_away(growing[::-1])
    assert not runs_away([-(1.5**step) for step in range(40)])  # a likelihood that improves
