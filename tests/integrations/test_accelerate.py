"""A guard in Accelerate loops: real runs on a CPU, each beside what Accelerate does by itself."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from floatline.integrations.accelerate import prepare_accelerator  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_state():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()  # a Trainer that failed in another test leaves its data loader there
    yield
    AcceleratorState._reset_state(True)
    torch.set_num_threads(threads)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)).to(dtype)


def make_rows(num=6, *, bad=()):
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(num)]
    for number in bad:
        rows[number][0][0, 0] = math.nan
    return rows


def loss_of(model, row):
    return 0.1 * F.mse_loss(model(row[0]).float(), row[1])


def weights(model):
    return torch.cat([param.detach().float().reshape(-1) for param in model.parameters()])


class Loop:
    """The loop that Accelerate's documentation shows."""

    def __init__(self, plan="fp16-mixed", *, guarded=True, make=torch.optim.AdamW, dtype=torch.float32, parts=1, **own):
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision="fp16" if plan == "fp16-mixed" else "no", gradient_accumulation_steps=parts
        )
        self.guarding = prepare_accelerator(self.accelerator, plan, **own) if guarded else None
        model = make_model(dtype)
        options = {"fused": True} if make is torch.optim.AdamW else {}
        optimizer = make(model.parameters(), lr=1e-2, **options)
        rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 10)
        self.model, self.optimizer, self.rates = self.accelerator.prepare(model, optimizer, rates)
        self.skipped, self.norms = [], []

    def run(self, rows, *, clip=1.0):
        for row in rows:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, row))
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.rates.step()
                self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.norms.append(float(norm))
                    self.skipped.append(self.optimizer.step_was_skipped)
        if self.guarding is not None:
            self.accelerator.end_training()
        return self


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, fl.optim.AdamW])
def test_a_skip_is_told_whatever_the_optimizer_and_the_schedule_stands_still(make):
    loop = Loop(make=make).run(make_rows(bad=[2]))
    assert loop.skipped == [False, False, True, False, False, False]
    assert loop.rates.scheduler.last_epoch == 5
    assert weights(loop.model).isfinite().all()
    assert isinstance(loop.accelerator.scaler, fl.LossScaler)
    assert loop.accelerator.scaler.get_scale() == 65536.0  # a loss that is not finite says nothing about the scale


@pytest.mark.parametrize("guarded", [True, False])
def test_what_it_computes_in_is_told_when_it_begins(guarded, capsys):
    Loop(guarded=guarded).run(make_rows(1))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("floatline: weights")]
    assert said == ["floatline: weights FP32; AdamW; computes in FP16 under autocast"] * guarded


def test_accelerate_by_itself_tells_of_no_skip_with_torchs_scaler_and_a_fused_optimizer():
    loop = Loop(guarded=False)
    loop.accelerator.native_amp = True  # as on a GPU
    loop.optimizer.scaler = loop.accelerator.scaler = torch.amp.GradScaler("cpu")
    loop.optimizer.__init__(loop.optimizer.optimizer, scaler=loop.accelerator.scaler)
    loop.run(make_rows(bad=[2]))
    assert loop.skipped == [False] * 6
    assert loop.rates.scheduler.last_epoch == 6
    assert loop.accelerator.scaler.get_scale() < 65536.0  # there was one


def test_fp16_on_a_cpu_is_fp16_and_the_plain_accelerator_computes_in_fp32():
    found = {}
    for guarded in (True, False):
        AcceleratorState._reset_state(True)
        loop = Loop(guarded=guarded)
        dtypes = found.setdefault(guarded, set())
        inner = loop.accelerator.unwrap_model(loop.model)
        inner[0].register_forward_hook(lambda _module, _args, out, dtypes=dtypes: dtypes.add(out.dtype))
        loop.run(make_rows(2))
    assert found == {True: {torch.float16}, False: {torch.float32}}


