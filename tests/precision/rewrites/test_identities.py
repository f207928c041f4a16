"""Rewrites of logarithms and ratios: never less accurate than the code, over all FP16 numbers, and look-alikes stay."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from floatline.plans.plan import REWRITE_KINDS
from floatline.precision.rewrites import Rewriting
from floatline.precision.rewrites.mode import RULES


def all_fp16():
    """Every finite FP16 number."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return numbers[numbers.isfinite()]


def rewritten(function, *args, kinds=REWRITE_KINDS):
    return Rewriting(kinds).run(function, args, {})


def error(value, exact):
    """Distance to the exact value; inf where the value is not finite and the exact one is."""
    distance = (value.double() - exact).abs()
    return torch.where(value.double() == exact, 0.0, distance).nan_to_num(nan=math.inf, posinf=math.inf)


FORMS = {
    "log-sigmoid": [
        (lambda x: torch.log(torch.sigmoid(x)), F.logsigmoid),
        (lambda x: x.sigmoid().log(), F.logsigmoid),
        (lambda x: torch.log(1 - torch.sigmoid(x)), lambda x: F.logsigmoid(-x)),
        (lambda x: torch.log(1.0 - x.sigmoid()), lambda x: F.logsigmoid(-x)),
        (lambda x: torch.log1p(-torch.special.expit(x)), lambda x: F.logsigmoid(-x)),
        (lambda x: nn.Sigmoid()(x).view(-1, 4).float().log().half().view(-1), F.logsigmoid),
    ],
    "softplus": [
        (lambda x: torch.log(1 + torch.exp(x)), lambda x: -F.logsigmoid(-x)),
        (lambda x: torch.log1p(x.exp()), lambda x: -F.logsigmoid(-x)),
        (lambda x: torch.log(torch.exp(-x) + 1), lambda x: -F.logsigmoid(x)),
    ],
    "exp-ratio": [
        (lambda x: 1 / (1 + torch.exp(-x)), torch.sigmoid),
        (lambda x: torch.reciprocal(1 + torch.exp(-x)), torch.sigmoid),
    ],
    "bce-with-logits": [
        (
            lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.25), reduction="none"),
            lambda x: (
                0.25 * (-F.logsigmoid(x)).clamp(max=100) + 0.75 * (-F.logsigmoid(-x)).clamp(max=100)
            ),
        ),
    ],
}  # fmt: skip
each_form = pytest.mark.parametrize(
    ("kind", "code", "exact"), [(kind, *form) for kind, forms in FORMS.items() for form in forms]
)


@each_form
def test_no_fp16_number_comes_out_less_accurate(kind, code, exact):
    x = all_fp16()
    truth = exact(x.double())
    after = rewritten(code, x, kinds=[kind])
    assert after.dtype == code(x[:4]).dtype == torch.float16
    assert bool((error(after, truth) <= error(code(x), truth)).all())
    # And it is the truth, rounded once; what lies half way between two FP16 numbers may go either way.
    rounded = truth.to(torch.float16)
    assert torch.equal(after.isfinite(), rounded.isfinite())
    assert bool((error(after, truth) <= error(rounded, truth) + 1e-6 * truth.abs()).all())


@each_form
def test_the_code_itself_is_worse_somewhere(kind, code, exact):
    x = all_fp16()
    truth = exact(x.double())
    assert bool((error(code(x), truth) > error(rewritten(code, x, kinds=[kind]), truth)).any())


@each_form
def test_gradients_are_those_of_the_function(kind, code, exact):
    x = torch.linspace(-90, 90, 360, dtype=torch.float16)
    narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    rewritten(code, narrow, kinds=[kind]).float().sum().backward()
    exact(wide).sum().backward()
    torch.testing.assert_close(narrow.grad.double(), wide.grad, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("pick", [lambda p: p, lambda p: p.gather(1, torch.tensor([[0]] * 8)), lambda p: p[:, 2:]])
@pytest.mark.parametrize(
    "softmax", [lambda x: x.softmax(-1), lambda x: F.softmax(x, dim=1), nn.Softmax(1), lambda x: torch.softmax(x, 1)]
)
def test_log_of_softmax(softmax, pick):
    x = (torch.randn(8, 5, generator=torch.Generator().manual_seed(0)) * 30).half()
    code = lambda x: torch.log(pick(softmax(x)))  # noqa: E731
    truth = pick(torch.log_softmax(x.double(), 1))
    after = rewritten(code, x, kinds=["log-softmax"])
    assert bool((error(after, truth) <= error(code(x), truth)).all())
    assert bool(after.isfinite().all())
    assert bool(code(x).isinf().any())


@pytest.mark.parametrize(
    ("code", "exact"),
    [
        (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), lambda x: x.softmax(-1)),
        (lambda x: x.exp() / (1 + x.exp()), torch.sigmoid),
    ],
)
def test_a_ratio_of_exponentials_of_one_tensor(code, exact):
    x = (torch.randn(8, 5, generator=torch.Generator().manual_seed(0)) * 30).half()

    def once(x):
        e = x.exp()
        return e / (e.sum(-1, keepdim=True) if exact is not torch.sigmoid else 1 + e)

    truth = exact(x.double())
    for form in (code, once):
        after = rewritten(form, x, kinds=["exp-ratio"])
        assert torch.equal(after, truth.half())
    assert bool(code(x).isnan().any())


