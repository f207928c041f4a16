"""An eps that FP16 rounds away: computed in FP32, at least as accurate, and one that fits is left alone."""

import pytest
import torch
from torch.nn import functional as F

from floatline.precision.rewrites import Rewriting

EPS = 1e-8


def rewritten(function, *args):
    return Rewriting(["small-eps"]).run(function, args, {})


def all_positive():
    return torch.arange(0, 0x7C00, dtype=torch.int16).view(torch.float16)


FORMS = [
    lambda x: x / (x + EPS),
    lambda x: torch.log(x + EPS),
    lambda x: torch.rsqrt(x + EPS),
    lambda x: x * torch.rsqrt(x + 1e-12),
    lambda x: x / torch.sqrt(EPS + x),
    lambda x: x / x.clamp(min=EPS),
    lambda x: x / x.clamp_min(EPS),
    lambda x: x / x.clone().add_(EPS),
    lambda x: 1 / (x + EPS),
    lambda x: x / (x + EPS).reshape(-1, 8).reshape(-1),
]


def error(value, exact):
    distance = (value.double() - exact).abs()
    return torch.where(value.double() == exact, 0.0, distance).nan_to_num(nan=float("inf"))


@pytest.mark.parametrize("code", FORMS)
def test_no_fp16_number_comes_out_less_accurate(code):
    x = all_positive()
    truth = code(x.double())
    before, after = code(x), rewritten(code, x)
    assert after.dtype == before.dtype == torch.float16
    # FP32 cannot tell on which side of the middle between two FP16 numbers the truth lies, where it is that near.
    assert bool((error(after, truth) <= error(before, truth) + 1e-6 * truth.abs()).all())
    assert torch.equal(after.isfinite(), truth.half().isfinite())
    assert bool((error(after, truth) < error(before, truth)).any())


def test_gradients_are_finite_where_the_codes_are_not():
    x = torch.zeros(4, dtype=torch.float16)
    code = lambda x: (x * torch.rsqrt(x.square() + EPS)).sum()  # noqa: E731
    for form, finite in ((lambda x: rewritten(code, x), True), (code, False)):
        leaf = x.clone().requires_grad_()
        form(leaf).backward()
        assert bool(leaf.grad.isfinite().all()) == finite


@pytest.mark.parametrize(
    "code",
    [
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1),
        lambda x: F.cosine_similarity(x, x.flip(-1), -1, 1e-6),
        lambda x: F.pairwise_distance(x, x),
    ],
)
def test_functions_with_an_eps_of_their_own(code):
    x = torch.tensor([[0.0, 0.0, 0.0], [1e-5, 2e-5, 0.0], [1.0, 2.0, 3.0]]).half()
    truth = code(x.double())
    after = rewritten(code, x)
    assert after.dtype == torch.float16
    assert bool((error(after, truth) <= error(code(x), truth)).all())
    assert bool(after.isfinite().all())


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x / (x + 1e-3),
        lambda x: (x + EPS).sum(),
        lambda x: (x + EPS) + 1.0,
        lambda x: (x + 0.0).log(),
        lambda x: torch.add(x, x, alpha=EPS).log(),
        lambda x: F.normalize(x.unsqueeze(0), eps=1e-3),
    ],
)
def test_what_needs_no_help_is_left_alone(code):
    x = all_positive()[1:2000]
    assert torch.equal(rewritten(code, x), code(x))


def test_fp32_is_left_alone():
    x = torch.rand(100)
    assert torch.equal(rewritten(FORMS[0], x), FORMS[0](x))
