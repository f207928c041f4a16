"""Planted faults: the guard's run ends where a run without a fault ends; torch's scaler and clip do not get there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from tests.slow import mostly_slow, slow
from torch import nn

import floatline as fl
from floatline.guard.policy import POLICIES

POLICY = replace(
    POLICIES["safe"], snapshot_gib=0.1, snapshot_every=5, rollback_reach=5, outlier_warmup=16, regime_after=30
)
FAULT = 30  # the batch at which trouble begins
CLOSE = 1.05  # a run that ends within 5 % of the healthy one has survived


@pytest.fixture(autouse=True)
def fast_half():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are tiny
    with fl.HalfOnCPU():
        yield
    torch.set_num_threads(threads)


class Wide(nn.Module):
    """A layer whose values between its two products can be raised; the result stays the same in exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)
        self.boost = 1.0

    def forward(self, x):
        return self.down(F.relu(self.up(x) * self.boost) / self.boost)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.wide, self.head = nn.Linear(12, 24), nn.LayerNorm(24), Wide(), nn.Linear(24, 6)

    def forward(self, x):
        x = self.norm(self.embed(x))
        return self.head(x + self.wide(x))


@cache
def teacher():
    dice = torch.Generator().manual_seed(7)
    return torch.randn(12, 24, generator=dice), torch.randn(24, 6, generator=dice)


def make_batch(number: int, size: int = 64):
    x = torch.randn(size, 12, generator=torch.Generator().manual_seed(number))
    first, second = teacher()
    return number, x, ((x @ first).relu() @ second).argmax(1)


def falling_rate(optimizer):
    """Down to 0 in 60 steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 60))


@dataclass(frozen=True)
class Fault:
    """What happens to a batch, to the weights or to the loss, and for how many batches the run goes on."""

    num: int = 0  # batches from FAULT on
    steps: int = 60
    batch: bool = False
    weights: str = ""
    loss: str = ""

    def hits(self, number: int) -> bool:
        return FAULT <= number < FAULT + self.num

    def batch_of(self, number: int):
        number, x, y = make_batch(number)
        if self.batch and self.hits(number):
            return number, 20 * x, y.roll(1)
        return number, x, y

    @torch.no_grad()
    def plant(self, number: int, model: Net) -> None:
        if not self.hits(number):
            return
        if self.weights == "gain":
            model.norm.weight[3] *= 512
        elif self.weights == "flip":
            model.norm.weight[3] = 0.75
            model.norm.weight.view(torch.int32)[3] ^= 1 << 30
            assert model.norm.weight[3].isfinite()
            assert model.norm.weight[3] > 1e38
        elif self.weights == "nan":
            model.embed.weight[0, 0] = math.nan
        elif self.weights == "boost":
            model.wide.boost = 2.0**20

    def loss_of(self, model: Net, batch):
        number, x, y = batch
        if self.loss == "nan" and self.hits(number):
            return model.head.bias.sum() * math.nan
        if self.loss == "gradient" and self.hits(number):
            weight = model.embed.weight[0, 0]
            return 0.4 + (weight - weight.detach()).square().sqrt()  # adds 0, and the derivative is NaN
        return F.cross_entropy(model(x).float(), y)


HEALTHY = Fault()
FAULTS = {
    "20 garbage batches": Fault(num=20, steps=80, batch=True),
    "a norm gain times 512": Fault(num=1, steps=80, weights="gain"),
    "the top exponent bit of a norm gain": Fault(num=1, steps=80, weights="flip"),
    "NaN in a weight": Fault(num=1, steps=80, weights="nan"),
    "150 losses of NaN, then healthy ones": Fault(num=150, steps=210, loss="nan"),
    "150 gradients of NaN, then healthy ones": Fault(num=150, steps=210, loss="gradient"),
    "a block that overflows FP16 for good": Fault(num=1000, weights="boost"),
}


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


def validate(model: Net) -> float:
    with torch.no_grad():
        return float(HEALTHY.loss_of(model, make_batch(10_000, 2000)))


def survives(loss: float) -> bool:
    return loss <= CLOSE * healthy_loss()


def healthy_loss() -> float:
    return plain(HEALTHY)[0]


@cache
def plain(fault: Fault) -> tuple[float, int | None]:
    """torch's scaler and clip, as its documentation shows them: the loss, and the step that broke the weights."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates, scaler = falling_rate(optimizer), torch.amp.GradScaler("cpu")
    broken_at = None
    for number in range(fault.steps):
        fault.plant(number, model)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = fault.loss_of(model, fault.batch_of(number))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rates.step()
        if broken_at is None and not model.embed.weight.isfinite().all():
            broken_at = number
    return validate(model), broken_at


