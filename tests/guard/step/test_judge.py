"""The judge: reasons, scores, scale and windows, against plain Python."""

import itertools
import math
import statistics

import pytest
import torch
from tests.slow import slow

from floatline.guard.policy import Policy
from floatline.guard.step.judge import NAMES, Judge
from floatline.optim.survey import Survey
from floatline.plans import Scaling


def make(scaling=None, *, skip_outliers=True, **numbers):
    policy = Policy(skip_outliers=skip_outliers, **numbers)
    return Judge(torch.device("cpu"), scaling=scaling, policy=policy)


def survey(norm: float, bad: int = 0) -> Survey:
    return Survey(torch.tensor([norm * norm]), torch.tensor([bad], dtype=torch.int32))


def judge(j, loss=2.0, norm=1.0, **options):
    verdict = j.judge(torch.tensor(loss), survey(norm), **options)
    return dict(zip(NAMES, verdict.report.tolist(), strict=True)), verdict.decision


class Plain:
    """The scores in float64, with Python's own median."""

    def __init__(self):
        self.window = []

    def score(self, x: float) -> float:
        if len(self.window) < 32:
            return math.nan
        logs = self.window[-128:]
        spread = statistics.median(abs(b - a) for a, b in itertools.pairwise(logs))
        return (math.log(x) - statistics.median(logs[-16:])) / max(0.01, 1.4826 * spread / math.sqrt(2))

    def accept(self, x: float) -> None:
        self.window.append(math.log(x))


def test_scores_are_those_of_plain_python():
    generator = torch.Generator().manual_seed(0)
    j, losses, norms = make(), Plain(), Plain()
    for i in range(300):
        noise = torch.randn(2, generator=generator).tolist()
        loss, norm = 3 * math.exp(-i / 200 + 0.05 * noise[0]), math.exp(0.3 * noise[1])
        seen, _ = judge(j, loss, norm)
        for name, plain, x in (("loss_score", losses, loss), ("norm_score", norms, norm)):
            expected = plain.score(x)
            assert seen[name] == pytest.approx(expected, rel=2e-4, abs=2e-4, nan_ok=True), (i, name)
            if seen["reason"] == 0:
                plain.accept(x)
    assert not math.isnan(seen["loss_score"])


def settle(j, steps=40):
    for i in range(steps):
        seen, _ = judge(j, 2.0 + 0.01 * (i % 3), 1.0 + 0.01 * (i % 5))
        assert seen["reason"] == 0


def test_a_spike_is_an_outlier_and_does_not_enter_the_window():
    j = make()
    settle(j)
    before = j.window.clone()
    seen, decision = judge(j, 8.0, 1.0)
    assert seen["reason"] == 3
    assert seen["loss_score"] > 6
    assert not decision.applied
    assert torch.equal(j.window.nan_to_num(7.0), before.nan_to_num(7.0))


def test_without_a_word_on_outliers_a_spike_is_applied_and_its_score_reported():
    j = make(skip_outliers=False)
    settle(j)
    seen, decision = judge(j, 8.0, 50.0)
    assert (seen["reason"], bool(decision.applied)) == (0, True)
    assert min(seen["loss_score"], seen["norm_score"]) > 6
    assert judge(make(skip_outliers=False), math.nan, 1.0)[0]["reason"] == 2


def test_a_spike_before_the_warm_up_is_not_judged():
    j = make()
    settle(j, steps=31)
    assert judge(j, 8.0, 1.0)[0]["reason"] == 0


def test_a_norm_alone_can_be_an_outlier():
    j = make()
    settle(j)
    assert judge(j, 2.0, 50.0)[0]["reason"] == 3


def test_a_drop_is_no_outlier():
    j = make()
    settle(j)
    assert judge(j, 0.2, 0.1)[0]["reason"] == 0


def test_a_fixed_limit_of_the_norm_skips_where_it_is_asked_for():
    assert judge(make(skip_norm_above=2.0), 2.0, 2.5)[0]["reason"] == 3
    assert judge(make(skip_norm_above=2.0), 2.0, 1.5)[0]["reason"] == 0
    assert judge(make(), 2.0, 2.5)[0]["reason"] == 0


