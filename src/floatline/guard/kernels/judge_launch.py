"""Launching the judge's kernel: one call for a whole judgement, on a device that Triton knows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from floatline.guard.kernels import judge_kernel
from floatline.guard.step.judge import NAMES, RECENT, ROBUST, WINDOW, Judge, Seen, Verdict
from floatline.numerics.moving import send
from floatline.optim.kernels.launches import Launches, kind_of
from floatline.optim.survey import Decision
from floatline.plans import Scaling

_NO_SCALING = Scaling()  # its numbers are passed and not looked at


class FusedJudge:
    """Judges with one kernel, in the judge's own tensors.

    Numerics:
        The arithmetic of `Judge`, in float32; logarithms and divisions may differ from torch's in the last place.
        Checked by tests/guard/step/test_judge_kernel.py.
    """

    def __init__(self) -> None:
        self._launches = Launches()

    def __call__(
        self, judge: Judge, seen: Seen, *, clip_norm: float, divisor: float | Tensor, skip: bool | Tensor | None
    ) -> Verdict:
        """One judgement; see `Judge.judge`."""
        device = judge.device
        loss = send(seen.loss, device)
        worst = loss if seen.worst is None else seen.worst
        asked = None if skip is None or skip is False else _scalar(skip, torch.bool, device)
        shared = _scalar(divisor, torch.float32, device) if isinstance(divisor, Tensor) else None
        scaling = judge.scaling or _NO_SCALING
        policy = judge.policy
        applied = torch.empty((), dtype=torch.bool, device=device)
        out = torch.empty(len(NAMES) + 1, dtype=torch.float32, device=device)
        constants = {
            "IS_TOTAL": seen.is_total,
            "DIVISOR_IN_MEMORY": shared is not None,
            "HAS_SKIP": asked is not None,
            "HAS_CLIP": math.isfinite(clip_norm),
            "SKIP_OUTLIERS": policy.skip_outliers,
            "HAS_KNOWN": seen.known is not None,
            "SCALED": judge.scaling is not None,
            "ROBUST": ROBUST,
            "WINDOW": WINDOW,
            "RECENT": RECENT,
        }
        tensors = (
            loss, worst, seen.size, loss if shared is None else shared, applied if asked is None else asked,
            applied if seen.known is None else seen.known,
            judge.scale, judge.good_steps, judge.overflows, judge.window, applied, out,
        )  # fmt: skip
        numbers = (
            1.0 if shared is not None else float(divisor), clip_norm if math.isfinite(clip_norm) else 1.0,
            policy.outlier_score, policy.skip_norm_above, policy.score_floor,
            scaling.growth_factor, scaling.backoff_factor, scaling.floor, scaling.cap,
            float(policy.outlier_warmup), float(scaling.growth_interval), float(scaling.hysteresis),
        )  # fmt: skip
        self._launches(
            judge_kernel.judge_kernel,
            1,
            (*tensors, *numbers),
            constants,
            key=(*constants.values(), *map(kind_of, tensors)),
            num_warps=4,
        )
        return Verdict(Decision(applied, out[len(NAMES)], out[2]), out[: len(NAMES)])


def _scalar(value: bool | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return send(value.detach(), device, dtype).reshape(())
    return torch.full((), value, dtype=dtype, device=device)
