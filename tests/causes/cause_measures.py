"""What the numbers in the catalogue of causes are computed with: formats.py, or torch itself."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from floatline.checkup.memory import estimate_memory
from floatline.formats import FP16, Format
from floatline.plans.presets import resolve_plan
from floatline.workload import Workload

HALF = torch.float16


def half(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=HALF)


def is_fp16_edge(v: float) -> bool:
    """The largest finite number; what follows it is inf."""
    return FP16.max == v and FP16.round(v) == v and math.isinf(FP16.round(v + FP16.spacing(v)))


def is_first_inf(v: float) -> bool:
    return math.isinf(FP16.round(v)) and math.isfinite(FP16.round(math.nextafter(v, 0.0)))


def is_zero_in_fp16(v: float) -> bool:
    return FP16.round(v) == 0.0 and torch.tensor(v).to(HALF).item() == 0.0


def is_last_zero(v: float) -> bool:
    return math.isclose(v, FP16.zero_at, rel_tol=1e-2) and is_zero_in_fp16(FP16.zero_at * 0.999)


def is_initial_scale(v: float) -> bool:
    return torch.amp.GradScaler("cpu").get_scale() == v


def weights(f: Format) -> list[float]:
    """All numbers of a format from 1 to below 2: every mantissa once."""
    return [1 + i * f.epsilon for i in range(2**f.mantissa_bits)]


def loses_every_update_below(f: Format, part: float) -> bool:
    """Whether w -+ w/part (a bit less) always gives w back, and no larger part is as good."""

    def all_lost(p: float) -> bool:
        return all(f.round(w + s * w / p * 0.9999) == w for w in weights(f) for s in (1, -1))

    return all_lost(part) and not all_lost(part / 1.02)


def loses_every_decay_below(f: Format, share: float) -> bool:
    """Whether w * (1 - share), of a bit less than that share, always gives w back, and of no larger share as well."""

    def all_lost(s: float) -> bool:
        return all(f.round(w * (1 - s)) == w for w in weights(f))

    return all_lost(0.9999 * share) and not all_lost(1.02 * share)


def keeps_every_update_above(f: Format, part: float) -> bool:
    def none_lost(p: float) -> bool:
        return all(f.round(w + s * w / p * 1.0001) != w for w in weights(f) for s in (1, -1))

    return none_lost(part) and not none_lost(part * 1.02)


def counts_up_to(f: Format, v: float) -> bool:
    return f.round(v + 1) == v and all(f.round(n + 1.0) == n + 1 for n in range(int(v)))


def holds_integers_up_to(f: Format, v: float) -> bool:
    return f.max_exact_integer == v and f.round(v + 1) != v + 1


def bad_steps_until_no_inverse() -> int:
    """Bad steps until the inverse of GradScaler's scale is inf; one good step more breaks the weights."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    steps = 0
    while math.isfinite(torch.tensor(scaler.get_scale()).double().reciprocal().float().item()):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor([math.inf])
        scaler.step(optimizer)
        scaler.update()
        steps += 1
    assert weight.item() == 1.0
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert math.isinf(weight.item())
    return steps


def second_moment_after_one_step(gradient: float) -> float:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=HALF))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.full((1,), gradient, dtype=HALF)
    optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"].item()


def clipped_then_unscaled_norm(max_norm: float) -> float:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    scaler.unscale_(optimizer)
    assert parameter.grad is not None
    return parameter.grad.norm().item()


def skips_until_scale(needed: float) -> int:
    scale, skips = torch.amp.GradScaler("cpu").get_scale(), 0
    while scale > needed:
        scale, skips = scale / 2, skips + 1
    return skips


def rate_after(steps: int, *, decay_over: int) -> float:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=decay_over)
    optimizer.step()
    for _ in range(steps):
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


def one_pass_variances() -> set[float]:
    torch.manual_seed(0)
    x = (torch.randn(64, 99) * 0.2 + 30).to(HALF)
    return set(((x * x).mean(0) - x.mean(0) ** 2).tolist())


def sigmoid_is(f: torch.dtype, target: float, v: float) -> bool:
    """Whether the 16- or 32-bit sigmoid reaches `target` near v and not before."""
    at = torch.sigmoid(torch.tensor(v * 1.01, dtype=f)).item()
    before = torch.sigmoid(torch.tensor(v * 0.99, dtype=f)).item()
    return at == target and before != target


def derivative_of_acos_is_infinite_at(v: float) -> bool:
    x = torch.tensor(v, requires_grad=True)
    torch.acos(x).backward()
    assert x.grad is not None
    return math.isinf(x.grad.item())


def loss_clamped_at(v: float) -> float:
    logits = torch.zeros(1, 50257, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0])).clamp(max=v)
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad.any() or loss.item() < v
    return loss.item()


def raises_beyond(v: float) -> bool:
    x, mask = torch.zeros(4, dtype=HALF), torch.ones(4, dtype=torch.bool)
    x.masked_fill(mask, v)
    with pytest.raises(RuntimeError, match="without overflow"):
        x.masked_fill(mask, v + 1)
    return True


def adam_default(name: str):
    return torch.optim.Adam([torch.ones(1)]).defaults[name]


@cache
def bytes_of_a_parameter(plan: str, part: str) -> float:
    """Bytes that a parameter of a large model takes under AdamW, as `floatline doctor` counts them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(200, 200, bias=False) for _ in range(2)))
    row = torch.zeros(1, 200)
    workload = Workload(
        model, [((row,), (row,))], torch.nn.functional.mse_loss, plan, lambda m: torch.optim.AdamW(m.parameters())
    )
    optimizer = workload.make_optimizer(model)
    found = estimate_memory(workload, [resolve_plan(plan)], optimizer=optimizer, like_cuda=True).parts[plan]
    sizes = {**found.as_json(), "all": (found.total or 0) - (found.activations or 0)}
    return round((sizes[part] or 0) / 80_000, 2)
