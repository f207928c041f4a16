"""update="exact" is float32 training: the numbers of torch.optim on float32 weights, to the last bit."""

import pytest
import torch
from tests.optim.steps import DTYPES, HALVES, copies, make_params, masters, set_grads

from floatline import optim

STEPS = 200


class ReferenceLion(torch.optim.Optimizer):
    """The two lines of the paper."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - lr * decay).sub_((beta1 * m + (1 - beta1) * p.grad).sign_(), alpha=lr)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


CASES = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {"lr": 1e-4}),
    "adamw settings": (
        optim.AdamW,
        torch.optim.AdamW,
        {"lr": 2e-4, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "maximize": True},
    ),
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 1e-4}),
    "adam decay": (optim.Adam, torch.optim.Adam, {"lr": 1e-4, "weight_decay": 0.02}),
    "adam decay maximize": (optim.Adam, torch.optim.Adam, {"lr": 1e-4, "weight_decay": 0.02, "maximize": True}),
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 1e-3}),
    "sgd momentum": (optim.SGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "dampening": 0.3}),
    "sgd decay": (
        optim.SGD,
        torch.optim.SGD,
        {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-2, "maximize": True},
    ),
    "sgd nesterov": (
        optim.SGD,
        torch.optim.SGD,
        {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    ),
}


def largest_error(ours, theirs):
    errors = [((a - b).detach().abs() / b.detach().abs()).max() for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_trained_numbers_are_those_of_torch_on_float32(case, dtype):
    ours, theirs, settings = CASES[case]
    params = make_params(dtype)
    wide = copies(params)
    one, two = ours(params, **settings), theirs(wide, foreach=True, **settings)
    start = [w.detach().clone() for w in wide]
    for step in range(STEPS):
        set_grads(params, wide, step=step)
        one.step()
        two.step()
    for master, reference in zip(masters(one), wide, strict=True):
        assert torch.equal(master, reference)
    assert largest_error(wide, start) > 1e-4, "nothing was trained"


@pytest.mark.parametrize("dtype", DTYPES)
def test_lion_is_the_two_lines_of_the_paper(dtype):
    params = make_params(dtype)
    wide = copies(params)
    settings = {"lr": 1e-5, "weight_decay": 0.1}
    one, two = optim.Lion(params, **settings), ReferenceLion(wide, **settings)
    for step in range(STEPS):
        set_grads(params, wide, step=step)
        one.step()
        two.step()
    assert largest_error(masters(one), wide) <= 1e-6


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_near_zero_stay_within_one_in_a_million(dtype):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter((torch.randn(40, 50, generator=generator) * 0.02).to(dtype))]
    wide = copies(params)
    one, two = optim.AdamW(params, lr=1e-3), torch.optim.AdamW(wide, lr=1e-3, foreach=True)
    for step in range(STEPS):
        set_grads(params, wide, step=step)
        one.step()
        two.step()
    error = (masters(one)[0] - wide[0]).detach().abs()
    assert float((error / wide[0].detach().abs().clamp(min=2**-17)).max()) <= 1e-6


@pytest.mark.parametrize("dtype", HALVES)
def test_without_the_remainder_the_same_steps_end_elsewhere(dtype):
    params = make_params(dtype)
    wide = copies(params)
    with pytest.warns(UserWarning, match="nearest"):
        one = optim.AdamW(params, lr=1e-4, update="nearest")
    two = torch.optim.AdamW(wide, lr=1e-4, foreach=True)
    for step in range(STEPS):
        set_grads(params, wide, step=step)
        one.step()
        two.step()
    assert largest_error(params, wide) > 1e-4


@pytest.mark.parametrize("dtype", HALVES)
def test_the_weight_the_model_sees_is_the_nearest_to_the_trained_number(dtype):
    params = make_params(dtype)
    optimizer = optim.AdamW(params, lr=1e-3)
    for step in range(20):
        set_grads(params, step=step)
        optimizer.step()
    for param, master in zip(params, masters(optimizer), strict=True):
        spacing = torch.finfo(dtype).eps * param.detach().float().abs()
        assert ((param.detach().float() - master).abs() <= spacing / 2).all()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch allows no gradient of another dtype")
def test_gradients_may_have_another_dtype_than_the_weight():
    narrow, wide = make_params(torch.bfloat16), make_params(torch.bfloat16)
    for param in wide:
        param.grad_dtype = torch.float32
    one, two = optim.AdamW(narrow, lr=1e-3), optim.AdamW(wide, lr=1e-3)
    for step in range(3):
        set_grads(narrow, step=step)
        for a, b in zip(narrow, wide, strict=True):
            b.grad = a.grad.float()
        one.step(clip_norm=1.0)
        two.step(clip_norm=1.0)
    assert all(torch.equal(a, b) for a, b in zip(masters(one), masters(two), strict=True))


def test_dtypes_mix_in_one_optimizer():
    params = [p for dtype in DTYPES for p in make_params(dtype, shapes=[(4, 5), (300,)])]
    wide = copies(params)
    one, two = optim.AdamW(params, lr=1e-4), torch.optim.AdamW(wide, lr=1e-4, foreach=True)
    for step in range(10):
        set_grads(params, wide, step=step)
        one.step()
        two.step()
    assert all(torch.equal(a, b) for a, b in zip(masters(one), wide, strict=True))


def test_the_gradients_are_not_changed():
    params = make_params(torch.float32)
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    for step in range(2):
        set_grads(params, step=step)
        before = [p.grad.clone() for p in params]
        optimizer.step(clip_norm=0.01, scale=2.0)
        optimizer.step()
        assert all(torch.equal(a, p.grad) for a, p in zip(before, params, strict=True))
