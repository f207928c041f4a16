"""CapturedForward: the same pass in any precision, on copies, with its outputs where a step has gradients."""

import math

import pytest
import torch
from torch import nn

from floatline.errors import ReplayError
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.steps.captured_forward import Arguments, capture_forward, copy_inputs


def make(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)), torch.randn(4, width)


def test_fp32_gives_the_bits_of_the_model_itself():
    model, x = make()
    assert torch.equal(capture_forward(model, x).replay(precision="fp32").raw["output"], model(x))


def test_fp16_gives_the_bits_of_a_model_that_was_cast():
    model, x = make()
    own = capture_forward(model, x).replay().raw["output"]
    with HalfOnCPU(), torch.no_grad():
        assert torch.equal(own, model.half()(x.half()))


def test_a_mixed_plan_leaves_the_weights_and_casts_as_autocast_does():
    model, x = make()
    own = capture_forward(model, x, plan="fp16-mixed").replay().raw["output"]
    with HalfOnCPU(), torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(own, model(x))


def test_inputs_may_be_rows_mappings_or_both():
    class Sum(nn.Module):
        def forward(self, a, b=0.0):
            return a + b

    x = torch.ones(2)
    for inputs in ((x, x), {"a": x, "b": x}, Arguments(((x,), {"b": x}))):
        assert capture_forward(Sum(), inputs).replay().raw["output"].tolist() == [2.0, 2.0]


def test_a_pass_that_writes_to_its_inputs_finds_them_as_they_were_each_time():
    x = torch.zeros(3)
    step = capture_forward(lambda x: x.add_(1), x)
    assert step.replay(precision="fp32").raw["output"].tolist() == [1.0] * 3
    assert step.replay(precision="fp32").raw["output"].tolist() == [1.0] * 3
    assert x.tolist() == [0.0] * 3


def test_the_trace_has_outputs_where_a_step_has_gradients_and_begins_from_fp32s_weights():
    model, x = make()
    trace = capture_forward(model, x).replay(trace=True).trace
    assert list(trace.gradients) == ["output"]
    out = trace.gradients["output"]
    assert out.made_by == trace.ops[-1].index
    assert 0 < out.value.error < 0.01
    weights = [own for op in trace.ops for own in op.inputs if own.role == "param:0.weight"]
    assert weights
    assert all(own.value.error > 0 for own in weights)


def test_buffers_that_no_checkpoint_holds_stay_as_the_model_makes_them():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("made", torch.ones(2), persistent=False)

        def forward(self, x):
            seen.append((self.kept.dtype, self.made.dtype))
            return x * self.kept

    seen = []
    capture_forward(Tables(), torch.ones(2)).replay()
    assert seen == [(torch.float16, torch.float32)]


def test_what_a_model_in_16_bits_is_given_in_fp32_stays_fp32():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            seen.append(x.dtype)
            return x.to(self.weight.dtype) * self.weight

    seen = []
    capture_forward(Wide().half(), torch.ones(2)).replay()
    capture_forward(Wide(), torch.ones(2)).replay()
    assert seen == [torch.float32, torch.float16]


def test_of_a_model_with_some_16_bit_weights_only_these_change_format():
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    step = capture_forward(model, torch.ones(1, 4).bfloat16())
    seen = []
    step.around = lambda: seen.append([p.dtype for p in model.parameters()]) or torch.no_grad()
    step.replay()
    assert seen == [[torch.float16] * 2 + [torch.float32] * 2]


def test_minus_inf_that_fp32_has_too_is_meant_and_any_other_is_not():
    mask = torch.tensor([0.0, -math.inf])
    step = capture_forward(lambda x: x + mask.to(x.dtype), torch.ones(2))
    assert step.replay(precision="fp32").finite
    assert step.replay().finite
    broken = capture_forward(lambda x: x * -1e5, torch.ones(2))
    assert broken.replay(precision="fp32").finite
    assert not broken.replay().finite


def test_what_was_recorded_is_kept_where_the_pass_raises():
    step = capture_forward(lambda x: (x + 1).masked_fill(x > 0, -1e9), torch.ones(2))
    with pytest.raises(RuntimeError, match="without overflow"):
        step.replay(trace=True)
    assert [op.name for op in step.recorded.ops if op.name == "aten.add"] == ["aten.add"]


def test_a_forward_pass_has_no_loss_scale_and_no_update():
    step = capture_forward(*make())
    for options in ({"scale": 2.0}, {"update": True}):
        with pytest.raises(ReplayError, match="no loss scale"):
            step.replay(**options)


def test_inputs_that_cannot_be_copied_are_cloned():
    x = torch.ones(2, requires_grad=True) * 2  # of a graph
    assert copy_inputs((x,))[0].tolist() == [2.0, 2.0]
