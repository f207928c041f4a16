"""Which plans are proposed for which findings, in which order, and why."""

from dataclasses import replace

import pytest

from floatline.causes import find_cause
from floatline.diagnosis.detectors.loss_scale import ScaleVerdict
from floatline.diagnosis.islands.island import Island, Member
from floatline.findings import Finding
from floatline.plans import Scaling
from floatline.plans.presets import resolve_plan
from floatline.rescuing.candidates import FindingPlace, propose

MIXED, HALF, BF16 = (resolve_plan(name) for name in ("fp16-mixed", "fp16-true", "bf16-true"))


def place(cause, **words):
    return FindingPlace(Finding(find_cause(cause), "seen so", "do this"), **words)


def island(*modules):
    members = tuple(Member(module, f"{module} overflows", "") for module in modules)
    return Island(members, None, "", True, True, None, None, None, 1, 1, 0.1)


def test_a_rewrite_comes_before_an_island_and_an_island_before_the_loss():
    found = place(
        "scalar-out-of-range", module="pool", line="net.py:7", function="net.py:F.go", rewrite="mask-constant"
    )
    plans = [candidate.plan for candidate in propose(MIXED, [found], island=island("pool"))]
    assert plans[0].rewrites[0].kind == "mask-constant" and plans[0].rewrites[0].module == "pool"
    kinds = ["rewrite" if p.rewrites else "island" if p.fp32_modules else p.fp32_functions[0].function for p in plans]
    assert kinds.index("rewrite") < kinds.index("island") < kinds.index("net.py:7") < kinds.index("loss")


def test_the_island_is_kept_with_its_reasons():
    plan = propose(MIXED, [place("activation-overflow")], island=island("a", "b"))[0].plan
    assert [(kept.pattern, kept.reason) for kept in plan.fp32_modules] == [("a", "a overflows"), ("b", "b overflows")]
    assert (plan.weights, plan.compute, plan.scaling) == (MIXED.weights, MIXED.compute, MIXED.scaling)


def test_without_an_island_no_module_is_kept_but_the_finding_s():
    plans = [c.plan for c in propose(MIXED, [place("activation-overflow", module="head")])]
    assert {kept.pattern for plan in plans for kept in plan.fp32_modules} == {"head"}


@pytest.mark.parametrize("base", [HALF, BF16])
@pytest.mark.parametrize("cause", ["update-lost-to-rounding", "optimizer-state-underflow"])
def test_an_optimizer_s_rounding_gets_exact_updates_and_then_fp32_weights(base, cause):
    exact, wide = (candidate.plan for candidate in propose(base, [place(cause)], island=island("a")))
    assert (exact.weights, exact.update) == (base.weights, "exact") and exact.reasons["update"] == "seen so"
    assert (wide.weights, wide.update, wide.compute) == ("fp32", None, base.compute)
    assert (wide.scaling is not None) == (base.compute == "fp16")


def test_with_fp32_weights_no_update_is_to_blame_and_nothing_is_proposed():
    assert propose(MIXED, [place("update-lost-to-rounding")]) == ()


def test_the_recommended_scale_is_where_scaling_begins():
    scale = ScaleVerdict("underflow", 1.0, 4096.0, "at 4096 none is lost")
    plan = propose(MIXED, [place("gradient-underflow")], scale=scale)[0].plan
    assert plan.scaling == Scaling(init_scale=4096.0) and plan.reasons["scaling"] == "at 4096 none is lost"


def test_a_plan_for_the_scale_leaves_nothing_open_that_a_script_s_scaler_could_decide():
    every = set(Scaling.model_fields)
    for cause in ("gradient-underflow", "scaler-misuse"):
        assert propose(MIXED, [place(cause)])[0].plan.scaling.model_fields_set == every
    assert propose(MIXED, [place("activation-overflow", module="head")])[0].plan.scaling.model_fields_set == set()


def test_where_no_scale_can_work_none_is_proposed():
    scale = ScaleVerdict("no-scale", 1.0, None, "no loss scale can work")
    plans = [c.plan for c in propose(MIXED, [place("gradient-underflow", module="head")], scale=scale)]
    assert plans and all(plan.scaling == MIXED.scaling for plan in plans)


def test_several_findings_are_also_fixed_together():
    places = [place("product-overflow", line="net.py:3"), place("exp-overflow", line="net.py:9")]
    named = [{f.function for f in c.plan.fp32_functions} for c in propose(MIXED, places)]
    assert {"net.py:3"} in named and {"net.py:3", "net.py:9"} in named


def test_sixteen_bit_weights_can_become_fp32_ones():
    assert any(c.plan.weights == "fp32" for c in propose(HALF, [place("integer-not-exact")]))
    assert all(c.plan.weights == "fp32" for c in propose(MIXED, [place("integer-not-exact")]))


def test_no_plan_is_proposed_twice():
    candidates = propose(HALF, [place("product-overflow", module="a", line="net.py:3")], island=island("a"))
    bare = [repr(c.plan.model_dump(exclude={"reasons", "name"})).replace("seen so", "") for c in candidates]
    assert len(bare) == len(set(bare))


@pytest.mark.parametrize(("base", "cause"), [(MIXED, "bad-input-data"), (resolve_plan("fp32"), "product-overflow")])
def test_what_is_not_precision_and_what_is_fp32_get_no_plan(base, cause):
    assert propose(base, [place(cause)]) == ()
    assert propose(MIXED, [place("product-overflow")]) != ()


def test_no_finding_no_plan():
    assert propose(MIXED, []) == ()


def test_a_plan_for_a_line_holds_its_code(tmp_path):
    file = tmp_path / "net.py"
    file.write_text("x = 1\ny = x * x\n", encoding="utf-8")
    found = place("product-overflow", line="net.py:2")
    found = replace(found, finding=replace(found.finding, file=str(file), line=2))
    kept = [entry for c in propose(MIXED, [found]) for entry in c.plan.fp32_functions]
    assert {entry.code for entry in kept if entry.function == "net.py:2"} == {"y = x * x"}
    assert {entry.code for entry in kept if entry.function == "loss"} == {""}
