"""Speed, memory and layers: what is measured is what it says, and the reasons come from the numbers."""

import pytest
import torch
from tests.validation import tiny_lm

from floatline.plans.presets import resolve_plan
from floatline.validation.costs import measure, measure_child
from floatline.validation.costs.measure import Bench, record_layers
from floatline.validation.study.arms import plans_of, reference_plan
from floatline.validation.study.limits import Limits
from floatline.validation.study.preparation import Subject

FP32, FP16, BF16_TRUE = (resolve_plan(name).model_dump(mode="json") for name in ("fp32", "fp16-mixed", "bf16-true"))


class Shelf(dict):
    def read(self, name):
        return self.get(name)

    def write(self, name, data):
        self[name] = data


def settings(plan, **more):
    asked = {"target": "tests/validation/tiny_lm.py:half", "seed": 0, "num_batches": None, "steps": 3}
    return {**asked, "plan": plan, "reference": FP32, "budget": 0.0, **more}


def test_times_come_in_pairs_and_the_first_step_is_apart():
    times = measure_child.time_steps(lambda: tiny_lm.half(0), settings(FP16))
    assert len(times["reference"]) == len(times["candidate"]) == measure_child.LEAST_PAIRS
    assert all(time > 0 for time in (*times["reference"], *times["candidate"], times["first_seconds"]))


def test_memory_by_part_is_counted_from_the_tensors():
    numel = sum(p.numel() for p in tiny_lm.half(0).model.parameters())
    mixed = measure_child.measure_memory(settings(FP16))
    true = measure_child.measure_memory(settings(BF16_TRUE))
    assert mixed["parts"]["weights"] == mixed["parts"]["gradients"] == 4 * numel
    assert true["parts"]["weights"] == true["parts"]["gradients"] == true["parts"]["master"] == 2 * numel
    assert "master" not in mixed["parts"]
    assert true["parts"]["states"] >= 8 * numel
    if torch.cuda.is_available():
        assert mixed["device"] == "cuda" and mixed["peak"] > sum(mixed["parts"].values())
    elif measure_child.read_status("VmHWM") is not None:
        assert mixed["device"] == "cpu" and mixed["peak"] >= mixed["parts"]["process"] > 1 << 20


def test_a_system_that_does_not_tell_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(measure_child, "_STATUS", tmp_path / "none")
    assert measure_child.read_status("VmHWM") is None
    costs = bench(monkeypatch, {"memory": {"peak": None, "parts": {}, "device": "cpu"}}).measure({"fp16-mixed": FP16})
    assert not costs.memory and "does not tell a process its peak" in costs.reasons["fp16-mixed"][-1]


def test_layers_agree_with_fp32_and_have_headroom():
    found = record_layers(lambda: tiny_lm.half(0), settings(FP16))
    layers = {layer["module"]: layer for layer in found["layers"]}
    assert set(layers) >= {"embed", "up", "down"}
    assert layers["up"]["cosine"] == pytest.approx(1, abs=1e-3) and layers["up"]["norm_ratio"] == pytest.approx(
        1, abs=1e-2
    )
    assert layers["up"]["headroom"] > 0 and layers["embed"]["headroom"] is None  # autocast leaves the look-up in FP32
    assert 0 < found["casts"] < found["operations"]


def test_a_module_near_the_limit_has_little_headroom():
    def hot():
        workload = tiny_lm.half(0)
        with torch.no_grad():
            workload.model.up.weight.mul_(3e4)
            workload.model.down.weight.mul_(1e-4)
        return workload

    layers = {layer["module"]: layer for layer in record_layers(hot, settings(FP16, steps=0))["layers"]}
    assert layers["up"]["headroom"] < 1


TIMES = {"reference": [1.0] * 8, "candidate": [2.0] * 8, "first_seconds": 3.0}
HINTS = {
    "parts": {"fp16-mixed": {"activations": 5}, "fp32": {"activations": 9}},
    "speed": ["slow"],
    "memory": ["large"],
}
LAYERS = {"layers": [], "casts": 30, "operations": 100}
MEMORY = {"peak": 100, "parts": {"process": 60}, "device": "cpu"}


def bench(monkeypatch, answers):
    """A bench whose children answer this."""
    known = {"timing": TIMES, "memory": MEMORY, "costs": HINTS, "layers": LAYERS} | answers
    kinds = {"time_target": "timing", "measure_memory": "memory", "explain_costs": "costs", "record_target": "layers"}

    def call(name, asked, *, timeout):
        answer = known[kinds[name.partition(":")[2]]]
        if isinstance(answer, Exception):
            raise answer
        return answer(asked["plan"]["name"]) if callable(answer) else answer

    monkeypatch.setattr(measure, "call_in_child", call)
    plans = plans_of(["fp16-mixed"])
    subject = Subject("t.py", plans, reference_plan(plans), Limits(), 0)
    return Bench(subject, 10, shelf=Shelf(), tell=lambda what: None)


def test_slower_and_not_smaller_have_their_reasons(monkeypatch):
    costs = bench(monkeypatch, {}).measure({"fp16-mixed": FP16})
    assert costs.reasons["fp16-mixed"][0] == "slow" and "30 of the 100 operations" in costs.reasons["fp16-mixed"][1]
    assert costs.reasons["fp16-mixed"][2:] == ("large", "60 B of the 100 B are Python and torch, whatever is trained.")
    assert [memory.parts["activations"] for memory in costs.memory] == [9, 5]
    assert costs.speed[0].timing.verdict == "slower" and costs.speed[0].first_seconds == 3.0


@pytest.mark.parametrize(("issuing", "told"), [(0.98, True), (0.5, False), (None, False)])
def test_a_gpu_that_waits_for_the_host_is_a_reason(monkeypatch, issuing, told):
    costs = bench(monkeypatch, {"timing": TIMES | {"issuing": issuing}}).measure({"fp16-mixed": FP16})
    assert any("busy for 98 % of a step" in reason for reason in costs.reasons["fp16-mixed"]) == told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_tiny_model_keeps_a_gpu_waiting_for_the_host():
    assert measure_child.time_steps(lambda: tiny_lm.half(0), settings(FP16))["issuing"] > 0.9


def test_what_is_faster_and_smaller_needs_no_reason(monkeypatch):
    def peak(name):
        return MEMORY | {"peak": 200 if name == "fp32" else 100, "parts": {}}

    answers = {"timing": TIMES | {"candidate": [0.5] * 8}, "memory": peak}
    assert bench(monkeypatch, answers).measure({"fp16-mixed": FP16}).reasons == {"fp16-mixed": ()}


def test_what_fails_is_said_and_the_rest_is_measured(monkeypatch):
    from floatline.errors import ComparisonError

    costs = bench(monkeypatch, {"layers": ComparisonError("no step")}).measure({"fp16-mixed": FP16})
    assert costs.layers == {} and costs.speed
    assert "layers of fp16-mixed could not be measured: no step" in costs.reasons["fp16-mixed"]


def test_measurements_are_taken_once(monkeypatch):
    one = bench(monkeypatch, {})
    before = one.measure({"fp16-mixed": FP16})
    monkeypatch.setattr(measure, "call_in_child", None)
    assert one.measure({"fp16-mixed": FP16}) == before
