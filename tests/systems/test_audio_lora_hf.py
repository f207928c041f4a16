"""audio_lora in transformers' Trainer: the team's error, the guarded run, and adapters that plain PEFT reads."""

import json
import subprocess
import sys

import pytest
import torch
from tests.slow import slow

import floatline as fl

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("espeakng_loader", reason="espeakng_loader is not installed")

from floatline.integrations.transformers import prepare_trainer  # noqa: E402
from floatline.systems.audio_lora import VARIANTS, Config  # noqa: E402
from floatline.systems.audio_lora.__main__ import main  # noqa: E402
from floatline.systems.audio_lora.hf import make_trainer  # noqa: E402

SMALL = {"batch_size": 8, "num_batches": 4}


class AsOnAGPU(transformers.Trainer):
    """The scaler that `fp16=True` gives the Trainer on a GPU; the model computes in FP16 by itself."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


@slow
def test_the_teams_script_raises_and_one_line_more_trains_it(tmp_path):
    config = Config(**VARIANTS["broken"], **SMALL)
    trainer = make_trainer(config, tmp_path / "broken", max_steps=1, kind=AsOnAGPU)
    with fl.HalfOnCPU(), pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        trainer.train()
    trainer = make_trainer(config, tmp_path / "guarded", max_steps=2)
    guard = prepare_trainer(trainer)
    trainer.train()
    assert guard.guard.plan.name == "fp16-true"
    assert isinstance(trainer.optimizer.optimizer, fl.optim.AdamW)
    assert fl.Ledger.read(tmp_path / "guarded").applied[-1]  # the first step may search the scale: the loss is FP16


@slow
def test_the_trainer_alone_writes_a_loss_of_0_where_half_adapters_made_it_nan(tmp_path):
    config = Config(**VARIANTS["no_scaler_unfused"], **SMALL)
    trainer = make_trainer(config, tmp_path, max_steps=3)
    trainer.args.logging_steps = trainer.state.logging_steps = 1
    with fl.HalfOnCPU():
        trainer.train()
    first, *others = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert first > 1 and others == [0.0, 0.0]
    assert not all(bool(p.isfinite().all()) for p in trainer.model.parameters() if p.requires_grad)


# What a colleague without floatline does with the folders.
RELOAD = """
import sys, torch
from peft import PeftModel
from transformers import Qwen2AudioForConditionalGeneration

def load(folder):
    base = Qwen2AudioForConditionalGeneration.from_pretrained(folder + "/base", dtype=torch.float16)
    return PeftModel.from_pretrained(base, folder).eval()

for folder in sys.argv[1:]:
    batch, merged = torch.load(folder + "/batch.pt"), load(folder).merge_and_unload().half()
    found = {"finite": all(w.dtype == torch.float16 and bool(w.isfinite().all()) for w in merged.parameters())}
    with torch.no_grad():
        found |= {"logits": load(folder).float()(**batch).logits, "merged": merged.float()(**batch).logits}
    torch.save(found, folder + "/found.pt")
assert "floatline" not in sys.modules
"""


@slow
def test_saved_adapters_are_plain_pefts_and_merge_into_finite_fp16(tmp_path):
    wanted = {}
    for variant, plan in (("fp32_adapters", "fp16-mixed"), ("native_fp16", "fp16-true")):
        folder = tmp_path / variant
        trainer = make_trainer(Config(**VARIANTS[variant], **SMALL), folder, max_steps=3)
        prepare_trainer(trainer, plan)
        trainer.train()
        trainer.save_model(str(folder))
        batch = trainer.data_collator([trainer.eval_dataset[i] for i in (0, 100, 200)])
        batch["input_features"] = batch["input_features"].half().float()  # as the guard hands them to an FP16 model
        torch.save(batch, folder / "batch.pt")
        assert all(bool((p != 0).any()) for name, p in trainer.model.named_parameters() if "lora_B" in name)  # trained
        with torch.no_grad():
            wanted[folder] = trainer.model.float().eval()(**batch).logits
    (tmp_path / "reload.py").write_text(RELOAD)
    subprocess.run([sys.executable, str(tmp_path / "reload.py"), *map(str, wanted)], check=True)
    for folder, logits in wanted.items():
        found = torch.load(folder / "found.pt")
        torch.testing.assert_close(found["logits"], logits, atol=1e-4, rtol=0)  # sums may run in another order
        assert found["finite"]
        torch.testing.assert_close(found["merged"], logits, atol=0.05, rtol=0.05)
    one, two = wanted.values()
    assert not torch.equal(one, two)


@slow
def test_accumulated_losses_are_averaged(tmp_path):
    one = make_trainer(Config(batch_size=16, checkpointing=False, num_batches=2), tmp_path / "one", max_steps=1)
    two = make_trainer(
        Config(batch_size=8, accumulate=2, checkpointing=False, num_batches=4), tmp_path / "two", max_steps=1
    )
    norms = []
    for trainer in (one, two):
        guard = prepare_trainer(trainer, "fp32")
        trainer.train()
        norms.append(guard.metrics()["floatline/grad_norm"])
    # Means of two halves are weighted a little otherwise than the mean of all.
    assert norms[1] == pytest.approx(norms[0], rel=0.2)


@slow
def test_the_command_trains_evaluates_and_says_where_the_adapters_are(monkeypatch, capsys, tmp_path):
    options = ["--config", "paper_r64", "--gradient-accumulation", "2", "--max-steps", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["audio_lora", "takes=1", *options, "num_batches=4"])
    main()
    said = capsys.readouterr().out
    assert "1 attempted, 1 applied" in said
    assert f"on voices that were held out; adapters in {tmp_path}" in said
    adapters = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (adapters["r"], adapters["base_model_name_or_path"]) == (64, str(tmp_path / "base"))


def test_a_config_that_is_not_known_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["audio_lora", "--config", "paper_r46"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("floatline: Config 'paper_r46' is not known. Did you mean 'paper_r64'?")