def test_an_infinite_limit_never_skips():
    j = make(outlier_score=math.inf)
    settle(j)
    assert judge(j, 1e6, 1e6)[0]["reason"] == 0


@pytest.mark.parametrize("loss", [0.0, -3.0])
def test_a_loss_that_has_no_logarithm_is_applied_without_a_score(loss):
    j = make()
    settle(j)
    seen, _ = judge(j, loss, 1.0)
    assert seen["reason"] == 0
    assert math.isnan(seen["loss_score"])


def test_overflow_halves_the_scale_and_a_nonfinite_loss_leaves_it():
    j = make(Scaling())
    seen, _ = judge(j, 2.0, math.inf)
    assert seen["reason"] == 1
    assert seen["scale"] == 65536.0
    assert j.scale == 32768.0
    assert judge(j, math.nan, math.nan)[0]["reason"] == 2
    assert judge(j, math.inf, 1.0)[0]["reason"] == 2
    assert j.scale == 32768.0


def test_the_scale_stays_at_its_floor_and_its_cap():
    j = make(Scaling(init_scale=4.0, floor=2.0, cap=8.0, growth_interval=2))
    for _ in range(5):
        judge(j, 2.0, math.nan)
    assert j.scale == 2.0
    for _ in range(20):
        judge(j)
    assert j.scale == 8.0


def test_the_scale_grows_after_the_interval_and_an_overflow_begins_it_anew():
    j = make(Scaling(growth_interval=3))
    for _ in range(2):
        judge(j)
    judge(j, 2.0, math.inf)
    for _ in range(2):
        judge(j)
    assert j.scale == 32768.0
    judge(j)
    assert j.scale == 65536.0


def test_hysteresis_lets_the_first_overflows_pass():
    j = make(Scaling(hysteresis=2))
    judge(j, 2.0, math.inf)
    assert j.scale == 65536.0
    judge(j, 2.0, math.inf)
    assert j.scale == 32768.0
    judge(j)
    judge(j, 2.0, math.inf)
    assert j.scale == 32768.0


def test_without_scaling_the_scale_is_one_and_stays():
    j = make(None)
    assert judge(j, 2.0, math.inf)[0]["reason"] == 1
    assert j.scale == 1.0


def test_the_factor_unscales_divides_and_clips():
    j = make(Scaling())
    _, decision = judge(j, 2.0, 4.0 * 65536 * 3, clip_norm=1.0, divisor=3.0)
    assert decision.factor == pytest.approx(1 / (4.0 + 1e-6) / (65536 * 3), rel=1e-6)
    _, decision = judge(j, 2.0, 0.5 * 65536)
    assert decision.factor == 1 / 65536


def test_a_requested_skip_is_named_and_gives_way_to_a_true_reason():
    j = make()
    assert judge(j, skip=True)[0]["reason"] == 4
    assert judge(j, skip=torch.tensor(True))[0]["reason"] == 4
    assert judge(j, skip=False)[0]["reason"] == 0
    assert judge(j, 2.0, math.inf, skip=True)[0]["reason"] == 1


@slow
def test_healthy_noise_gives_no_alarm():
    generator = torch.Generator().manual_seed(1)
    j = make()
    for i in range(2000):
        noise = torch.randn(2, generator=generator).tolist()
        seen, _ = judge(j, 6 * math.exp(-i / 800) + 1 + 0.1 * noise[0], math.exp(0.2 * noise[1]))
        assert seen["reason"] == 0, i


def test_state_goes_out_and_in():
    j, k = make(Scaling()), make(Scaling())
    settle(j)
    judge(j, 2.0, math.inf)
    k.load_state({name: tensor.clone() for name, tensor in j.state().items()})
    assert judge(j, 2.1, 1.1)[0] == judge(k, 2.1, 1.1)[0]


def test_after_forgetting_a_new_level_is_normal():
    j = make()
    settle(j)
    assert judge(j, 8.0, 1.0)[0]["reason"] == 3
    j.forget()
    assert judge(j, 8.0, 1.0)[0]["reason"] == 0
