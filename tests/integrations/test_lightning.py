"""floatline in real Lightning fits on the CPU, each beside what plain Lightning does."""

import logging
import math
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl
from floatline.errors import GuardError, LedgerError, OptimizerError
from floatline.findings import GuardStop
from floatline.guard.policy import Policy
from floatline.numerics import cuda_autocast_lists
from floatline.numerics.cuda_autocast import _registration
from floatline.plans import Plan, Scaling

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from floatline.integrations.lightning import FloatlineCallback, FloatlinePrecision  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
# Small enough that nothing overflows while the scale is searched.
CALM = Plan(name="calm", weights="fp32", compute="fp16", scaling=Scaling(init_scale=1024.0))


@pytest.fixture(scope="module", autouse=True)
def lists_stay():
    """Registering CUDA's lists takes a third of a second: once is enough for all fits."""
    with cuda_autocast_lists():
        yield


class Module(lightning.LightningModule):
    def __init__(self, *, fused=False, kind=torch.optim.AdamW, interval="step"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))
        self.fused, self.kind, self.interval = fused, kind, interval
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append([param.detach().clone() for param in self.parameters()])
        loss = F.mse_loss(self.net(batch[0]).float(), batch[1].float())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        options = {"fused": True} if self.fused else {}
        optimizer = self.kind(self.parameters(), lr=0.02, **options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


def rows(num=10, bad=()):
    generator = torch.Generator().manual_seed(1)
    found = [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(num)]
    for place in bad:
        found[place][0][0, 0] = math.nan
    return torch.utils.data.DataLoader(found, batch_size=None)


def make_trainer(plugin, folder, *, callbacks=(), package=lightning, **options):
    usual = {"max_epochs": 1, "enable_checkpointing": False, "logger": False}
    return package.Trainer(
        accelerator="cpu", plugins=[plugin], callbacks=list(callbacks), default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, **{**usual, **options},
    )  # fmt: skip


def fit(plugin, folder, data, *, module=None, ckpt_path=None, **options):
    module = Module() if module is None else module
    trainer = make_trainer(plugin, folder, **options)
    plain = not isinstance(plugin, FloatlinePrecision)
    lists = cuda_autocast_lists() if plain else nullcontext()
    with fl.HalfOnCPU() if plain else nullcontext(), lists:
        trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module


def lightnings_own(scale=1024.0):
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


def advances(trainer):
    return trainer.lr_scheduler_configs[0].scheduler.last_epoch


def same(one, other):
    return all(map(torch.equal, one, other))


def weights(module):
    return [param.detach().clone() for param in module.parameters()]


def test_a_healthy_fit_has_the_weights_of_lightnings_own_16_mixed(tmp_path):
    _, ours = fit(FloatlinePrecision(CALM), tmp_path, rows())
    _, theirs = fit(lightnings_own(), tmp_path, rows())
    _, wide = fit(FloatlinePrecision("fp32"), tmp_path, rows())
    assert same(weights(ours), weights(theirs))
    assert not same(weights(ours), weights(wide))


def test_fp16_on_a_cpu_is_fp16_with_the_dtypes_of_a_gpu(tmp_path):
    found = []

    class Looks(Module):
        def training_step(self, batch, index):
            x = self.net(batch[0])
            found.append((x.dtype, x.softmax(-1).dtype))
            return super().training_step(batch, index)

    fit(FloatlinePrecision("fp16-mixed"), tmp_path, rows(2), module=Looks())
    assert found == [(torch.float16, torch.float32)] * 2
    found.clear()
    trainer = lightning.Trainer(
        accelerator="cpu", precision="16-mixed", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Looks(), rows(2))
    assert [dtype for dtype, _ in found] == [torch.bfloat16] * 2  # what Lightning makes of 16-mixed


def test_a_skipped_step_changes_nothing_and_is_told(tmp_path, capsys):
    callback = FloatlineCallback(tmp_path / "run", diagnose=False)
    trainer, module = fit(FloatlinePrecision(CALM), tmp_path, rows(bad=[4]), callbacks=[callback])
    assert same(module.seen[4], module.seen[5])
    assert not same(module.seen[3], module.seen[4])
    assert trainer.global_step == advances(trainer) == 9
    history = fl.Ledger.read(tmp_path / "run")
    assert [place for place, applied in enumerate(history.applied) if not applied] == [4]
    assert history.reason[4] == "forward-nonfinite"
    assert history.batch == list(range(10))
    assert math.isnan(history.loss[4])
    assert history.scale == [1024.0] * 10  # a loss that is NaN says nothing about the scale
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["floatline/skipped"] == 1
    assert metrics["floatline/applied"] == 9
    assert metrics["floatline/scale"] == 1024
    assert metrics["floatline/grad_norm"] == pytest.approx(history.grad_norm[-1])
    assert "9 applied, 1 skipped (1 forward-nonfinite)" in callback.summary()
    assert history.header.metadata["steps"] == 10
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("floatline: ")]
    path = tmp_path / "run"
    start, *said = said
    assert start == f"floatline: {history.header.metadata['manifest']}"
    assert start.startswith("floatline: weights FP32") and "computes in FP16 under autocast" in start
    assert said == [f"floatline: 9 of 10 steps applied, 1 forward-nonfinite; floatline watch {path}"]


