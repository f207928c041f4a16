"""The counterfactual choice: what fixes the step comes first, what changes nothing goes, what stays wrong stays."""

from pathlib import Path

import pytest
import torch
from tests.slow import slow
from torch import nn

from floatline.causes import find_cause
from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.target_diagnosis import diagnose
from floatline.diagnosis.trials.counterfactual import Counterfactuals
from floatline.diagnosis.trials.removals import find_removals, join_removals
from floatline.findings import Finding
from floatline.probe.runs.runs import Change, run_target, trace_target
from floatline.workload import Target

FAILURES = Path(__file__).parents[1] / "targets" / "adversarial_failures.py"
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))


class Chain(nn.Module):
    def __init__(self, *gains):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in gains)
        self.norm = nn.LayerNorm(4)
        with torch.no_grad():
            for layer, gain in zip(self.layers, gains, strict=True):
                layer.weight.mul_(gain)

    def forward(self, x):
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


def evidence_of(*gains):
    """A chain in which the layers with a large gain overflow."""

    def build():
        def loss(out, y):
            return (out.float() - y).pow(2).mean()

        return Chain(*gains), [((X,), (X,))], loss, "fp16-mixed", lambda m: torch.optim.SGD(m.parameters(), 1e-3)

    target = Target("chain.py", build, None, Path())
    given, fp32 = run_target(target, steps=24), run_target(target, steps=24, precision="fp32")
    evidence = Evidence(target, 0, given, fp32, lambda _: None)
    evidence.found_in = trace_target(target, step=given.step_to_trace)
    return evidence


def finding(module, cause="activation-overflow", **rest):
    return Finding(find_cause(cause), "seen", "fix", module=module, **rest)


def overflowing(evidence, module):
    """The finding as the detectors would place it."""
    line = next(op for op in evidence.found_in.ops if op.module == module)
    return finding(module, file=line.file, line=line.line)


GUILTY, INNOCENT = "layers.1", "layers.0"


@slow
def test_the_one_whose_removal_fixes_the_step_comes_first_and_the_innocent_goes():
    evidence = evidence_of(1.0, 1e6, 1.0)
    choice = Counterfactuals(evidence, budget=30).choose([finding(INNOCENT), overflowing(evidence, GUILTY)])
    assert [found.module for found in choice.findings] == [GUILTY]
    assert choice.tried[0].startswith("with `layers.1` in FP32 the step is finite and its gradient matches FP32 to 0.")


@slow
def test_a_fault_that_hides_behind_another_is_found_and_both_are_fixed_together():
    evidence = evidence_of(1e6, 1e6)
    choice = Counterfactuals(evidence, budget=30).choose([overflowing(evidence, INNOCENT)])
    assert [found.module for found in choice.findings] == [INNOCENT, GUILTY]
    assert "`layers.0` in FP32, `layers.1` in FP32 the step is finite" in choice.tried[0]


@slow
def test_without_time_nothing_is_tried_the_order_stays_and_that_is_said():
    evidence = evidence_of(1.0, 1e6)
    found = [finding(INNOCENT), overflowing(evidence, GUILTY)]
    choice = Counterfactuals(evidence, budget=0).choose(found)
    assert choice.findings == found
    (said,) = choice.tried
    assert said.startswith("`layers.0` in FP32 was not tried: a replay takes about ")


@slow
def test_what_cannot_be_taken_away_is_not_dropped():
    evidence = evidence_of(1.0, 1e6)
    guilty, loop = overflowing(evidence, GUILTY), finding("train", "clip-before-unscale")
    assert Counterfactuals(evidence, budget=30).choose([guilty, loop]).findings == [guilty, loop]


@slow
@pytest.mark.parametrize(
    ("cause", "rest", "change"),
    [
        ("update-lost-to-rounding", {}, Change(fp32_updates=True)),
        ("activation-overflow", {"module": "layers.0"}, Change(islands=("layers.0",))),
        ("exp-overflow", {"file": "net.py", "line": 7}, Change(lines=(("net.py", 7),))),
        ("clip-before-unscale", {"file": "net.py", "line": 7}, None),
        ("activation-overflow", {}, None),
    ],
)
def test_each_cause_has_its_removal(cause, rest, change):
    evidence = evidence_of(1.0)
    ways = find_removals(Finding(find_cause(cause), "", "", **rest), evidence.found_in, evidence)
    assert [way.change for way in ways] == ([] if change is None else [change])


@slow
def test_removals_are_joined():
    evidence = evidence_of(1.0)
    ways = [find_removals(finding(f"layers.{i}"), evidence.found_in, evidence)[0] for i in (0, 0, 1)]
    assert join_removals(ways).change == Change(islands=("layers.0", "layers.1"))


@slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("graph_hub", "in FP32 the step is finite and its gradient matches FP32 to", marks=slow),
        ("running_centre", "in FP32 the damage is gone"),
        pytest.param("gram_distances", "in FP32 the step is finite and its gradient matches FP32 to", marks=slow),
        pytest.param(
            "slow_finetuning", "with updates of FP32 weights and FP32 optimizer state: the loss goes from", marks=slow
        ),
        pytest.param("conv_tower", "with `stages.2` in FP32", marks=slow),
    ],
)
def test_what_was_tried_is_said(name, words):
    # A GPU takes the squares of distances in FP32; what 16 bits leave there is seen in the losses alone.
    device = "cpu" if name == "gram_distances" else "cuda"
    assert words in diagnose(f"{FAILURES}:{name}", as_device=device).tried[0]
