"""NaN and inf that meet a 0 are counted in products, and named where all of the loss comes through them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from floatline.diagnosis.detectors.not_precision import first_birth_in_fp32
from floatline.probe.trace.recorder import Recorder
from floatline.probe.trace.zero_products import _count, count_met

NAN, INF = math.nan, math.inf
MASK = torch.tensor([1.0, 1.0, 0.0])


def record(compute, *inputs):
    """The trace of a step in FP32, and its loss."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with Recorder(model, batch=(inputs, ())) as recorder:
        loss = compute(model, *inputs)
        loss.backward()
    return recorder.trace, loss


def padded(*, also=()):
    x = torch.arange(12.0).view(3, 4) / 12
    x[2] = NAN
    for row in also:
        x[row, 0] = NAN
    return x


def masked_loss(model, x):
    return (model(x).square().mean(1) * MASK).sum()


def masked_in_place(model, x):
    return model(x).mul_(MASK[:, None]).sum()


def weighted_values(model, x):
    weights = torch.tensor([[0.5, 0.5, 0.0]]).expand(3, 3)
    return (weights @ (x + 0 * model(torch.ones(3, 4)))).sum()


def selected_rows(model, x):
    return model(x)[MASK.bool()].sum()


def entropy_of_masked(model, x):
    logp = model(x).masked_fill(torch.tensor([False, False, False, True]), -INF).log_softmax(-1)
    return -(logp.exp() * logp).sum()


def additive_mask(model, x):
    return F.softmax(model(x) + (1 - MASK)[:, None] * -INF, -1)[:2, 0].sum()


def logarithm_of_nothing(model, x):
    return -(torch.log(model(x).square() * MASK[:, None]) * MASK[:, None]).sum()


GOOD = torch.arange(12.0).view(3, 4) / 12
ZERO_PRODUCTS = {
    masked_loss: (padded(), "aten.mul"),
    masked_in_place: (padded(), "aten.mul_"),
    weighted_values: (padded(), "aten.mm"),
    selected_rows: (padded(), "aten.mm"),  # in backward
    entropy_of_masked: (GOOD, "aten.mul"),
    additive_mask: (GOOD, "aten.mul"),
    logarithm_of_nothing: (GOOD, "aten.mul"),
}


@pytest.mark.parametrize("compute", ZERO_PRODUCTS, ids=lambda compute: compute.__name__)
def test_a_product_with_0_is_named(compute):
    data, op = ZERO_PRODUCTS[compute]
    trace, _ = record(compute, data.clone())
    birth = first_birth_in_fp32(trace)
    assert (birth.cause, birth.op.name) == ("nan-times-zero", op)
    assert birth.op.file == __file__
    assert "meet an exact 0" in birth.seen


def unmasked(model, x):
    return model(x).sum()


def one_branch_is_not_masked(model, x):
    h = model(x)
    return (h.mean(1) * MASK).sum() + h.sum()


def spread_by_the_mean(model, x):
    h = model(x)
    return ((h - h.mean()).square().mean(1) * MASK).sum()


def root_of_zero(model, x):
    return (model(x) * 0.0).sum(1).sqrt().mul(MASK).sum()


def empty_rows(model, x):
    scores = model(x).masked_fill(MASK[:, None] == 0, -INF)
    return (scores.softmax(-1) * x * MASK[:, None]).sum()


OTHERS = {
    unmasked: (padded(), "bad-input-data"),
    one_branch_is_not_masked: (padded(), "bad-input-data"),
    spread_by_the_mean: (padded(), "bad-input-data"),
    root_of_zero: (GOOD, "singular-gradient"),
    empty_rows: (GOOD, "fully-masked-softmax"),
}


@pytest.mark.parametrize("compute", OTHERS, ids=lambda compute: compute.__name__)
def test_what_does_not_come_through_zeros_alone_keeps_its_cause(compute):
    data, cause = OTHERS[compute]
    birth = first_birth_in_fp32(record(compute, data.clone())[0])
    assert birth is not None
    assert birth.cause == cause


def test_data_that_is_broken_where_it_counts_keeps_its_cause():
    birth = first_birth_in_fp32(record(masked_loss, padded(also=[0]))[0])
    assert birth.cause == "bad-input-data"


def test_nothing_is_named_in_a_step_that_is_finite():
    for compute in (masked_loss, masked_in_place, selected_rows):
        trace, loss = record(compute, GOOD.clone())
        assert loss.isfinite()
        assert first_birth_in_fp32(trace) is None
        assert "zeroed" not in trace.meta


def test_counts_are_exact():
    a = torch.tensor([[NAN, 1.0, INF, 0.0], [0.0, NAN, 2.0, -INF]])
    b = torch.tensor([0.0, 0.0, 3.0, 0.0])
    with Recorder(nn.Identity()) as recorder:
        _ = a * b
        _ = torch.ones(2, 3) @ torch.tensor([[NAN], [1.0], [2.0]])
        _ = torch.tensor([[0.0, 1.0, 0.0], [0.0, 2.0, 1.0]]) @ torch.tensor([[NAN], [1.0], [INF]])
    ops = {str(op.index): op.name for op in recorder.trace.ops}
    counts = [(ops[index], *numbers) for index, numbers in recorder.trace.meta["zeroed"].items()]
    assert counts == [("aten.mul", 3, 4), ("aten.mm", 1, 2)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_a_gpu_counts_is_what_is_counted_elsewhere(dtype):
    kinds = torch.tensor([0.0, -0.0, 1.0, -3.0, INF, -INF, NAN, torch.finfo(dtype).tiny, torch.finfo(dtype).max]).to(
        dtype
    )
    for a, b in ((kinds[:, None], kinds), (kinds, kinds.roll(4)), (kinds, torch.zeros((), dtype=dtype))):
        assert count_met(a, b).tolist() == _count(a, b).tolist()[:1]
        assert count_met(a, b).item() > 0
    assert count_met(kinds[:4], kinds[:4]).item() == count_met(kinds[2:], kinds[7:][:, None]).item() == 0