def test_one_rewrite_feeds_the_next():
    x = torch.tensor([[60.0, -60.0]]).half()
    code = lambda x: torch.log(x.exp() / x.exp().sum(-1, keepdim=True))  # noqa: E731
    assert rewritten(code, x, kinds=["exp-ratio", "log-softmax"]).tolist() == [[0.0, -120.0]]


def test_binary_cross_entropy_reduces_in_fp32_and_weighs():
    x = torch.linspace(-30, 30, 600).half()
    t = (x < -5).half()  # the model is sure, and wrong
    weight = torch.rand(600, generator=torch.Generator().manual_seed(0)).half()
    code = lambda x: nn.BCELoss(weight)(torch.sigmoid(x), t)  # noqa: E731
    after = rewritten(code, x, kinds=["bce-with-logits"])
    truth = F.binary_cross_entropy_with_logits(x.double(), t.double(), weight=weight.double())
    assert after.dtype == torch.float32
    torch.testing.assert_close(after.double(), truth, rtol=1e-6, atol=0)
    assert abs(code(x).double() - truth) > 0.1 * truth


def test_binary_cross_entropy_keeps_torchs_bound_of_100():
    x = torch.tensor([-400.0])
    code = lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.ones(1))  # noqa: E731
    assert rewritten(code, x).item() == code(x).item() == 100.0


def test_autocast_allows_the_rewritten_form():
    x = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = rewritten(lambda x: nn.BCELoss()(torch.sigmoid(x), torch.ones(4)), x)
    assert loss.dtype == torch.float32


LOOK_ALIKES = [
    lambda x: torch.log(torch.sigmoid(x) + 1e-3),
    lambda x: torch.log(torch.sigmoid(x).clamp(min=1e-3)),
    lambda x: torch.log(torch.sigmoid(x) * 2),
    lambda x: torch.log(2 - torch.sigmoid(x)),
    lambda x: torch.log1p(torch.sigmoid(x)),
    lambda x: torch.log(torch.sigmoid(x).sum()),
    lambda x: torch.log(2 + torch.exp(x)),
    lambda x: torch.log(1 + torch.exp2(x)),
    lambda x: x.exp() / x.exp().sum(-1),
    lambda x: x.exp() / (-x).exp().sum(-1, keepdim=True),
    lambda x: x.exp() / (2 * x).exp().sum(-1, keepdim=True),
    lambda x: 2 / (1 + torch.exp(-x)),
    lambda x: torch.log(torch.softmax(x, -1).mean(0)),
    lambda x: torch.log(torch.add(1, torch.exp(x), alpha=2)),
    lambda x: F.binary_cross_entropy(torch.sigmoid(x) * 0.5, torch.ones_like(x)),
    lambda x: torch.sigmoid(x).detach().log(),
]


@pytest.mark.parametrize("code", LOOK_ALIKES)
def test_a_look_alike_is_left_alone(code):
    x = torch.linspace(-6, 6, 64).view(8, 8).half()
    kinds = [kind for kind in REWRITE_KINDS if kind != "small-eps"]
    assert torch.equal(rewritten(code, x, kinds=kinds), code(x))


def test_a_probability_that_was_written_to_is_left_alone():
    def code(x):
        p = torch.sigmoid(x)
        p[0] = 1.0
        return p.log()

    def other(x):
        x = x.clone()
        p = torch.sigmoid(x)
        x.zero_()
        return p.log()

    x = torch.tensor([-20.0, -20.0]).half()
    for form in (code, other):
        assert torch.equal(rewritten(form, x), form(x))


def test_a_probability_that_somebody_watches_is_left_alone():
    def code(x, kept):
        p = torch.sigmoid(x)
        p.retain_grad()
        kept.append(p)
        return p.log().sum()

    kept = []
    rewritten(code, torch.zeros(3, requires_grad=True), kept).backward()
    assert kept[0].grad.tolist() == [2.0, 2.0, 2.0]


def test_no_gradient_appears_where_the_code_had_none():
    def code(x):
        with torch.no_grad():
            p = torch.sigmoid(x)
        return p.log()

    assert not rewritten(code, torch.zeros(3, requires_grad=True)).requires_grad


def test_every_kind_has_a_rule_whose_docstring_says_where_it_holds():
    assert set(RULES) == set(REWRITE_KINDS)
    for rule in RULES.values():
        assert "exact arithmetic" in rule.__doc__ or "same bits" in rule.__doc__
        assert "Checked " in rule.__doc__


def test_outside_the_call_nothing_is_rewritten():
    x = torch.tensor([-20.0]).half()
    rewriting = Rewriting(["log-sigmoid"])
    p = rewriting.run(torch.sigmoid, (x,), {})
    assert p.log().item() == -math.inf
    assert rewriting.run(torch.log, (p,), {}).item() == -math.inf