def test_plain_lightning_counts_the_skipped_step_advances_the_schedule_and_lowers_the_scale(tmp_path):
    plugin = lightnings_own()
    trainer, module = fit(plugin, tmp_path, rows(bad=[4]))
    assert same(module.seen[4], module.seen[5])
    assert trainer.global_step == advances(trainer) == 10
    assert plugin.scaler.get_scale() == 512.0


def test_max_steps_counts_applied_steps(tmp_path):
    trainer, module = fit(FloatlinePrecision(CALM), tmp_path, rows(bad=[2]), max_steps=8, max_epochs=-1)
    assert trainer.global_step == advances(trainer) == 8
    assert len(module.seen) == 9


def late(plugin, by):
    """As on a GPU, where the host reads what was decided some steps later."""
    add = plugin.steps.add

    def add_late(*args, **options):
        guard = add(*args, **options)
        guard._late = by
        return guard

    plugin.steps.add = add_late
    return plugin


def test_counts_and_schedules_are_right_where_the_host_learns_late(tmp_path):
    plugin = late(FloatlinePrecision(CALM), by=4)
    trainer, module = fit(plugin, tmp_path, rows(12, bad=[1, 5]), max_steps=9, max_epochs=-1)
    assert trainer.global_step == advances(trainer) == 9
    assert len(module.seen) == 11
    assert same(module.seen[1], module.seen[2])
    assert same(module.seen[5], module.seen[6])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_trainers_clipping_is_made_after_unscaling(tmp_path, algorithm):
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    pair = [
        fit(plugin, tmp_path, rows(), module=Module(kind=torch.optim.SGD), **options)[1]
        for plugin in (FloatlinePrecision(CALM), lightnings_own())
    ]
    for ours, theirs in zip(*map(weights, pair), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    _, free = fit(FloatlinePrecision(CALM), tmp_path, rows(), module=Module(kind=torch.optim.SGD))
    assert (weights(free)[0] - weights(pair[0])[0]).abs().max() > 1e-3


def test_a_fused_optimizer_can_be_clipped(tmp_path):
    _, ours = fit(FloatlinePrecision(CALM), tmp_path, rows(), module=Module(fused=True), gradient_clip_val=0.05)
    _, plain = fit(FloatlinePrecision(CALM), tmp_path, rows(), gradient_clip_val=0.05)
    for one, other in zip(weights(ours), weights(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(lightnings_own(), tmp_path, rows(), module=Module(fused=True), gradient_clip_val=0.05)


def test_the_trainers_accumulation_is_kept_to_the_last_short_window(tmp_path):
    callback = FloatlineCallback(tmp_path / "run", diagnose=False)
    options = {"accumulate_grad_batches": 4}
    _, ours = fit(FloatlinePrecision(CALM), tmp_path, rows(10), callbacks=[callback], **options)
    _, theirs = fit(lightnings_own(), tmp_path, rows(10), **options)
    for one, other in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    history = fl.Ledger.read(tmp_path / "run")
    assert history.micro_batches == [4, 4, 2]
    assert history.loss[0] == pytest.approx(_first_losses(4), rel=1e-2)


def _first_losses(num):
    module = Module()
    with torch.no_grad():
        losses = [F.mse_loss(module.net(x), y).item() for x, y in list(rows(num))]
    return sum(losses) / num


def test_a_plan_that_accumulates_wants_the_trainer_to(tmp_path):
    with pytest.raises(GuardError, match="accumulate_grad_batches=2"):
        fit(FloatlinePrecision("safe"), tmp_path, rows(2))


@pytest.mark.parametrize("plan", ["fp16-true", "bf16-true"])
def test_16_bit_weights_are_trained_as_fp32_ones_and_the_optimizer_is_exchanged(tmp_path, plan):
    trainer, module = fit(FloatlinePrecision(plan), tmp_path, rows(bad=[3]))
    assert {param.dtype for param in module.parameters()} == {torch.float16 if plan == "fp16-true" else torch.bfloat16}
    optimizer = trainer.optimizers[0]
    assert type(optimizer) is fl.optim.AdamW
    schedule = trainer.lr_scheduler_configs[0].scheduler
    assert schedule.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] < 0.02
    assert advances(trainer) == trainer.global_step < 10
    master = optimizer.master_state_dict(module)["net.0.weight"]
    assert not torch.equal(master, module.net[0].weight.float())
    assert master.isfinite().all()


def test_an_optimizer_that_has_no_counterpart_is_refused(tmp_path):
    with pytest.raises(OptimizerError, match="RMSprop has no counterpart"):
        fit(FloatlinePrecision("bf16-true"), tmp_path, rows(2), module=Module(kind=torch.optim.RMSprop))


def test_hooks_see_loss_and_gradients_unscaled(tmp_path):
    class Looks(Module):
        def on_before_backward(self, loss):
            found.append(loss.item())

        def on_before_optimizer_step(self, optimizer):
            found.append(max(param.grad.abs().max().item() for param in self.parameters()))

    ours, theirs, bare = [], [], []
    found = ours
    fit(FloatlinePrecision(CALM), tmp_path, rows(3), module=Looks())
    found = bare
    fit(FloatlinePrecision("fp16-true"), tmp_path, rows(3), module=Looks())
    found = theirs
    _, plain = fit(lightnings_own(), tmp_path, rows(3), module=Looks())
    assert max(ours) < 20
    assert max(value for value in bare if math.isfinite(value)) < 20
    assert max(theirs) > 1000  # the scaled loss
    assert ours[1::2] == theirs[1::2]
    _, unseen = fit(FloatlinePrecision(CALM), tmp_path, rows(3))
    assert same(weights(unseen), weights(plain))


def test_a_hook_that_clips_by_itself_is_heard(tmp_path):
    class Clips(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    pair = [
        fit(plugin, tmp_path, rows(4), module=Clips(kind=torch.optim.SGD))[1]
        for plugin in (FloatlinePrecision(CALM), lightnings_own())
    ]
    assert same(*map(weights, pair))


@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-true"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path, plan):
    data = rows(6, bad=[2])
    whole, straight = fit(FloatlinePrecision(plan), tmp_path, data, max_epochs=2)
    path = tmp_path / "half.ckpt"
    trainer, _ = fit(FloatlinePrecision(plan), tmp_path, data)
    trainer.save_checkpoint(path)  # the run is over, and its guards are closed
    resumed, module = fit(FloatlinePrecision(plan), tmp_path, data, max_epochs=2, ckpt_path=path)
    assert same(weights(straight), weights(module))
    assert resumed.global_step == whole.global_step
    assert advances(resumed) == advances(whole)


class Renamed(FloatlinePrecision):
    """A user's own subclass."""


class StartScale(lightning.Callback):
    def on_train_start(self, trainer, pl_module):
        self.scale = float(trainer.precision_plugin.steps.scale)


def saved_inside(plugin, folder, data=None):
    """A checkpoint as ModelCheckpoint writes it, while the run goes on."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(folder, filename="saved-{epoch}", every_n_epochs=1, save_top_k=-1)
    fit(plugin, folder, rows(6) if data is None else data, callbacks=[saver], enable_checkpointing=True)
    return folder / "saved-epoch=0.ckpt"


def test_the_scale_survives_a_change_of_plugin_in_every_direction(tmp_path):
    plan = Plan(name="high", weights="fp32", compute="fp16", scaling=Scaling(init_scale=2.0**23))
    ours = saved_inside(FloatlinePrecision(plan), tmp_path / "ours")
    theirs = saved_inside(lightnings_own(2.0**23), tmp_path / "theirs")
    found = torch.load(ours, weights_only=True)["MixedPrecision"]["scale"]
    assert 1024 < found < 2.0**20
    for path, plugin in ((ours, FloatlinePrecision(CALM)), (theirs, FloatlinePrecision(CALM)), (ours, Renamed(CALM))):
        start = StartScale()
        fit(plugin, tmp_path, rows(6), max_epochs=2, ckpt_path=path, callbacks=[start])
        assert start.scale == found
    back = lightnings_own()
    fit(back, tmp_path, rows(6), max_epochs=2, ckpt_path=ours, limit_train_batches=0)
    assert back.scaler.get_scale() == found


def test_a_checkpoint_counts_steps_that_the_host_has_not_heard_of_yet(tmp_path):
    path = saved_inside(late(FloatlinePrecision(CALM), by=4), tmp_path, rows(6, bad=[4]))
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 5
    progress = saved["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
    assert progress["optimizer"]["step"]["total"] == {"ready": 5, "completed": 5}


def test_a_run_may_go_on_in_another_precision(tmp_path):
    path = saved_inside(FloatlinePrecision("fp32"), tmp_path)
    start = StartScale()
    fit(FloatlinePrecision(CALM), tmp_path, rows(6), max_epochs=2, ckpt_path=path, callbacks=[start])
    assert start.scale == 1024.0  # that of an FP32 run, which is 1, would lose every small gradient


def test_plain_lightning_forgets_the_scale_where_the_class_has_another_name(tmp_path):
    class Other(MixedPrecision):
        pass

    path = saved_inside(lightnings_own(2.0**23), tmp_path)
    other = Other("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))
    fit(other, tmp_path, rows(6), max_epochs=2, ckpt_path=path)
    assert other.scaler.get_scale() == 2.0**10


def test_a_checkpoint_without_a_scale_is_told(tmp_path):
    path = saved_inside(FloatlinePrecision("fp32"), tmp_path)
    saved = torch.load(path, weights_only=True)
    del saved["FloatlinePrecision"]
    torch.save(saved, path)
    with pytest.warns(UserWarning, match="no loss scale: it starts at 1024"):
        fit(FloatlinePrecision(CALM), tmp_path, rows(6), max_epochs=2, ckpt_path=path)


class Adversaries(lightning.LightningModule):
    """Two optimizers, stepped by hand behind one backward pass."""

    def __init__(self, spoil=None, clip=None):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)
        self.spoil, self.clip = spoil, clip

    def training_step(self, batch, index):
        one, two = self.optimizers()
        x, y = batch
        loss = F.mse_loss(self.first(x).float(), y) + F.mse_loss(self.second(x).float(), y)
        one.zero_grad()
        two.zero_grad()
        self.manual_backward(loss)
        if index == self.spoil:
            self.first.weight.grad[0, 0] = math.inf
        if self.clip is not None:
            self.clip_gradients(two, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        one.step()
        two.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.first, self.second)]
        return optimizers, [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.1, total_iters=30) for one in optimizers]


def second_after(plugin, folder, num=4, **options):
    trainer, module = fit(plugin, folder, rows(num), module=Adversaries(**options))
    return trainer, module, [module.second.weight.detach().clone(), module.second.bias.detach().clone()]


def test_in_manual_optimization_one_optimizers_skip_leaves_the_other_alone(tmp_path):
    callback_folder = tmp_path / "run"
    plugin = FloatlinePrecision(CALM)
    trainer, module = fit(
        plugin, tmp_path, rows(4), module=Adversaries(spoil=2), callbacks=[FloatlineCallback(callback_folder)]
    )
    _, _, healthy = second_after(FloatlinePrecision(CALM), tmp_path)
    assert same([module.second.weight, module.second.bias], healthy)
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [3, 4]
    assert trainer.global_step == 7
    assert fl.Ledger.read(callback_folder).reason == [None, None, "overflow", None]
    assert fl.Ledger.read(callback_folder / "optimizer-1").reason == [None] * 4


def test_plain_lightning_unscales_the_other_by_a_scale_it_was_not_made_with(tmp_path):
    trainer, _, spoilt = second_after(lightnings_own(), tmp_path, spoil=2)
    _, _, healthy = second_after(lightnings_own(), tmp_path)
    assert not same(spoilt, healthy)
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [4, 4]


def test_manual_clipping_is_that_of_unscaled_gradients(tmp_path):
    _, _, ours = second_after(FloatlinePrecision(CALM), tmp_path, clip=1.0)
    _, _, wide = second_after(FloatlinePrecision("fp32"), tmp_path, clip=1.0)
    _, _, theirs = second_after(lightnings_own(), tmp_path, clip=1.0)
    for one, other, plain in zip(ours, wide, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)
        assert (plain - other).abs().max() > 0.02  # plain Lightning clips the scaled ones: hardly a step is left


def test_a_failed_step_is_diagnosed_in_the_ledger_and_its_replay_logs_nothing(tmp_path):
    class Breaks(Module):
        def training_step(self, batch, index):
            x = self.net(batch[0])
            if index == 5:
                x = x * 60000.0 * 60000.0
            loss = F.mse_loss(x.float(), batch[1])
            self.log("loss_seen", loss)
            return loss

    callback = FloatlineCallback(tmp_path / "run")
    trainer, _ = fit(FloatlinePrecision(CALM), tmp_path, rows(8), module=Breaks(), callbacks=[callback])
    assert trainer.global_step == 7
    (named,) = callback.diagnoser.named
    assert named.attempt == 6
    assert named.finding.cause.id == "product-overflow"
    assert named.finding.file.endswith("test_lightning.py")
    events = [event for event in fl.Ledger.read(tmp_path / "run").events if event.event == "diagnosis"]
    assert len(events) == 1


def test_a_damaged_weight_is_rolled_back(tmp_path):
    class Damaged(Module):
        def on_train_batch_start(self, batch, index):
            if index == 12:
                with torch.no_grad():
                    self.net[0].weight[0, 0] = math.nan

    policy = Policy(snapshot_gib=0.1, snapshot_every=2, rollback_reach=2)
    callback = FloatlineCallback(tmp_path / "run", policy=policy, diagnose=False)
    _, module = fit(FloatlinePrecision(CALM), tmp_path, rows(16), module=Damaged(), callbacks=[callback])
    assert all(weight.isfinite().all() for weight in weights(module))
    assert [event.event for event in fl.Ledger.read(tmp_path / "run").events] == ["rollback"]
    with pytest.raises(GuardStop, match="no snapshot to go back to"):
        fit(FloatlinePrecision(CALM), tmp_path, rows(16), module=Damaged())


def test_a_run_whose_every_step_fails_is_stopped_though_the_trainer_would_wait(tmp_path):
    policy = Policy(most_bad=5)
    callback = FloatlineCallback(tmp_path / "run", policy=policy, diagnose=False)
    with pytest.raises(GuardStop, match="5 steps in a row were skipped"):
        fit(FloatlinePrecision(CALM), tmp_path, rows(4, bad=range(4)), callbacks=[callback], max_steps=4, max_epochs=-1)
    assert fl.Ledger.read(tmp_path / "run").events[-1].event == "stop"
    assert FloatlinePrecision(CALM).steps.watching.resolve(CALM).most_bad == 200


def test_what_ends_a_run_is_in_the_ledger(tmp_path):
    class Fails(Module):
        def training_step(self, batch, index):
            if index == 3:
                raise ZeroDivisionError("by hand")
            return super().training_step(batch, index)

    with pytest.raises(ZeroDivisionError):
        fit(FloatlinePrecision(CALM), tmp_path, rows(), module=Fails(), callbacks=[FloatlineCallback(tmp_path / "run")])
    history = fl.Ledger.read(tmp_path / "run")
    assert len(history.applied) == 3
    assert "ZeroDivisionError: by hand" in history.events[-1].message


def test_norms_of_layers_and_lost_gradients_are_recorded(tmp_path):
    low = Plan(name="low", weights="fp32", compute="fp16", scaling=Scaling(init_scale=1.0))

    class Faint(Module):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * 1e-5

    policy = Policy(underflow_every=2, outlier_score=math.inf)
    callback = FloatlineCallback(tmp_path / "run", policy=policy, layers_every=3, diagnose=False)
    logger = CSVLogger(tmp_path)
    options = {"callbacks": [callback], "logger": logger, "log_every_n_steps": 3}
    trainer, _ = fit(FloatlinePrecision(low), tmp_path, rows(6), module=Faint(), **options)
    history = fl.Ledger.read(tmp_path / "run")
    recorded = [norms for norms in history.layer_norms if norms is not None]
    assert [sorted(norms) for norms in recorded] == [["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]] * 2
    assert history.grad_norm[2] == pytest.approx(math.hypot(*recorded[0].values()), rel=1e-5)
    metrics = trainer.callback_metrics
    assert metrics["floatline/lost_share"] > 0.01
    assert metrics["floatline/headroom"] > 0
    assert not any("layer_norm" in name for name in metrics)  # hundreds of names are for loggers, not for a dict
    logged = (Path(logger.log_dir) / "metrics.csv").read_text("utf-8").splitlines()[0].split(",")
    wanted = {"floatline/layer_norm/net.0.weight", "floatline/lost_share/net.0.weight", "floatline/skipped"}
    assert wanted <= set(logged)


def test_the_callback_wants_the_plugin_and_a_folder_of_its_own(tmp_path):
    with pytest.raises(GuardError, match="FloatlineCallback is used with MixedPrecision"):
        fit(lightnings_own(), tmp_path, rows(2), callbacks=[FloatlineCallback(tmp_path / "run")])
    fit(FloatlinePrecision(CALM), tmp_path, rows(2), callbacks=[FloatlineCallback(tmp_path / "run")])
    with pytest.raises(LedgerError, match="already holds a ledger"):
        fit(FloatlinePrecision(CALM), tmp_path, rows(2), callbacks=[FloatlineCallback(tmp_path / "run")])
    for name in ("floatline", "floatline-2"):
        callback = FloatlineCallback()
        fit(FloatlinePrecision(CALM), tmp_path, rows(2), callbacks=[callback])
        assert callback.folder == tmp_path / name


def test_a_second_fit_goes_on_with_the_ledger(tmp_path):
    callback = FloatlineCallback(tmp_path / "run", diagnose=False)
    trainer, module = fit(FloatlinePrecision(CALM), tmp_path, rows(3), callbacks=[callback])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rows(3))
    assert len(fl.Ledger.read(tmp_path / "run").applied) == 6


def test_evaluation_computes_in_the_precision_and_leaves_nothing_behind(tmp_path):
    found = []

    class Evaluated(Module):
        def validation_step(self, batch, _):
            found.append(self.net(batch[0]).dtype)

    before = _registration._num_users, torch.get_default_dtype()
    for plan in ("fp16-mixed", "fp16-true"):
        make_trainer(FloatlinePrecision(plan), tmp_path).validate(Evaluated(), rows(1), verbose=False)
    assert found == [torch.float16] * 2
    assert before == (_registration._num_users, torch.get_default_dtype())


def test_a_training_step_that_gives_no_loss_makes_no_step(tmp_path):
    class Picky(Module):
        def training_step(self, batch, index):
            return None if index == 1 else super().training_step(batch, index)

    callback = FloatlineCallback(tmp_path / "run")
    fit(FloatlinePrecision(CALM), tmp_path, rows(4), module=Picky(), callbacks=[callback])
    assert callback.accounts[0].run.applied == 3


def test_a_module_without_an_optimizer_is_run_as_it_is(tmp_path):
    class Still(Module):
        def configure_optimizers(self):
            return None

    _, module = fit(FloatlinePrecision(CALM), tmp_path, rows(2), module=Still())
    assert same(module.seen[0], weights(module))


def test_the_names_are_there_without_importing_lightning():
    code = (
        "import sys, floatline.integrations.lightning as own\n"
        "assert 'FloatlinePrecision' in own.__all__\n"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules\n"
        "sys.modules['lightning'] = None\n"
        "try:\n    own.FloatlinePrecision\nexcept ImportError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "pip install 'floatline[lightning]'" in run.stdout


def test_the_same_works_by_the_name_of_pytorch_lightning(tmp_path):
    package = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    from floatline.integrations import pytorch_lightning as own

    class Other(package.LightningModule):
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

        def __init__(self):
            super().__init__()
            twin = Module()
            self.net, self.seen = twin.net, []
            self.fused, self.kind, self.interval = twin.fused, twin.kind, twin.interval

    callback = own.FloatlineCallback(tmp_path / "run", diagnose=False)
    trainer = make_trainer(own.FloatlinePrecision(CALM), tmp_path, callbacks=[callback], package=package)
    module = Other()
    trainer.fit(module, rows(4, bad=[1]))
    assert trainer.global_step == advances(trainer) == 3
    _, ours = fit(FloatlinePrecision(CALM), tmp_path, rows(4, bad=[1]))
    assert same(weights(module), weights(ours))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-true"])
def test_on_a_gpu_steps_wait_for_nothing_and_counts_are_right(tmp_path, plan):
    class Counts(lightning.Callback):
        def on_before_zero_grad(self, trainer, *_):
            torch.cuda.set_sync_debug_mode("warn" if trainer.global_step > 20 else "default")

        def on_train_batch_end(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    callback = FloatlineCallback(tmp_path / "run", diagnose=False)
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, plugins=[FloatlinePrecision(plan)], callbacks=[callback, Counts()],
        max_steps=40, max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, gradient_clip_val=1.0,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(fused=plan == "fp16-mixed"), rows(60, bad=[3]))
    assert not [w for w in caught if "called a synchronizing CUDA operation" in str(w.message)]
    assert trainer.global_step == advances(trainer) == 40
    assert callback.accounts[0].run.applied == 40
    assert callback.accounts[0].run.skipped["forward-nonfinite"] == 1
