"""Damage of any kind in a trace: states that do not fit, rounding that grows, choices that change."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from floatline.diagnosis.detectors.damage import (
    find_amplified,
    find_any_damage,
    find_candidates,
    find_changed_choices,
    find_spoilt_states,
    place_state,
)
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.trace.recorder import Recorder


def record(work, model=None):
    with HalfOnCPU(), Recorder(model or nn.Identity()) as recorder:
        work()
    for op in recorder.trace.ops:
        op.phase = "forward" if op.phase == "outside" else op.phase
    return recorder.trace


def stepped(dtype, gradient, optimizer=torch.optim.Adam):
    """A trace of the third step of an optimizer whose weights have one gradient throughout."""
    model = nn.Linear(4, 4, bias=False).to(dtype)
    made = optimizer(model.parameters(), lr=1e-4)
    for step in range(3):
        model.weight.grad = torch.full_like(model.weight, gradient)
        if step < 2:
            made.step()
    with HalfOnCPU(), Recorder(model) as recorder:
        made.step()
    return recorder.trace


@pytest.mark.parametrize(("gradient", "said"), [(1e-4, "becomes 0"), (3e4, "inf in 100 %")], ids=["small", "large"])
def test_a_second_moment_in_half_that_is_0_or_inf_is_spoilt(gradient, said):
    states = find_spoilt_states(stepped(torch.float16, gradient, torch.optim.RMSprop))
    assert states and said in states[0].seen, states
    assert not find_spoilt_states(stepped(torch.float32, gradient, torch.optim.RMSprop))
    assert not find_spoilt_states(stepped(torch.float16, 0.1, torch.optim.RMSprop))


def test_a_state_of_an_optimizer_of_torch_is_told_where_the_weights_became_half():
    (state,) = find_spoilt_states(stepped(torch.float16, 3e4, torch.optim.RMSprop))[:1]
    here = {(state.op.file, state.op.line)}
    finding = place_state(state, ("train.py", 7), here)
    assert (finding.file, finding.line) == ("train.py", 7)
    own = place_state(state, ("train.py", 7), set())
    assert (own.file, own.line) == (state.op.file, state.op.line)


@pytest.mark.parametrize(
    ("size", "of_gradients", "cause"),
    [
        (1e-5, True, "optimizer-state-underflow"),
        (1e-5, False, "accumulator-stagnation"),
        (3.0, True, "accumulator-stagnation"),
    ],
)
def test_a_sum_of_gradients_that_becomes_0_is_a_state_and_another_sum_is_not(size, of_gradients, cause):
    model, other = nn.Linear(4, 4, bias=False), torch.full((4, 4), size * 1.1)
    with HalfOnCPU(), Recorder(model) as recorder:
        (model(torch.full((1, 4), 1.1)) * size).sum().backward()
        numbers = model.weight.grad if of_gradients else other
        torch.zeros(4, 4, dtype=torch.float16).mul_(0.9).add_((numbers * numbers).half(), alpha=0.1)
    assert cause in [finding.cause.id for finding in find_candidates([recorder.trace])]


def causes_of(work):
    return {finding.cause.id for finding in find_candidates([record(work)])}


def test_an_average_written_out_is_an_accumulator_and_what_only_reads_it_is_none():
    mean, new = torch.full((4,), 20.0).half(), torch.full((4,), 0.3).half()
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).half()

    def averages():
        mean = kept
        mean = 0.999 * mean + 0.001 * new
        del mean

    def copies():
        kept.copy_(0.999 * kept + 0.001 * new)

    def multiplies():
        x = new.unsqueeze(0)
        x = x @ table
        del x

    def reads():
        other = 0.999 * kept + 0.001 * new
        del other

    for work, is_sum in ((averages, True), (copies, True), (reads, False), (multiplies, False)):
        kept = mean.clone()
        assert ("accumulator-stagnation" in causes_of(work)) is is_sum, work


def test_an_average_of_weights_is_no_state_of_an_optimizer():
    model, shadow = nn.Linear(4, 4, bias=False), torch.full((4, 4), 1e-7).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    nn.init.constant_(model.weight, 1e-7)
    with HalfOnCPU(), Recorder(model) as recorder:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            shadow.copy_(0.25 * shadow + 0.25 * model.weight.to(shadow.dtype))
    found = {one.cause.id for one in find_candidates([recorder.trace])}
    assert "accumulator-stagnation" in found
    assert "optimizer-state-underflow" not in found


ANGLES = torch.linspace(0, 3000, 64)


def test_the_sine_of_a_rounded_angle_is_told_where_it_was_rounded():
    trace = record(lambda: torch.sin(ANGLES.bfloat16()))
    rounding, op, error = find_amplified(trace)[0]
    assert (rounding.name, op.name) == ("aten._to_copy", "aten.sin")
    assert error > 0.25
    assert not find_amplified(record(lambda: torch.sin(ANGLES).bfloat16()))


def test_rounding_is_told_where_numbers_were_made_and_not_where_a_mask_is_filled_in():
    scores = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).half()
    hidden = torch.ones(8, 8).triu(1).bool()

    def work():
        shifted = scores + 20000.0
        return torch.softmax(shifted.masked_fill(hidden, -60000.0), -1)

    rounding, op, _ = find_amplified(record(work))[0]
    assert (rounding.name, op.name) == ("aten.add", "aten._softmax")


def test_choices_that_change_are_found_and_those_that_do_not_are_not():
    scores = torch.tensor([[2048.0, 2049.0], [2050.0, 2049.0]] * 8)
    trace = record(lambda: scores.half().argmax(1))
    ((op, share),) = find_changed_choices(trace)
    assert (op.name, share) == ("aten.argmax", 0.5)
    assert not find_changed_choices(record(lambda: (scores - 2048).half().argmax(1)))


def test_numbers_too_large_to_choose_by_are_told_where_they_were_made():
    scores = torch.tensor([[2048.0, 2049.0], [2050.0, 2049.0]] * 8)

    def work():
        shifted = scores.half()
        return shifted.argmax(1)

    (finding,) = [f for f in find_any_damage(record(work)) if f.cause.id == "choice-flipped"]
    assert finding.op == "aten._to_copy"
    assert "50 % of what argmax chooses is another in FP32" in finding.seen


def test_a_line_whose_rounding_only_chooses_otherwise_is_a_candidate_by_that():
    base = torch.nn.functional.normalize(torch.ones(1, 16) + 0.02 * torch.randn(32, 16), dim=-1)

    def work(dtype):
        score = base.to(dtype) @ base.to(dtype).T  # HERE
        return score.float().argmax(-1)

    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    named = {one.cause.id: one for one in find_candidates([record(lambda: work(torch.bfloat16))])}
    assert "# HERE" in lines[named["choice-flipped"].line - 1]
    assert "of what argmax chooses is another in FP32, in line" in named["choice-flipped"].seen
    assert "choice-flipped" not in {one.cause.id for one in find_candidates([record(lambda: work(torch.float32))])}


@pytest.mark.parametrize(
    ("dtype", "eps", "size", "told"),
    [
        (torch.bfloat16, torch.finfo(torch.bfloat16).eps, 0.05, True),
        (torch.float16, torch.finfo(torch.float16).eps, 0.05, True),
        (torch.bfloat16, torch.finfo(torch.bfloat16).eps, 3.0, False),  # it weighs nothing
        (torch.bfloat16, torch.finfo(torch.float32).eps, 0.05, False),
        (torch.float32, torch.finfo(torch.bfloat16).eps, 0.05, False),  # FP32 adds it as well
    ],
)
def test_the_eps_of_a_16_bit_format_is_a_candidate_where_it_weighs(dtype, eps, size, told):
    x = (size * (1 + torch.rand(8, 16, generator=torch.Generator().manual_seed(0)))).to(dtype)
    trace = record(lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    assert any(one.cause.id == "eps-too-large" for one in find_candidates([trace])) == told


def test_a_sound_calculation_has_no_damage():
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    assert find_any_damage(record(lambda: torch.softmax(x.half() @ x.half().T / math.sqrt(16), -1))) == []
