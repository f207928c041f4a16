"""What the catalogue claims without a number: remedies that work, wrong fixes that do not."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

HALF = torch.float16
INF = math.inf


def gradient_of(function, value) -> torch.Tensor:
    """The gradient of the sum of a function at a value."""
    leaf = torch.as_tensor(value, dtype=torch.float32).clone().requires_grad_()
    function(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def is_nan(t: torch.Tensor) -> bool:
    return bool(t.isnan().any())


def test_a_swallowed_inf_makes_a_norm_return_zeros():
    x = torch.full((4,), 400.0, dtype=HALF)
    assert not (x * torch.rsqrt((x * x).mean() + 1e-6)).any()
    assert (x.float() * torch.rsqrt(x.float().pow(2).mean() + 1e-6)).allclose(torch.ones(4))


@pytest.mark.parametrize("bandage", [torch.nan_to_num, lambda t: t.clamp(-65504, 65504)])
def test_a_bandage_over_inf_has_gradient_zero(bandage):
    assert not gradient_of(lambda t: bandage(t.half() * 300), [300.0]).any()


def test_cpu_autocast_leaves_exp_and_sum_in_half():
    with torch.autocast("cpu", dtype=HALF):
        assert torch.ones(2, dtype=HALF).exp().dtype == HALF
        assert torch.ones(2, dtype=HALF).sum().dtype == HALF


def test_a_hand_written_sigmoid_is_finite_forward_and_nan_backward():
    def step(t):
        return 1 / (1 + torch.exp(-50 * t.half()))

    assert step(torch.tensor(-0.3)).item() == 0.0
    assert is_nan(gradient_of(step, [-0.3]))
    assert not is_nan(gradient_of(lambda t: torch.sigmoid(50 * t.half()), [-0.3]))


def test_a_mask_before_exp_works_and_a_factor_after_it_does_not():
    mask = torch.tensor([True, False])
    assert is_nan(gradient_of(lambda t: torch.exp(t.half()) * mask, [1.0, 12.0]))
    assert not is_nan(gradient_of(lambda t: torch.exp(torch.where(mask, t.half(), 0.0)) * mask, [1.0, 12.0]))


def test_clipping_an_inf_norm_makes_nan_and_zeros():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([INF, 1.0])
    nn.utils.clip_grad_norm_([parameter], 1.0)
    assert parameter.grad[0].isnan()
    assert parameter.grad[1] == 0


def test_a_guard_in_fp16_fails_on_an_empty_row_and_the_remedies_do_not():
    def guarded(t):
        return t.half() / (t.half().norm() + 1e-8)

    def remedy(t):
        return t.half() / t.half().norm(dim=-1, keepdim=True).clamp_min(1e-4)

    row = torch.zeros(3)
    assert is_nan(guarded(row))
    assert is_nan(gradient_of(lambda t: torch.nan_to_num(guarded(t)), row))
    for works in (remedy, lambda t: F.normalize(t.half().float(), dim=-1)):
        assert not is_nan(works(row))
        assert not is_nan(gradient_of(works, row))


def test_adam_on_half_parameters_breaks_the_weights_and_a_larger_eps_does_not():
    for eps, breaks in ((1e-8, True), (1e-4, False)):
        parameter = nn.Parameter(torch.ones(2, dtype=HALF))
        optimizer = torch.optim.Adam([parameter], eps=eps)
        parameter.grad = torch.tensor([0.0, 1e-4], dtype=HALF)
        optimizer.step()
        assert parameter.isfinite().all().item() is not breaks


def test_bf16_parameters_pass_the_scaler():
    layer = nn.Linear(2, 2, dtype=torch.bfloat16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum()).backward()
    scaler.step(torch.optim.SGD(layer.parameters(), lr=0.1))


def test_a_step_inside_autocast_leaves_the_loss_unchanged():
    def losses(*, inside: bool) -> list[float]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        found = []
        outer = torch.autocast("cpu", dtype=HALF) if inside else contextlib.nullcontext()
        with outer:
            for _ in range(3):
                with torch.autocast("cpu", dtype=HALF):
                    loss = layer(torch.ones(8, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    assert len(set(losses(inside=True))) == 1
    assert len(set(losses(inside=False))) == 3


def test_the_gradient_of_a_loss_without_labels_is_zero():
    logits = torch.randn(2, 3, requires_grad=True)
    labels = torch.tensor([-100, -100])
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    assert loss.isnan()
    assert not logits.grad.any()
    total = F.cross_entropy(logits, labels, reduction="sum")
    assert (total / (labels != -100).sum().clamp(min=1)).item() == 0.0


def test_nan_to_num_after_an_empty_softmax_is_clean_forward_only():
    def bandaged(t):
        return torch.nan_to_num((t + -INF).softmax(-1)) * t

    row = torch.ones(3)
    assert not is_nan(bandaged(row))
    assert is_nan(gradient_of(bandaged, row))


def test_opening_empty_rows_before_the_softmax_works():
    keep = torch.tensor([[True, False], [False, False]])

    def attend(t):
        opened = keep | ~keep.any(-1, keepdim=True)
        return t.masked_fill(~opened, -INF).softmax(-1) * keep.any(-1, keepdim=True)

    assert not is_nan(attend(torch.ones(2, 2)))
    assert not is_nan(gradient_of(attend, torch.ones(2, 2)))


def test_attention_of_torch_gives_zeros_for_an_empty_row():
    q = torch.ones(1, 2, 4)
    keep = torch.tensor([[True, True], [False, False]])
    assert not F.scaled_dot_product_attention(q, q, q, attn_mask=keep)[0, 1].any()


def test_a_root_by_hand_is_nan_at_zero_and_the_remedies_are_not():
    zeros = torch.zeros(3)

    def two_wheres(d2):
        return torch.where(d2 > 0, torch.where(d2 > 0, d2, 1.0).sqrt(), 0.0)

    assert is_nan(gradient_of(lambda t: t.square().sum().sqrt(), zeros))
    assert is_nan(gradient_of(lambda t: t.sqrt() * torch.tensor([0.0, 1.0, 1.0]), zeros))
    for works in (torch.linalg.vector_norm, torch.norm, two_wheres):
        assert not is_nan(gradient_of(works, zeros))


def test_nan_to_num_on_the_loss_does_not_save_the_gradients():
    data = torch.tensor([1.0, math.nan])
    assert is_nan(gradient_of(lambda w: torch.nan_to_num(((w * data - 1) ** 2).mean()), [1.0, 1.0]))


def test_the_finfo_of_another_dtype_raises_as_well():
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.ones(2, dtype=HALF).masked_fill(torch.tensor([True, False]), torch.finfo(torch.float32).min)


def test_scaled_gradients_in_a_penalty_are_wrong_by_the_scale():
    scaler = torch.amp.GradScaler("cpu")
    x = torch.ones(2, requires_grad=True)
    (scaled,) = torch.autograd.grad(scaler.scale(x.square().sum()), x, create_graph=True)
    assert torch.equal(scaled / scaler.get_scale(), 2 * x)
    assert scaled.norm() > 1e4
