"""Weights that are finite and far off: the run goes back, although it is the gradients that overflow."""

from dataclasses import replace

import torch
import torch.nn.functional as F

import floatline as fl

GOES_BACK = fl.Policy(snapshot_gib=0.05, snapshot_every=2, rollback_reach=4, skip_outliers=True, outlier_warmup=8)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model):
    return fl.optim.AdamW(model.parameters(), lr=1e-2)


def train(policy, *, make=sgd, plan="fp32", damage=None, spoil=None, steps=30):
    """Notes of a run, and what became of its steps; one fault at step 20."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    optimizer = make(model)
    guard = fl.Guard(model, optimizer, plan=plan, policy=policy)
    notes, note = [], guard.run.diary.note
    guard.run.diary.note = lambda event, message, **values: (notes.append(event), note(event, message, **values))
    reasons = []
    for number in range(steps):
        x = torch.randn(12, 6)
        if number == 20 and damage is not None:
            damage(model, optimizer)
        if number in range(20, 26) and spoil is not None:
            x = spoil(x)
        outcome = guard.step(lambda x: F.cross_entropy(model(x).float(), (x[:, 0] > 0).long()), x)
        reasons.append(outcome.reason)
    return notes, reasons, model


def huge_weight(model, _):
    model[2].weight.data[0, 0] = 1e38


def test_a_huge_weight_whose_gradients_overflow_is_gone_back_from():
    notes, reasons, model = train(GOES_BACK, damage=huge_weight)
    assert reasons[20:23] == ["overflow"] * 3
    assert notes == ["rollback"]
    assert reasons[23:] == [None] * 7
    assert model[2].weight.abs().max() < 10


def test_bad_data_whose_gradients_overflow_is_only_skipped():
    notes, reasons, model = train(GOES_BACK, spoil=lambda x: x * 1e30)
    assert reasons[20:26] == ["overflow"] * 6
    assert notes == []
    assert reasons[26:] == [None] * 4
    assert model[2].weight.abs().max() < 10


def test_a_run_that_cannot_go_back_keeps_the_huge_weight():
    notes, reasons, model = train(replace(GOES_BACK, snapshot_gib=0.0), damage=huge_weight)
    assert set(reasons[20:]) <= {"overflow", "forward-nonfinite"}
    assert notes == ["note"]  # that ten steps in a row failed
    assert model[2].weight.max() > 1e37


def test_a_weight_that_only_fp16_cannot_hold_is_damaged_where_fp32_tells_a_far_higher_loss():
    def beyond_fp16(model, _):
        model[2].weight.data[0, 0] = 1e20

    notes, reasons, model = train(GOES_BACK, plan="fp16-mixed", damage=beyond_fp16)
    assert reasons[20] == "forward-nonfinite"
    assert notes == ["rollback"]  # and no module is raised to FP32
    assert reasons[21:] == [None] * 9
    assert model[2].weight.abs().max() < 10


def test_a_block_that_only_fp16_cannot_hold_is_raised_to_fp32_where_fp32_tells_the_same_loss():
    def widen(model, _):  # the same function with larger numbers between
        model[0].register_forward_hook(lambda module, args, out: out * 1e6)
        model[1].register_forward_hook(lambda module, args, out: F.gelu(args[0] / 1e6))

    notes, _, _ = train(GOES_BACK, plan="fp16-mixed", damage=widen)
    assert notes[0] == "escalation"
    assert "rollback" not in notes


def test_a_step_counter_whose_sign_has_flipped_is_gone_back_from():
    def negate(_, optimizer):
        next(iter(optimizer.state.values()))["step"].neg_()

    notes, reasons, model = train(GOES_BACK, make=adamw, damage=negate)
    assert reasons[20:22] == [None, "forward-nonfinite"]  # the step that the counter spoils, and what it shows in
    assert notes == ["rollback"]
    assert model[2].weight.isfinite().all()
