"""A guard in transformers' Trainer: real runs on a CPU, each beside what the Trainer does by itself."""

import math

import pytest
import torch
from tests.slow import slow

import floatline as fl
from floatline.diagnosis import Diagnoser

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.integrations.tiny_trainers import (
    as_logged,
    losses,
    make_arguments,
    make_llama,
    make_regression,
    make_rows,
    make_texts,
    make_trainer,
    weights,
)
from transformers import Trainer, TrainerCallback

from floatline.integrations.transformers import FloatlineCallback, prepare_trainer


def test_fp16_on_a_cpu_is_fp16(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    prepare_trainer(trainer)
    trainer.train()
    assert set(trainer.model.dtypes) == {torch.float16}


def test_the_trainer_by_itself_computes_in_fp32_there(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    assert set(trainer.model.dtypes) == {torch.float32}


def test_a_bad_batch_is_skipped_logged_as_nan_once_and_the_schedule_waits(tmp_path, capsys):
    trainer = make_trainer(tmp_path, rows=make_rows(bad=[2, 3]), lr_scheduler_type="linear")
    callback = prepare_trainer(trainer)
    trainer.train()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("floatline: ")]
    assert said[0].startswith("floatline: weights FP32; AdamW; computes in FP16")
    seen = losses(trainer)
    assert [math.isnan(loss) for loss in seen] == [False, False, True, True, False, False, False, False]
    assert weights(trainer.model).isfinite().all()
    assert trainer.lr_scheduler.last_epoch == 6
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[2] == rates[3] == rates[4] == pytest.approx(0.0075)
    history = fl.Ledger.read(tmp_path)
    assert history.reason == [None, None, "forward-nonfinite", "forward-nonfinite", None, None, None, None]
    assert callback.summary().startswith("8 attempted, 6 applied, 2 skipped (2 forward-nonfinite)")


def test_the_trainer_by_itself_breaks_the_weights_and_logs_a_loss_that_looks_fine(tmp_path):
    trainer = make_trainer(tmp_path, rows=make_rows(bad=[2, 3]), lr_scheduler_type="linear")
    trainer.train()
    assert weights(trainer.model).isnan().any()
    assert all(map(math.isfinite, losses(trainer)))
    assert trainer.lr_scheduler.last_epoch == 8


def test_without_the_zeroing_of_the_sum_one_nan_would_be_logged_for_ever(tmp_path):
    trainer = make_trainer(tmp_path, rows=make_rows(bad=[2]), logging_nan_inf_filter=False, fp16=False)
    trainer.accelerator.backward = lambda loss: None  # the weights stay as they are
    trainer.train()
    assert [math.isnan(loss) for loss in losses(trainer)] == [False] * 2 + [True] * 6


def test_overflows_search_the_scale_and_are_counted_in_the_log(tmp_path):
    model = make_regression()
    model.last.weight.data *= 50  # scaled by 65,536 its gradients leave FP16
    trainer = make_trainer(tmp_path, model=model, max_grad_norm=0.0)
    prepare_trainer(trainer)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    skipped = [entry["floatline/skipped"] for entry in log]
    assert skipped[0] == 1.0
    assert skipped[-1] == sum(reason == "overflow" for reason in fl.Ledger.read(tmp_path).reason)
    assert [entry["floatline/scale"] for entry in log] == fl.Ledger.read(tmp_path).scale
    assert log[0]["floatline/scale"] == 65536.0 > log[-1]["floatline/scale"]
    assert math.isfinite(log[-1]["floatline/grad_norm"])
    if hasattr(trainer, "_get_grad_norm"):  # older ones log a norm only where they clip
        assert log[-1]["grad_norm"] == pytest.approx(log[-1]["floatline/grad_norm"])
    else:
        assert "grad_norm" not in log[-1]


@slow
def test_in_fp32_a_guarded_run_is_the_trainers_own(tmp_path):
    found = []
    for guarded in (True, False):
        options = {"fp16": False, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 4}
        trainer = make_trainer(tmp_path / str(guarded), **options)
        if guarded:
            prepare_trainer(trainer)
        trainer.train()
        found.append((weights(trainer.model), losses(trainer), trainer.state.log_history[3]["grad_norm"]))
    (ours, own_losses, own_norm), (theirs, their_losses, their_norm) = found
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)  # clipped by one factor in the step, or before it
    assert own_losses == pytest.approx(their_losses, rel=1e-6)
    assert own_norm == pytest.approx(their_norm, rel=1e-5)
    history = fl.Ledger.read(tmp_path / "True")
    assert history.micro_batches == [2] * 4
    assert as_logged(history.loss, trainer) == pytest.approx(own_losses, rel=1e-6)


