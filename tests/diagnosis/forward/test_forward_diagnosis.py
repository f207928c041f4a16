"""Forward passes that are never trained: planted failures are named at their line, and their twins are silent."""

import inspect
import json
import warnings
from pathlib import Path

import pytest
import torch
from tests.diagnosis.forward import twins
from tests.slow import slow
from torch import nn

from floatline.diagnosis.forward.forward_diagnosis import diagnose_captured
from floatline.diagnosis.forward.forward_target import diagnose_forward
from floatline.diagnosis.forward.result import name_layers
from floatline.errors import TargetError
from floatline.precision.islands import Islands
from floatline.probe.steps.captured_forward import capture_forward

FILE = str(Path(twins.__file__))


def diagnose(name, **options):
    return diagnose_forward(f"{FILE}:{name}", **options)


def line_of(code):
    lines = [number for number, text in enumerate(Path(FILE).read_text().splitlines(), start=1) if code in text]
    assert len(lines) == 1
    return lines[0]


PLANTED = [
    ("mask_of_1e9", "scalar-out-of-range", "masked_fill(future, self.hidden)"),
    ("gate_overflows", "product-overflow", "gated = F.silu"),
    ("eps_of_1e8", "eps-underflow", "torch.rsqrt(x.pow(2).mean(-1"),
    ("square_overflows", "reduction-overflow", "x.pow(2).sum(-1"),
    ("half_positions", "integer-not-exact", "place = torch.arange"),
    ("choice_flips", "choice-flipped", "distance = (x[:, None]"),
    ("outlier_too_large", "product-overflow", "torch.rsqrt(x.pow(2).mean(-1"),
    ("of_a_function", "reduction-overflow", "x.square().sum(-1) - x.sum(-1)"),
]


@slow
@pytest.mark.parametrize(("name", "cause", "code"), PLANTED, ids=[row[0] for row in PLANTED])
def test_what_is_planted_is_named_at_its_line(name, cause, code):
    found = diagnose(name, searches=False)
    assert found.verdict == "precision"
    assert (found.primary.cause.id, found.primary.file, found.primary.line) == (cause, FILE, line_of(code))
    assert found.status == 1


@slow
@pytest.mark.parametrize(
    "name", ["healthy", "eps_of_1e5", "square_fits", "wide_positions", "choice_stays", "outlier_of_100"]
)
def test_the_twin_without_it_is_healthy(name):
    found = diagnose(name)
    assert (found.verdict, found.status, found.findings) == ("healthy", 0, ())


def test_what_fails_in_fp32_too_is_no_matter_of_precision():
    found = diagnose("fails_everywhere")
    assert found.verdict == "not-precision"
    assert found.island is None


def test_a_weight_that_fp16_cannot_hold_is_named():
    found = diagnose("huge_weight", searches=False)
    assert found.primary.module == "head"
    assert "head.weight holds 9.984e+04" in found.primary.seen


@slow
def test_a_weight_whose_inf_is_swallowed_is_named_too():
    found = diagnose("swallowed_weight", searches=False)
    assert found.outputs[0].worst.error < float("inf")
    assert found.primary.module == "up"
    assert "up.weight holds" in found.primary.seen


def test_weights_that_are_too_small_for_fp16_are_named():
    found = diagnose("small_weights")
    assert (found.primary.cause.id, found.primary.module) == ("changed-in-16-bits", "0")
    assert "the cast to fp16 changes 0.weight by" in found.primary.seen
    assert "lose in the cast" in found.island.reason


@slow
def test_inputs_that_the_cast_makes_too_coarse_are_to_blame_where_no_line_in_fp32_helps():
    found = diagnose("coarse_inputs", searches=False)
    assert found.primary.line == line_of("phase = x[..., None]")
    assert found.primary.seen.endswith("the inputs lose it where they are cast to fp16")
    assert diagnose("fine_inputs").verdict == "healthy"


@slow
def test_the_island_brings_fp32s_outputs_back_and_nothing_less_does():
    found = diagnose("gate_overflows")
    assert found.island.complete
    assert all(name.startswith("blocks.1") for name in found.island.modules)
    torch.manual_seed(0)
    model, ids = twins.gate_overflows(0)
    step = capture_forward(model, ids)
    wide = step.replay(precision="fp32")
    with_it = step.match(step.replay(islands=found.island.modules), wide)["output"]
    assert with_it.distance < 0.02
    assert step.match(step.replay(), wide)["output"].distance == float("inf")


