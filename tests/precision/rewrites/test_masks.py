"""Mask constants: the same softmax, bit for bit, and what is no mask is left alone."""

import pytest
import torch
from torch.nn import functional as F

from floatline.precision.rewrites import Rewriting

FILL = -1e9


def rewritten(function, *args):
    return Rewriting(["mask-constant"]).run(function, args, {})


def functional(x, mask):
    return x.masked_fill(mask, FILL)


def in_place(x, mask):
    return x.clone().masked_fill_(mask, FILL)


def by_index(x, mask):
    x = x.clone()
    x[mask] = FILL
    return x


def by_where(x, mask):
    return torch.where(~mask, x, FILL)


def twice(x, mask):
    return x.masked_fill(mask, FILL).masked_fill(mask.roll(1, -1), FILL)


def twice_in_place(x, mask):
    return x.clone().masked_fill_(mask, FILL).masked_fill_(mask.roll(1, -1), FILL)


FILLS = [functional, in_place, by_index, by_where, twice, twice_in_place]
each_fill = pytest.mark.parametrize("fill", FILLS)


def scores():
    x = (torch.randn(6, 7, generator=torch.Generator().manual_seed(0)) * 100).half()
    mask = torch.rand(6, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[2] = True  # a row that is masked altogether
    return x, mask


@each_fill
@pytest.mark.parametrize("softmax", [lambda x: x.softmax(-1), lambda x: F.softmax(x.float(), dim=-1).half()])
def test_the_softmax_has_the_bits_of_fp32_rounded_once(fill, softmax):
    x, mask = scores()
    exact = fill(x.float(), mask).softmax(-1).half()
    assert torch.equal(rewritten(lambda x: softmax(fill(x, mask)), x), exact)


@each_fill
def test_without_the_rewrite_it_raises_or_is_not_finite(fill):
    x, mask = scores()
    try:
        assert not bool(fill(x, mask).softmax(-1).isfinite().all())
    except RuntimeError as error:
        assert "without overflow" in str(error)


def outcome(function, *args):
    try:
        return function(*args)
    except RuntimeError as error:
        return str(error)


@each_fill
@pytest.mark.parametrize("use", [torch.min, torch.sum, lambda x: x / 2, lambda x: x.relu(), lambda x: x])
def test_what_no_softmax_takes_is_what_the_code_asked_for(fill, use):
    x, mask = scores()
    code = lambda x: use(fill(x, mask))  # noqa: E731
    expected, found = outcome(code, x), outcome(rewritten, code, x)
    assert str(found) == str(expected)


@pytest.mark.parametrize("constant", [-1e4, -65504.0, -float("inf"), 1e9, 3.0])
def test_other_constants_are_left_alone(constant):
    x, mask = scores()
    mask[2] = False
    code = lambda x: torch.where(mask, x, constant).softmax(-1)  # noqa: E731
    assert torch.equal(rewritten(code, x), code(x)) or bool(code(x).isnan().any())


def test_bf16_holds_the_constant():
    x, mask = scores()
    x = x.bfloat16()
    assert rewritten(lambda x: x.masked_fill(mask, FILL).min(), x).item() == torch.tensor(FILL).bfloat16().item()


def test_gradients_are_those_of_fp32():
    x, mask = scores()
    narrow, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    rewritten(lambda x: functional(x, mask).softmax(-1), narrow).square().sum().backward()
    functional(wide, mask).softmax(-1).square().sum().backward()
    torch.testing.assert_close(narrow.grad.float(), wide.grad, rtol=2e-3, atol=1e-4)