def test_in_fp32_a_guarded_loop_is_the_plain_one():
    found = []
    for guarded in (True, False):
        AcceleratorState._reset_state(True)
        loop = Loop("fp32", guarded=guarded, parts=2).run(make_rows(), clip=0.05)
        found.append((weights(loop.model), loop.norms))
    assert torch.allclose(found[0][0], found[1][0], rtol=0, atol=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert found[0][1][0] > 0.05  # it was clipped


def test_micro_batches_are_one_step_in_the_ledger(tmp_path):
    Loop(parts=3, folder=tmp_path).run(make_rows())
    history = fl.Ledger.read(tmp_path)
    assert history.micro_batches == [3, 3]
    torch.manual_seed(0)
    model = make_model()
    expected = torch.stack([loss_of(model, row) for row in make_rows()[:3]]).mean().detach()
    assert history.loss[0] == pytest.approx(float(expected), rel=1e-3)  # FP16
    assert history.ended


def test_fp16_weights_are_trained_exactly_and_inputs_are_cast():
    loop = Loop("fp16-true", make=fl.optim.AdamW).run(make_rows(bad=[2]))
    assert {param.dtype for param in loop.model.parameters()} == {torch.float16}
    assert loop.skipped == [False, False, True, False, False, False]
    master = loop.optimizer.optimizer.master_state_dict(loop.model)
    assert any((value != value.half().float()).any() for value in master.values())


def test_an_optimizer_that_would_lose_fp16_updates_is_refused_in_one_line():
    with pytest.raises(fl.FloatlineError, match=r"AdamW would train FP16 weights.*Use floatline\.optim"):
        Loop("fp16-true", make=torch.optim.AdamW)


def test_gradients_can_be_unscaled_for_someone_who_looks_at_them():
    loop = Loop(make=fl.optim.AdamW)
    loop.accelerator.backward(loss_of(loop.model, make_rows()[0]))
    scaled = loop.model[0].weight.grad.clone()
    loop.accelerator.unscale_gradients()
    assert torch.equal(loop.model[0].weight.grad, scaled / 65536)
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.optimizer.step()
    outcome = loop.accelerator.scaler.outcome_of(loop.optimizer.optimizer)
    assert outcome.applied
    assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert outcome.loss == pytest.approx(loss_of(make_model(), make_rows()[0]).item(), rel=1e-3)
    loop.accelerator.end_training()


@pytest.mark.parametrize("by_hand", [True, False])
def test_clipping_by_value_does_not_hide_an_overflow(by_hand):
    loop = Loop()
    loop.accelerator.backward(loss_of(loop.model, make_rows()[0]))
    loop.model[0].weight.grad[0, 0] = math.inf
    if by_hand:
        loop.accelerator.unscale_gradients()
        nn.utils.clip_grad_value_(loop.model.parameters(), 0.1)
        assert all(param.grad.isfinite().all() for param in loop.model.parameters())
    else:
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 0.1)
    loop.optimizer.step()
    assert loop.optimizer.step_was_skipped
    assert loop.accelerator.scaler.get_scale() == 32768.0
    loop.accelerator.end_training()


def test_a_part_of_the_parameters_is_clipped_as_accelerate_does():
    loop = Loop(make=torch.optim.SGD)
    loop.accelerator.backward(loss_of(loop.model, make_rows()[0]))
    norm = loop.accelerator.clip_grad_norm_(loop.model[0].parameters(), 1e-3)
    assert math.isfinite(float(norm))  # known at once
    own = torch.cat([param.grad.reshape(-1) for param in loop.model[0].parameters()])
    assert float(own.norm()) == pytest.approx(1e-3, rel=1e-3)
    loop.optimizer.step()
    assert not loop.optimizer.step_was_skipped
    loop.accelerator.end_training()


def test_two_optimizers_share_a_scale_and_have_a_ledger_each(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    prepare_accelerator(accelerator, "fp16-mixed", folder=tmp_path)
    maker, critic = make_model(), nn.Linear(2, 1)
    first = torch.optim.SGD(maker.parameters(), lr=1e-2)
    second = torch.optim.SGD(critic.parameters(), lr=1e-2)
    maker, critic, first, second = accelerator.prepare(maker, critic, first, second)
    for x, _ in make_rows(3, bad=[1]):
        loss = 0.1 * critic(maker(x)).float().square().mean()
        accelerator.backward(loss)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    accelerator.end_training()
    for folder in (tmp_path, tmp_path / "optimizer-1"):
        assert fl.Ledger.read(folder).reason == [None, "forward-nonfinite", None]
    assert weights(maker).isfinite().all()
    assert weights(critic).isfinite().all()


def test_saved_state_goes_on_with_the_same_bits(tmp_path):
    rows = make_rows(8, bad=[2])
    whole = Loop(make=fl.optim.AdamW)
    whole.accelerator.scaler.update(1024.0)
    whole.run(rows)
    AcceleratorState._reset_state(True)
    half = Loop(make=fl.optim.AdamW)
    half.accelerator.scaler.update(1024.0)
    for row in rows[:4]:
        half.accelerator.backward(loss_of(half.model, row))
        half.accelerator.clip_grad_norm_(half.model.parameters(), 1.0)
        half.optimizer.step()
        half.rates.step()
        half.optimizer.zero_grad()
    half.accelerator.save_state(str(tmp_path))
    half.accelerator.end_training()
    AcceleratorState._reset_state(True)
    again = Loop(make=fl.optim.AdamW)
    again.accelerator.load_state(str(tmp_path))
    assert again.accelerator.scaler.get_scale() == 1024.0
    again.run(rows[4:])
    assert torch.equal(weights(again.model), weights(whole.model))
    assert again.guarding.summary().startswith("8 attempted, 7 applied, 1 skipped")
    assert again.rates.scheduler.last_epoch == 7


def test_what_cannot_be_guarded_is_refused_in_one_line():
    loop = Loop(guarded=False)
    with pytest.raises(fl.FloatlineError, match=r"Call this before accelerator\.prepare"):
        prepare_accelerator(loop.accelerator)
    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    prepare_accelerator(accelerator)
    with pytest.raises(fl.FloatlineError, match="Prepare first"):
        accelerator.backward(torch.ones((), requires_grad=True))