def guarded(fault: Fault, *, policy: fl.Policy = POLICY) -> tuple[float, Net, fl.Guard]:
    model = make_model()
    optimizer = fl.optim.AdamW(model.parameters(), lr=1e-2)
    guard = fl.Guard(model, optimizer, plan="fp16-mixed", clip_norm=1.0, policy=policy)
    guard.scheduler(falling_rate(optimizer))
    for number in range(fault.steps):
        fault.plant(number, model)
        guard.step(lambda batch: fault.loss_of(model, batch), fault.batch_of(number))
    return validate(model), model, guard


@slow
@pytest.mark.parametrize("name", mostly_slow(FAULTS, every=4))
def test_the_guard_survives(name):
    # NaN gradients at the smallest scale stop the run after 20 of them; here it has to go on.
    loss, model, _ = guarded(FAULTS[name], policy=replace(POLICY, collapse_after=1000))
    assert all(param.isfinite().all() for param in model.parameters())
    assert survives(loss), (loss, healthy_loss())


@pytest.mark.parametrize("name", mostly_slow(FAULTS, every=4))
def test_torch_does_not_survive(name):
    loss, _ = plain(FAULTS[name])
    assert not survives(loss), (loss, healthy_loss())


@pytest.mark.parametrize("what", ["losses", "gradients"])
def test_the_first_healthy_step_behind_150_bad_ones_breaks_weights_of_torch(what):
    _, broken_at = plain(FAULTS[f"150 {what} of NaN, then healthy ones"])
    assert broken_at == FAULT + 150


def test_a_healthy_step_behind_100_bad_ones_does_not():
    _, broken_at = plain(Fault(num=100, steps=135, loss="gradient"))
    assert broken_at is None


def test_without_a_fault_nothing_is_skipped_and_the_result_is_that_of_torch():
    loss, _, guard = guarded(HEALTHY)
    assert "60 applied, 0 skipped" in guard.summary()
    assert loss == pytest.approx(healthy_loss(), rel=0.01)


def test_the_block_that_overflows_is_named_and_computes_in_fp32():
    _, _, guard = guarded(FAULTS["a block that overflows FP16 for good"])
    assert guard.run.islands.names == ("wide",)
    assert guard.plan.compute == "fp16"


@slow
def test_the_third_rollback_cuts_the_learning_rate():
    @dataclass(frozen=True)
    class Often(Fault):
        def hits(self, number: int) -> bool:
            return number in (30, 40, 50)

    loss, _, guard = guarded(Often(weights="nan"))
    assert math.isfinite(loss)
    assert guard.run.schedules.state_dict()["cut"] == 0.5


def test_the_twin_with_two_rollbacks_keeps_the_learning_rate():
    @dataclass(frozen=True)
    class Twice(Fault):
        def hits(self, number: int) -> bool:
            return number in (30, 40)

    _, _, guard = guarded(Twice(weights="nan"))
    assert guard.run.schedules.state_dict()["cut"] == 1.0


@slow
def test_a_new_level_of_the_loss_is_accepted_after_thirty_batches():
    loss, _, guard = guarded(Fault(num=1000, steps=90, batch=True))
    assert "30 outlier" in guard.summary()
    assert "regime-change" in guard.summary()
    assert math.isfinite(loss)


def test_gradients_that_no_scale_makes_finite_stop_the_run():
    with pytest.raises(fl.GuardStop, match="No scale can work") as stopped:
        guarded(Fault(num=1000, steps=80, loss="gradient"))
    assert stopped.value.finding.cause.id == "gradient-overflow"


def test_torch_goes_on_without_a_word_where_no_scale_makes_gradients_finite():
    loss, _ = plain(Fault(num=1000, loss="gradient"))
    before, _ = plain(Fault(steps=FAULT))
    assert loss == before  # nothing was learned since
