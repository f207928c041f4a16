"""The judge's kernel against the judge's torch operations, number by number."""

import math

import pytest
import torch
from tests.slow import exhaustive, slow

from floatline.guard.kernels import judge_for
from floatline.guard.policy import Policy
from floatline.guard.step.judge import Judge
from floatline.optim.survey import Survey
from floatline.plans import Scaling

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pair(scaling, **numbers):
    from floatline.guard.kernels.judge_launch import FusedJudge

    judges = [Judge(DEVICE, scaling=scaling, policy=Policy(**numbers)) for _ in range(2)]
    judges[1]._launch = FusedJudge()
    return judges


class Known:
    """Says of a batch that it was skipped before, or was not."""

    def __init__(self, known):
        self.known = torch.tensor(known, device=DEVICE)

    def were_skipped(self):
        return self.known

    def note(self, skipped):
        assert not (self.known & skipped)


def stream(num, seed=0):
    """Losses and norms of a run with everything that can happen in it."""
    generator = torch.Generator().manual_seed(seed)
    planted = {
        5: (math.nan, 1.0), 6: (2.0, math.inf), 7: (math.inf, math.inf), 8: (2.0, math.nan), 40: (0.0, 1.0),
        41: (-1.0, 1.0), 42: (2.0, 0.0), 60: (50.0, 1.0), 61: (2.0, 500.0), 70: (-math.inf, 1.0), 80: (2.0, 1e25),
    }  # fmt: skip
    for i in range(num):
        noise = torch.randn(2, generator=generator).tolist()
        yield planted.get(i, (3 * math.exp(-i / 90 + 0.05 * noise[0]), math.exp(0.2 * noise[1])))


def survey(norm):
    return Survey(torch.tensor([norm], device=DEVICE).square(), torch.zeros(1, dtype=torch.int32, device=DEVICE))


@slow
@pytest.mark.parametrize(
    ("scaling", "steps", "skip_outliers"),
    [
        (None, 12, False),
        (Scaling(growth_interval=3, hysteresis=2), 85, True),
        pytest.param(Scaling(), 65, False, marks=exhaustive),
    ],
)
def test_every_number_is_that_of_the_torch_operations(scaling, steps, skip_outliers):
    plain, fused = pair(scaling, skip_outliers=skip_outliers)
    skips = {20: True, 21: torch.tensor(True, device=DEVICE), 22: torch.tensor(False, device=DEVICE), 23: False}
    for i, (loss, norm) in enumerate(stream(steps)):
        options = {
            "clip_norm": math.inf if i % 3 == 0 else 0.7,
            "divisor": (1.0, 4.0, torch.tensor(2.5, device=DEVICE))[i % 3],
            "skip": skips.get(i),
        }
        if skip_outliers and i > 50:
            options["samples"] = Known(i == 60)
        if i % 5 == 0:
            options["norm"] = torch.tensor(norm * 3, device=DEVICE)
        one, two = (j.judge(torch.tensor(loss, device=DEVICE), survey(norm), **options) for j in (plain, fused))
        assert one.decision.applied == two.decision.applied, i
        assert one.decision.applied.dtype == two.decision.applied.dtype
        torch.testing.assert_close(two.report, one.report, rtol=1e-4, atol=1e-4, equal_nan=True)
        if one.decision.applied:
            torch.testing.assert_close(two.decision.factor, one.decision.factor, rtol=1e-6, atol=0)
        for name, tensor in plain.state().items():
            torch.testing.assert_close(fused.state()[name], tensor, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_the_stream_above_holds_every_reason():
    plain, _ = pair(Scaling(growth_interval=3), skip_outliers=True)
    seen = {int(plain.judge(torch.tensor(loss, device=DEVICE), survey(norm)).report[3]) for loss, norm in stream(85)}
    assert seen == {0, 1, 2, 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_kernel_judges_without_a_host_read():
    judge = Judge(DEVICE, scaling=Scaling(), policy=Policy(), launch=judge_for(DEVICE))
    assert judge._launch is not None
    loss, found = torch.tensor(2.0, device=DEVICE), survey(1.0)
    judge.judge(loss, found)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            judge.judge(loss, found, clip_norm=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