@slow
def test_the_plan_and_the_names_are_those_of_the_island():
    found = diagnose("gate_overflows")
    assert [kept.pattern for kept in found.plan.fp32_modules] == list(found.island.modules)
    assert found.layers["modules"] == list(found.island.modules)
    assert (found.plan.weights, found.plan.compute) == ("fp16", "fp16")
    assert diagnose("healthy").plan is None


def test_names_for_other_tools_follow_the_scopes_of_an_export():
    names = name_layers(["model.layers.3.mlp", "head"])
    assert names["onnx_node_prefixes"] == ["/model/layers.3/mlp", "/head"]
    assert names["tensorrt"].endswith("--layerPrecisions=/model/layers.3/mlp/*:fp32,/head/*:fp32")
    assert names["coreml_scopes"] == ["model/3/mlp", "head"]


def test_names_for_coreml_are_the_scopes_of_a_traced_program():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Linear(2, 2)

        def forward(self, x):
            return self.mlp(x)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Stack()

        def forward(self, x):
            return self.model(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch asks for export instead; Core ML's converter takes both
        graph = torch.jit.trace(Model(), torch.ones(1, 2)).inlined_graph
    scopes = {node.scopeName() for node in graph.nodes() if node.kind() == "aten::linear"}
    last = {"/".join(part.rpartition(".")[2] for part in scope.split("/")) for scope in scopes}
    assert last == set(name_layers(["model.layers.0.mlp", "model.layers.1.mlp"])["coreml_scopes"])


@slow
def test_fp16_is_nearer_to_fp32_than_bf16_and_it_is_said():
    found = diagnose("healthy")
    fp16, bf16, floor = found.outputs
    assert [row.arm for row in found.outputs] == ["fp16", "bf16", "floor"]
    assert floor.worst.distance < 8 * fp16.worst.distance
    assert 3 < bf16.worst.distance / fp16.worst.distance < 20
    assert "times nearer to FP32 than BF16 here" in found.notes[0]
    assert fp16.worst.kind == "logits"
    assert fp16.worst.top1 > 0.9


@slow
def test_a_precision_may_be_named_by_the_target():
    assert diagnose("names_its_precision").precision == "bf16-true"


def test_a_bf16_checkpoint_is_asked_about_in_fp16_from_the_same_weights():
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)).bfloat16(), torch.arange(9)
    step = capture_forward(model, ids)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    step.around = lambda: seen.append({p.dtype for p in model.parameters()}) or torch.no_grad()
    step.replay()
    step.replay(precision="fp32")
    assert seen == [{torch.float16}, {torch.float32}]
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}


@slow
def test_a_model_in_training_mode_is_looked_at_in_evaluation_mode_and_stays_in_training_mode():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    found = diagnose_captured(capture_forward(model, torch.randn(4, 8)), "it")
    assert found.verdict == "healthy"
    assert model.training
    assert model[1].training


@slow
def test_the_json_is_that_of_every_diagnosis_and_more():
    fields = json.loads(json.dumps(diagnose("gate_overflows").as_json()))
    assert {"target", "precision", "verdict", "findings", "seconds", "outputs", "island", "plan", "layers"} <= set(
        fields
    )
    assert {"cause", "module", "file", "line", "op", "seen", "fix", "remedies"} <= set(fields["findings"][0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forward", "Add forward(seed)"),
        ("gives_no_tensor", "gives no tensor"),
        ("gives_no_pair", "It must return (model, inputs)"),
        ("none", "no function"),
    ],
)
def test_a_target_that_is_none_is_refused_in_one_line(name, words):
    with pytest.raises(TargetError) as refused:
        diagnose(name)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@slow
def test_nothing_of_the_model_is_left_changed():
    model, ids = twins.gate_overflows(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    diagnose_captured(capture_forward(model, ids), "it")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert inspect.ismethod(model.blocks[1].forward)  # no island is left
    assert Islands(model).names == ()
