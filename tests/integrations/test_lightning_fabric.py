"""floatline in real Fabric loops on the CPU."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl
from floatline.errors import GuardError
from floatline.numerics import cuda_autocast_lists
from floatline.plans import Plan, Scaling

fabric_package = pytest.importorskip("lightning.fabric", reason="lightning is not installed")

from floatline.integrations.lightning import FloatlineFabricPrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
CALM = Plan(name="calm", weights="fp32", compute="fp16", scaling=Scaling(init_scale=1024.0))


@pytest.fixture(scope="module", autouse=True)
def lists_stay():
    """Registering CUDA's lists takes a third of a second: once is enough for all loops."""
    with cuda_autocast_lists():
        yield


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))


def batches(num=8, bad=()):
    generator = torch.Generator().manual_seed(1)
    found = [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(num)]
    for place in bad:
        found[place][0][0, 0] = math.nan
    return found


class Loop:
    """A Fabric loop as people write it; `precision` is a plugin, or a name for Fabric's own."""

    def __init__(self, precision, make_optimizer=torch.optim.SGD, **options):
        self.precision = precision
        own = {"plugins": [precision]} if not isinstance(precision, str) else {"precision": precision}
        self.fabric = fabric_package.Fabric(accelerator="cpu", devices=1, **own)
        model = make_model()
        self.model, self.optimizer = self.fabric.setup(model, make_optimizer(model.parameters(), lr=0.05, **options))
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer.optimizer, 1.0, 0.1, total_iters=30)

    def train(self, rows, max_norm=None):
        for x, y in rows:
            self.optimizer.zero_grad()
            self.fabric.backward(F.mse_loss(self.model(x), y))
            if max_norm is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm)
            self.optimizer.step()
            self.schedule.step()
        return self

    @property
    def weights(self):
        return [param.detach().clone() for param in self.model.parameters()]


def same(one, other):
    return all(map(torch.equal, one, other))


def test_a_skipped_step_is_known_and_the_schedule_waits(tmp_path):
    precision = FloatlineFabricPrecision(CALM, folder=tmp_path / "run")
    loop = Loop(precision)
    precision.scheduler(loop.schedule)
    loop.train(batches(3))
    before = loop.weights
    loop.train(batches(1, bad=[0]))
    assert not precision.outcome.applied
    assert precision.outcome.reason == "forward-nonfinite"
    assert same(before, loop.weights)
    loop.train(batches(2))
    assert loop.schedule.last_epoch == 5
    assert precision.metrics()["floatline/skipped"] == 1
    assert "6 attempted, 5 applied" in precision.summary()
    precision.close()
    assert fl.Ledger.read(tmp_path / "run").applied == [True] * 3 + [False] + [True] * 2


def test_the_model_computes_in_fp16_on_a_cpu_where_fabric_takes_bf16():
    found = []
    for precision in (FloatlineFabricPrecision("fp16-mixed"), "16-mixed"):
        loop = Loop(precision)
        loop.model.module[0].register_forward_hook(lambda _, __, output: found.append(output.dtype))
        loop.train(batches(1))
    assert found == [torch.float16, torch.bfloat16]


def test_a_healthy_loop_has_the_weights_of_fabrics_own_16_mixed():
    from lightning.fabric.plugins.precision import MixedPrecision

    ours = Loop(FloatlineFabricPrecision(CALM)).train(batches())
    with fl.HalfOnCPU(), cuda_autocast_lists():
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        theirs = Loop(MixedPrecision("16-mixed", "cpu", scaler=scaler)).train(batches())
    assert same(ours.weights, theirs.weights)
    assert not same(ours.weights, Loop(FloatlineFabricPrecision("fp32")).train(batches()).weights)


def test_fabrics_clipping_sees_unscaled_gradients_also_of_fused_optimizers():
    clipped = Loop(FloatlineFabricPrecision(CALM)).train(batches(), max_norm=0.05)
    wide = Loop(FloatlineFabricPrecision("fp32")).train(batches(), max_norm=0.05)
    free = Loop(FloatlineFabricPrecision("fp32")).train(batches())
    fused = Loop(FloatlineFabricPrecision(CALM), fused=True).train(batches(), max_norm=0.05)
    for one, two, other, far in zip(clipped.weights, fused.weights, wide.weights, free.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
        assert (far - other).abs().max() > 1e-3


def test_16_bit_weights_want_an_optimizer_that_keeps_their_updates():
    loop = Loop(FloatlineFabricPrecision("fp16-true"), fl.optim.AdamW).train(batches(bad=[2]))
    assert {weight.dtype for weight in loop.weights} == {torch.float16}
    assert all(weight.isfinite().all() for weight in loop.weights)
    with pytest.raises(GuardError, match="Use one of floatline.optim"):
        Loop(FloatlineFabricPrecision("fp16-true")).train(batches(1))


def test_a_checkpoint_carries_the_guard(tmp_path):
    def state(loop):
        return {"model": loop.model, "optimizer": loop.optimizer, "precision": loop.precision}

    rows = batches(10, bad=[1])
    high = Plan(name="high", weights="fp32", compute="fp16", scaling=Scaling(init_scale=2.0**22))
    straight = Loop(FloatlineFabricPrecision(high)).train(rows)
    half = Loop(FloatlineFabricPrecision(high)).train(rows[:6])
    half.fabric.save(tmp_path / "one.ckpt", state(half))
    other = Loop(FloatlineFabricPrecision(CALM))
    other.fabric.load(tmp_path / "one.ckpt", state(other))
    assert float(other.precision.steps.scale) == float(half.precision.steps.scale) < 2.0**22
    other.schedule.load_state_dict(half.schedule.state_dict())
    other.optimizer.param_groups[0]["lr"] = half.optimizer.param_groups[0]["lr"]
    other.train(rows[6:])
    assert same(straight.weights, other.weights)
    assert "10 attempted" in other.precision.summary()


def test_two_optimizers_share_a_scale_that_may_move_between_their_steps():
    def train(spoil):
        precision = FloatlineFabricPrecision(CALM)
        fabric = fabric_package.Fabric(accelerator="cpu", devices=1, plugins=[precision])
        nets = [make_model(), make_model()]
        pairs = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05)) for net in nets]
        for number, (x, y) in enumerate(batches(4)):
            fabric.backward(sum(F.mse_loss(model(x), y) for model, _ in pairs))
            if number == spoil:
                nets[0][0].weight.grad[0, 0] = math.inf
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        return [[param.detach() for param in net.parameters()] for net in nets]

    healthy, spoilt = train(None), train(2)
    assert same(healthy[1], spoilt[1])
    assert not same(healthy[0], spoilt[0])