@slow
@pytest.mark.parametrize("logging_steps", [3, 100])  # logging reads everything that is outstanding
def test_a_gpu_that_runs_ahead_leaves_out_as_many_advances_as_there_were_skips(tmp_path, logging_steps):
    rows = make_rows(12, bad=[2, 3])
    trainer = make_trainer(tmp_path, rows=rows, max_steps=12, logging_steps=logging_steps)
    callback = prepare_trainer(trainer)
    begin = callback.on_train_begin

    def run_ahead(*args, **kwargs):
        callback.guard._late = 4  # what a CUDA device has
        begin(*args, **kwargs)

    callback.on_train_begin = run_ahead
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == 10


@slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_trained_exactly(tmp_path, dtype):
    options = {"fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16, "gradient_checkpointing": True}
    arguments = make_arguments(tmp_path, max_steps=4, per_device_train_batch_size=4, **options)
    trainer = Trainer(make_llama(dtype), arguments, train_dataset=make_texts())
    callback = prepare_trainer(trainer)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, fl.optim.AdamW)
    assert {param.dtype for param in trainer.model.parameters()} == {dtype}
    assert callback.guard.plan.name == ("fp16-true" if dtype == torch.float16 else "bf16-true")
    assert trainer.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert weights(trainer.model).isfinite().all()
    master = trainer.optimizer.optimizer.master_state_dict(trainer.model)
    assert any((value != value.to(dtype).float()).any() for value in master.values() if value.is_floating_point())
    assert losses(trainer)[-1] < 4.3


def test_by_itself_adamw_turns_fp16_weights_into_nan_and_the_log_says_zero(tmp_path):
    arguments = make_arguments(tmp_path, max_steps=6, per_device_train_batch_size=4)
    trainer = Trainer(make_llama(torch.float16), arguments, train_dataset=make_texts())
    with fl.HalfOnCPU():
        trainer.train()
    assert weights(trainer.model).isnan().any()
    assert losses(trainer)[-1] == 0.0


def test_a_plan_by_name_casts_the_weights_and_not_the_frequencies(tmp_path):
    arguments = make_arguments(tmp_path, max_steps=2, per_device_train_batch_size=4, fp16=False)
    trainer = Trainer(make_llama(), arguments, train_dataset=make_texts())
    prepare_trainer(trainer, "fp16-true")
    trainer.train()
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float16}
    assert trainer.model.model.rotary_emb.inv_freq.dtype == torch.float32


def run_in_two_parts(folder, rows, *, forget=None):
    for stop, resume in ((4, None), (8, True)):
        if resume and forget:
            (folder / "checkpoint-4" / forget).unlink()
        options = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant"}
        trainer = make_trainer(folder, rows=rows, max_steps=stop, **options)
        callback = prepare_trainer(trainer, "fp16-true")
        trainer.train(resume_from_checkpoint=resume)
    return trainer, callback


@slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    rows = make_rows(8, bad=[2])
    whole = make_trainer(tmp_path / "whole", rows=rows, max_steps=8, lr_scheduler_type="constant")
    prepare_trainer(whole, "fp16-true")
    whole.train()
    parts, callback = run_in_two_parts(tmp_path / "parts", rows)
    assert torch.equal(weights(parts.model), weights(whole.model))
    assert callback.guard.attempts == 8
    assert callback.summary().startswith("8 attempted, 7 applied, 1 skipped (1 forward-nonfinite)")
    history = fl.Ledger.read(tmp_path / "parts")
    assert history.loss[4:] == fl.Ledger.read(tmp_path / "whole").loss[4:]
    assert history.epoch == [0] * 8
    assert any("resumed at step 4" in event.message for event in history.events)


@slow
def test_without_the_optimizers_part_of_the_checkpoint_other_bits_come_out(tmp_path):
    rows = make_rows(8, bad=[2])
    parts, _ = run_in_two_parts(tmp_path / "parts", rows)
    forgetful, _ = run_in_two_parts(tmp_path / "forgetful", rows, forget="optimizer.pt")
    assert not torch.equal(weights(parts.model), weights(forgetful.model))


@slow
def test_checkpoints_and_torchs_scaler_read_each_other(tmp_path):
    model = make_regression()
    model.last.weight.data *= 50
    trainer = make_trainer(tmp_path, model=model, max_steps=4, save_strategy="steps", save_steps=4)
    prepare_trainer(trainer)
    trainer.train()
    saved = torch.load(tmp_path / "checkpoint-4" / "scaler.pt", weights_only=True)
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(saved)
    assert torchs.get_scale() == trainer.accelerator.scaler.get_scale() < 65536.0

    torch.save({**torchs.state_dict(), "scale": 128.0}, tmp_path / "checkpoint-4" / "scaler.pt")
    again = make_trainer(tmp_path, model=make_regression(), max_steps=6)
    callback = prepare_trainer(again)
    again.train(resume_from_checkpoint=True)
    assert callback.guard.scale == 128.0


