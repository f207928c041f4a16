"""Every number in the catalogue's texts has a check that computes it; a number without one fails."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.causes.cause_measures import (
    HALF,
    adam_default,
    bad_steps_until_no_inverse,
    bytes_of_a_parameter,
    clipped_then_unscaled_norm,
    counts_up_to,
    derivative_of_acos_is_infinite_at,
    half,
    holds_integers_up_to,
    is_first_inf,
    is_fp16_edge,
    is_initial_scale,
    is_last_zero,
    is_zero_in_fp16,
    keeps_every_update_above,
    loses_every_decay_below,
    loses_every_update_below,
    loss_clamped_at,
    one_pass_variances,
    raises_beyond,
    rate_after,
    second_moment_after_one_step,
    sigmoid_is,
    skips_until_scale,
)

from floatline.causes import CAUSES, SYMPTOMS, Cause
from floatline.formats import BF16, FP16, FP32

Check = Callable[[float], bool]

NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?:\^\d+)?")
# "16-bit" and "16 bits" name a kind of format, they state nothing.
KIND_OF_FORMAT = re.compile(r"16[- ]bits?\b")


def texts_of(cause: Cause) -> Iterator[str]:
    yield from (cause.title, cause.mechanism, cause.told_apart, cause.wrong_fix)
    for remedy in cause.remedies:
        code, _, why = remedy.partition("  # ")
        yield why or code


def numbers_in(*texts: str) -> set[str]:
    return {number for text in texts for number in NUMBER.findall(KIND_OF_FORMAT.sub("", text))}


def value_of(number: str) -> float:
    base, _, power = number.replace(",", "").partition("^")
    return float(base) ** (float(power) if power else 1.0)


def exactly(expected: float) -> Check:
    return lambda v: v == expected


def about(expected: float, *, digits: int) -> Check:
    """True where v is `expected` rounded to that many significant digits."""
    return lambda v: float(f"{expected:.{digits - 1}e}") == v


CHECKS: dict[str, dict[str, Check]] = {
    "activation-overflow": {"65504": is_fp16_edge, "65520": is_first_inf},
    "product-overflow": {
        "256": lambda v: math.isinf((half(v) ** 2).item()) and not math.isinf((half(v - 1) ** 2).item()),
        "65536": exactly(256.0**2),
        "65504": is_fp16_edge,
    },
    "reduction-overflow": {
        "70,000": lambda v: math.isinf(torch.ones(int(v), dtype=HALF).sum().item()),
        "512": lambda v: v * v == 262144 and math.isinf(torch.ones(int(v), int(v), dtype=HALF).sum().item()),
        "262,144": exactly(512 * 512),
    },
    "exp-overflow": {
        "65520": is_first_inf,
        "11.09": about(math.log(FP16.overflow_at), digits=4),
        "88.7": lambda v: all(about(math.log(f.overflow_at), digits=3)(v) for f in (FP32, BF16)),
        "50": lambda v: round(math.log(FP16.overflow_at) / v, 3) == 0.222,
        "0.222": about(math.log(FP16.overflow_at) / 50, digits=3),
        "1": lambda v: (v / (1 + torch.exp(half(20)))).item() == 0.0 and torch.sigmoid(half(0)) * 2 == v,
    },
    "scalar-out-of-range": {
        "65504": lambda v: is_fp16_edge(v) and FP16.max == -torch.finfo(HALF).min and raises_beyond(v),
        "1e9": lambda v: (half(1.0) - v).item() == -math.inf,
        "16": lambda v: (
            (half(-FP16.max) - half(v)).item() == -math.inf and (half(-FP16.max) - half(v - 1)).item() == -FP16.max
        ),
        "1e4": lambda v: torch.softmax(half(-v).repeat(2), 0)[0] == 0.5 and math.isfinite(FP16.round(v)),
        "65000": lambda v: FP16.round(v) == 64992 and v != 64992,
        "64992": lambda v: torch.tensor(math.inf, dtype=HALF).clamp(-65000, 65000).item() == v,
    },
    "input-out-of-range": {
        "65519": lambda v: FP16.round(v) == 65504 and math.isinf(FP16.round(v + 1)),
        "65504": is_fp16_edge,
        "65520": is_first_inf,
        "65535": lambda v: v == 2**16 - 1 and math.isinf(FP16.round(v)),
    },
    "gradient-overflow": {
        "65536": is_initial_scale,
        "65520": is_first_inf,
        "0.002": lambda v: math.isclose(1 / v, 500) and FP16.round(1 / v) == 500,
        "500": lambda v: math.isclose(1 / 0.002, v) and math.isfinite(FP16.round(v)),
        "250,000": lambda v: math.isclose(1 / 0.002**2, v) and math.isinf(FP16.round(v)),
        "144": lambda v: bad_steps_until_no_inverse() == v,
    },
    "eps-underflow": {
        "5.96e-8": about(FP16.min_subnormal, digits=3),
        "2.98e-8": is_last_zero,
        "1e-8": is_zero_in_fp16,
        "1e-9": is_zero_in_fp16,
        "1e-12": is_zero_in_fp16,
        "1e-4": lambda v: not is_zero_in_fp16(v) and FP16.round(1 + v) == 1,
        "1": lambda v: FP16.round(v + 1e-4) == v and FP16.round(0.1 * v + 1e-4) != FP16.round(0.1 * v),
    },
    "gradient-underflow": {
        "2.98e-8": is_last_zero,
        "6.1e-5": about(FP16.min_normal, digits=2),
        "2^16": is_initial_scale,
        "16": lambda v: torch.amp.GradScaler("cpu").get_scale() == 2**v,
    },
    "optimizer-state-underflow": {
        "1e-8": lambda v: is_zero_in_fp16(v) and adam_default("eps") == v,
        "0.001": lambda v: math.isclose(1 - adam_default("betas")[1], v, rel_tol=1e-9),
        "5.4e-3": lambda v: second_moment_after_one_step(v) == 0 < second_moment_after_one_step(v * 1.03),
        "1e-10": lambda v: is_zero_in_fp16(v) and torch.optim.Adagrad([torch.ones(1)]).defaults["eps"] == v,
        "1e-4": lambda v: is_zero_in_fp16(v * v) and not is_zero_in_fp16(v),
    },
    "rounded-onto-singularity": {
        "0.9995": about(1 - FP16.spacing(0.75), digits=4),
        "1": lambda v: FP16.round(v - 1e-6) == v and FP16.round(v - 1e-8) == v and torch.sigmoid(half(9)) == v,
        "8.32": lambda v: sigmoid_is(HALF, 1.0, v),
        "16.6": lambda v: sigmoid_is(torch.float32, 1.0, v),
        "17.4": lambda v: sigmoid_is(HALF, 0.0, -v),
        "2.98e-8": is_last_zero,
        "1e-6": lambda v: FP16.round(1 - v) == 1.0,
        "1e-8": is_zero_in_fp16,
    },
    "update-lost-to-rounding": {
        "512": lambda v: loses_every_update_below(BF16, v),
        "256": lambda v: keeps_every_update_above(BF16, v),
        "4096": lambda v: loses_every_update_below(FP16, v),
        "2048": lambda v: keeps_every_update_above(FP16, v),
        "0.001": lambda v: BF16.round(1 + v) == 1 and BF16.round(1 - v) == 1,
        "1.0": lambda v: BF16.round(v + 0.001) == v and BF16.round(v / 16 + 0.001) != v / 16,
    },
    "decay-lost-to-rounding": {
        "1": lambda v: loses_every_decay_below(BF16, v / 512),
        "512": lambda v: loses_every_decay_below(BF16, 1 / v),
        "4096": lambda v: loses_every_decay_below(FP16, 1 / v),
        "1e-3": lambda v: v == pytest.approx(1e-4 / 0.1),
        "0.1": lambda v: v == pytest.approx(1e-4 / 1e-3),
        "1e-4": lambda v: v == pytest.approx(1e-3 * 0.1) and v < 1 / 4096,
    },
    "accumulator-stagnation": {
        "2048": lambda v: counts_up_to(FP16, v),
        "256": lambda v: counts_up_to(BF16, v),
        "1": lambda v: FP16.round(v + 0.000488) == v and FP16.round(v / 4 + 0.000488) != v / 4,
        "0.000488": lambda v: FP16.round(1 + v) == 1 and FP16.round(1 + v * 1.01) != 1,
        "0.9995": lambda v: math.isclose(1 - v, 0.0005, rel_tol=1e-9),
        "0.0005": lambda v: math.isclose(1 - 0.9995, v, rel_tol=1e-9) and FP16.round(1 + v * 0.5) == 1,
    },
    "integer-not-exact": {
        "2048": lambda v: holds_integers_up_to(FP16, v),
        "256": lambda v: holds_integers_up_to(BF16, v),
        "1024": lambda v: {BF16.round(v + i) for i in range(5)} == {v} == {1024.0},
        "1028": lambda v: BF16.round(v) == 1024 != BF16.round(v + 1),
        "11": exactly(FP16.mantissa_bits + 1),
        "8": exactly(BF16.mantissa_bits + 1),
    },
    "cancellation": {
        "30": lambda v: v * v == 900,
        "0.2": lambda v: math.isclose(v * v, 0.04),
        "900": lambda v: v == 30**2 and FP16.spacing(v) == 0.5,
        "0.5": lambda v: FP16.spacing(900) == v and one_pass_variances() == {-v, 0.0, v},
        "0.04": lambda v: math.isclose(v, 0.2**2),
        "0": lambda v: half(-0.5).clamp(min=v).item() == 0 and half(-0.5).clamp(min=v).sqrt().item() == 0,
        "1": lambda v: math.isclose(math.exp(1e-3) - v, math.expm1(1e-3)),
        "2": lambda v: 3.0**2 + 5.0**2 - v * 3.0 * 5.0 == (3.0 - 5.0) ** 2,
    },
    "choice-flipped": {
        "2048": lambda v: FP16.spacing(v) == 2 and FP16.spacing(v - 1) < 2,
        "2": lambda v: FP16.spacing(2048) == v,
        "0.0039": about(BF16.spacing(0.99), digits=2),
    },
    "eps-too-large": {
        "1.2e-7": about(FP32.epsilon, digits=2),
        "0.00098": about(FP16.epsilon, digits=2),
        "0.0078": about(BF16.epsilon, digits=2),
    },
    "clip-before-unscale": {
        "65536": is_initial_scale,
        "1.0": lambda v: math.isclose(clipped_then_unscaled_norm(v), 1 / 65536, rel_tol=1e-4),
        "1.5e-5": about(clipped_then_unscaled_norm(1.0), digits=2),
    },
    "scaler-misuse": {"65536": is_initial_scale},
    "scaler-state-lost": {
        "65536": is_initial_scale,
        "64": lambda v: skips_until_scale(v) == 10,
        "10": exactly(skips_until_scale(64)),
    },
    "scheduler-vs-skipped-step": {
        "20": lambda v: rate_after(int(v), decay_over=20) == 0.0 < rate_after(int(v) - 1, decay_over=20)
    },
    "scaled-grad-in-penalty": {"65536": is_initial_scale, "4.3e9": about(65536.0**2, digits=2)},
    "optimization-divergence": {"65504": is_fp16_edge, "3.4e38": about(FP32.max, digits=2)},
    "empty-reduction": {"1e-8": is_zero_in_fp16},
    "singular-gradient": {"1": derivative_of_acos_is_infinite_at},
    "clamp-kills-gradient": {
        "6": lambda v: loss_clamped_at(v) == 6.0,
        "6.0000": lambda v: loss_clamped_at(v) == 6.0,
        "50,257": lambda v: round(math.log(v), 1) == 10.8 and v == 50257,
        "50257": lambda v: round(math.log(v), 1) == 10.8 and v == 50257,
        "10.8": about(loss_clamped_at(100.0), digits=3),
    },
    "out-of-memory": {
        "16": lambda v: bytes_of_a_parameter("fp32", "all") == v,
        "4": lambda v: bytes_of_a_parameter("fp32", "weights") == bytes_of_a_parameter("fp32", "gradients") == v,
        "8": lambda v: bytes_of_a_parameter("fp32", "states") == v,
        "2": lambda v: bytes_of_a_parameter("fp16-mixed", "copies") == v,
        "18": lambda v: bytes_of_a_parameter("fp16-mixed", "all") == v,
        "14": lambda v: bytes_of_a_parameter("fp16-true", "all") == v,
    },
}


CLAIMS = [(cause.id, number) for cause in CAUSES.values() for number in sorted(numbers_in(*texts_of(cause)))]


@pytest.mark.parametrize(("cause", "number"), CLAIMS)
def test_every_number_in_a_text_is_true(cause: str, number: str):
    check = CHECKS.get(cause, {}).get(number)
    assert check is not None, f"{cause} says {number}: add its check to CHECKS"
    assert check(value_of(number))


@pytest.mark.parametrize(("cause", "number"), CLAIMS)
def test_every_check_rejects_some_other_number(cause: str, number: str):
    check, value = CHECKS[cause][number], value_of(number)
    others = (value * 1.25, value * 0.75, value * 8, value / 8, value + 1, value * 1e6, value * 1e-6)
    assert any(_fails(check, other) for other in others)


def _fails(check: Check, value: float) -> bool:
    try:
        return not check(value)
    except (AssertionError, RuntimeError, pytest.fail.Exception):
        return True


def test_no_check_is_left_over():
    used = set(CLAIMS)
    assert [(cause, n) for cause, checks in CHECKS.items() for n in checks if (cause, n) not in used] == []


def test_symptoms_state_no_numbers():
    assert numbers_in(*(text for symptom in SYMPTOMS for text in (symptom.title, symptom.check))) == set()


def test_a_number_is_seen_in_every_spelling():
    text = "65504, 70,000 ones; 2.98e-8 or 2^16, |w|/512 and -50x, in FP16 on 16 bits of c10::Half."
    assert numbers_in(text) == {"65504", "70,000", "2.98e-8", "2^16", "512", "50"}


def test_a_wrong_number_would_fail():
    assert not CHECKS["exp-overflow"]["11.09"](11.1)
    assert not CHECKS["eps-underflow"]["5.96e-8"](6.1e-8)
    assert not CHECKS["update-lost-to-rounding"]["512"](256.0)
    assert not CHECKS["gradient-overflow"]["144"](145.0)
