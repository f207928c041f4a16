"""LossScaler in real Lightning, Accelerate and HF Trainer runs; each is skipped where it is not installed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import floatline as fl


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))


def make_data(num=6):
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(num)]
    rows[2][0][0, 0] = math.inf
    return rows


def assert_one_step_was_left_out(scaler, model, before):
    assert scaler.get_scale() == 2.0**15  # one step overflowed, the others were applied
    assert all(param.isfinite().all() for param in model.parameters())
    assert not torch.equal(before, next(model.parameters()))


def fit_with_lightning(scaler, folder):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, _):
            return F.mse_loss(self.model(batch[0]).float(), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=folder,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )  # fmt: skip
    with fl.HalfOnCPU():
        trainer.fit(module, torch.utils.data.DataLoader(make_data(), batch_size=None))
    return [param.detach().clone() for param in module.parameters()]


def test_lightning_trains_with_it_as_with_torchs(tmp_path):
    scaler, torchs = fl.LossScaler("cpu"), torch.amp.GradScaler("cpu")
    ours, theirs = (fit_with_lightning(own, tmp_path) for own in (scaler, torchs))
    assert all(map(torch.equal, ours, theirs))
    assert scaler.get_scale() == torchs.get_scale() < 2.0**16
    assert all(weight.isfinite().all() for weight in ours)
    assert not torch.equal(ours[0], next(make_model().parameters()))


def test_accelerate_trains_with_it():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()  # a Trainer that failed in another test leaves its data loader there
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.native_amp = True
    accelerator.scaler = scaler = fl.LossScaler("cpu")
    model, optimizer = make_model(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = next(model.parameters()).detach().clone()
    model, optimizer = accelerator.prepare(model, optimizer)
    skipped = []
    with fl.HalfOnCPU():
        for x, y in make_data():
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    assert skipped == [False, False, True, False, False, False]
    assert_one_step_was_left_out(scaler, model, before)


def test_hf_trainer_trains_with_it(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    scaler = fl.LossScaler("cpu")

    class Trainer(transformers.Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.native_amp = True
            self.accelerator.scaler = scaler

        def compute_loss(self, model, inputs, **_):
            with torch.autocast("cpu", dtype=torch.float16):
                return F.mse_loss(model(inputs["x"]).float(), inputs["y"])

    model = make_model()
    before = next(model.parameters()).detach().clone()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=1, max_steps=6, use_cpu=True, report_to=[],
        save_strategy="no", remove_unused_columns=False, optim="adamw_torch", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"x": x, "y": y} for x, y in make_data()]
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=lambda items: items[0])
    with fl.HalfOnCPU():
        trainer.train()
    assert_one_step_was_left_out(scaler, model, before)