def test_a_run_that_only_fails_is_stopped_with_its_reason_on_the_disk(tmp_path):
    trainer = make_trainer(tmp_path, rows=make_rows(bad=range(8)))
    prepare_trainer(trainer, policy=fl.Policy(most_bad=5))
    with pytest.raises(fl.GuardStop, match="5 steps in a row were skipped"):
        trainer.train()
    assert fl.Ledger.read(tmp_path).events[-1].event == "stop"


@slow
def test_a_failed_step_is_diagnosed_in_place(tmp_path):
    class Steep(make_regression().__class__):
        def forward(self, x, labels):
            out = super().forward(x, labels)["logits"]
            share = torch.softmax(40 * out, -1).half()
            return {"loss": -torch.log(share).float().mean(), "logits": out}

    torch.manual_seed(0)
    trainer = make_trainer(tmp_path, model=Steep())
    callback = prepare_trainer(trainer, on_failure=Diagnoser(budget=250.0))
    trainer.train()
    assert "rounded-onto-singularity" in callback.summary()


def test_evaluation_computes_as_training_does_and_is_in_the_ledger(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, eval_rows=make_rows(2))
    callback = prepare_trainer(trainer)
    trainer.evaluate()
    assert set(trainer.model.dtypes) == {torch.float16}
    trainer.train()
    assert trainer.predict(make_rows(2)).predictions.dtype == "float32"
    assert set(trainer.model.dtypes) == {torch.float16}
    evaluations = [event for event in fl.Ledger.read(tmp_path).events if event.event == "evaluation"]
    assert len(evaluations) == 2
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [event.values["eval_loss"] for event in evaluations] == logged[:2]
    assert callback.guard.attempts == 2


@slow
def test_a_second_run_puts_the_ledger_of_the_first_aside(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    callback = prepare_trainer(trainer)
    trainer.train()
    trainer.train()
    assert len(fl.Ledger.read(tmp_path).loss) == 2
    (aside,) = tmp_path.glob("earlier-ledger-*")
    assert len(fl.Ledger.read(aside).loss) == 2
    assert callback.guard.attempts == 2


def test_the_class_of_the_trainer_stays(tmp_path):
    trainer = make_trainer(tmp_path)
    prepare_trainer(trainer)
    assert isinstance(trainer, Trainer)
    assert type(trainer).__name__ == "InOrder"
    assert trainer.args.logging_nan_inf_filter is False
    with pytest.raises(fl.FloatlineError, match="guarded already"):
        prepare_trainer(trainer)


def test_checkpointing_finds_gradients_behind_frozen_weights(tmp_path):
    model = make_llama()
    model.model.embed_tokens.requires_grad_(False)
    arguments = make_arguments(tmp_path, gradient_checkpointing=True, max_steps=1)
    trainer = Trainer(model, arguments, train_dataset=make_texts())
    prepare_trainer(trainer)
    first = model.model.layers[0].mlp.up_proj.weight
    before = first.detach().clone()
    trainer.train()
    assert not torch.equal(first, before)  # transformers 4 by itself trains the head alone, with a warning


def test_another_kind_of_checkpointing_can_be_asked_for(tmp_path):
    trainer = make_trainer(tmp_path, gradient_checkpointing_kwargs={"use_reentrant": True})
    prepare_trainer(trainer)
    assert trainer.args.gradient_checkpointing_kwargs == {"use_reentrant": True}


def test_the_callback_alone_says_what_is_missing(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.add_callback(FloatlineCallback())
    with pytest.raises(fl.FloatlineError, match=r"Call prepare_trainer\(trainer\)"):
        trainer.train()


def test_a_model_wrapped_out_of_sight_is_refused_in_one_line(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    prepare_trainer(trainer)
    trainer._wrap_model = lambda model, *_: torch.nn.DataParallel(model)  # what it does with several GPUs
    with pytest.raises(fl.FloatlineError, match="as with DataParallel on several GPUs. Use torchrun"):
        trainer.train()


class Damage(TrainerCallback):
    """Writes a NaN into a weight, as a bit that flips may."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 8:
            model.first.weight.data[0, 0] = math.nan


@slow
@pytest.mark.parametrize("policy", [fl.Policy(snapshot_gib=1.0, snapshot_every=2, rollback_reach=1), None])
def test_damaged_weights_go_back_where_the_policy_keeps_snapshots_and_end_the_run_where_not(tmp_path, policy):
    trainer = make_trainer(tmp_path, rows=make_rows(12), max_steps=12)
    trainer.add_callback(Damage())
    prepare_trainer(trainer, policy=policy)
    if policy is None:
        with pytest.raises(fl.GuardStop, match="The weights are non-finite"):
            trainer.train()
        return
    trainer.train()
    assert weights(trainer.model).isfinite().all()
    history = fl.Ledger.read(tmp_path)
    assert [event.event for event in history.events] == ["diagnosis", "rollback"]
    assert history.reason == [None] * 8 + ["forward-nonfinite"] + [None] * 3
