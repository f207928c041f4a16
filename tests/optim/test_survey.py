"""One pass over the gradients, and what is decided from it."""

import pytest
import torch
from tests.optim.steps import DTYPES, copies, make_params, masters, set_grads

from floatline import optim
from floatline.optim import Survey, decide
from floatline.optim.survey import merge


def survey_of(*grads):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return optim.SGD(params).survey()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_torch(dtype):
    params = make_params(dtype)
    set_grads(params, size=3.0)
    seen = optim.AdamW(params).survey()
    grads = [p.grad.float() for p in params]
    assert torch.allclose(seen.norms, torch.stack([g.norm() for g in grads]), rtol=1e-5)
    assert float(seen.norm) == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-5)
    assert not seen.nonfinite.any()


def test_nonfinite_values_are_counted_for_each_tensor():
    seen = survey_of(torch.tensor([1.0, torch.nan, torch.inf]), torch.ones(2), torch.tensor([-torch.inf]))
    assert seen.nonfinite.tolist() == [2, 0, 1]
    assert seen.nonfinite.dtype == torch.int32
    assert not seen.norm.isfinite()


def test_16_bit_gradients_do_not_overflow_in_the_sum():
    seen = survey_of(torch.full((1000,), 60000.0, dtype=torch.float16))
    assert float(seen.norm) == pytest.approx(60000.0 * 1000**0.5, rel=1e-3)


def test_parameters_without_gradient_are_not_surveyed():
    params = make_params(torch.float32)
    set_grads(params)
    params[0].grad = None
    assert len(optim.AdamW(params).survey().sums) == len(params) - 1
    for param in params:
        param.grad = None
    assert float(optim.AdamW(params).survey().norm) == 0


@pytest.mark.parametrize("clip_norm", [0.001, 1e6])
def test_clipping_is_torch_clip_grad_norm(clip_norm):
    params = make_params(torch.float32)
    wide = copies(params)
    one, two = optim.SGD(params, lr=0.1), torch.optim.SGD(wide, lr=0.1, foreach=True)
    for step in range(3):
        set_grads(params, wide, step=step)
        one.step(clip_norm=clip_norm)
        norm = torch.nn.utils.clip_grad_norm_(wide, clip_norm)
        two.step()
        assert float(one.decision.norm) == pytest.approx(float(norm), rel=1e-5)
    for a, b in zip(masters(one), wide, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", [float, torch.tensor])
def test_scale_clip_and_skip_may_be_numbers_or_tensors(form):
    params = make_params(torch.float16)
    wide = copies(params)
    one, two = optim.SGD(params, lr=0.1), optim.SGD(wide, lr=0.1)
    set_grads(params, wide)
    for param in params:
        param.grad *= 1024
    one.step(scale=form(1024.0), clip_norm=form(1.0), skip=torch.tensor(False))
    two.step(clip_norm=1.0)
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(masters(one), masters(two), strict=True))


def test_clipping_is_of_unscaled_gradients():
    seen = Survey(torch.tensor([16.0]), torch.tensor([0], dtype=torch.int32))
    decision = decide(seen, scale=4.0, clip_norm=0.5)
    assert float(decision.norm) == 1.0
    assert float(decision.factor) == pytest.approx(0.5 / 4.0, rel=1e-5)
    assert bool(decision.applied)
    # Clipped before unscaling it would be eight times smaller.
    assert float(decision.factor) > 2 * 0.5 / 16


def test_an_overflowing_norm_is_not_applied():
    seen = survey_of(torch.full((4,), 3e38))
    assert not seen.nonfinite.any()
    assert not bool(decide(seen).applied)


def test_a_decision_without_survey_trusts_skip():
    assert bool(decide(None, scale=2.0).applied)
    assert float(decide(None, scale=2.0).factor) == 0.5
    assert not bool(decide(None, skip=torch.tensor(True)).applied)
    assert decide(None).norm is None


def test_surveys_of_several_devices_are_put_in_the_order_of_the_parameters():
    first = Survey(torch.tensor([1.0, 9.0]), torch.tensor([0, 2], dtype=torch.int32))
    second = Survey(torch.tensor([4.0]), torch.tensor([1], dtype=torch.int32))
    whole = merge([first, second], [0, 2, 1])
    assert whole.norms.tolist() == [1.0, 2.0, 3.0]
    assert whole.nonfinite.tolist() == [0, 1, 2]
