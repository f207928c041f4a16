"""LoRA on FP16 weights with gradient checkpointing, in the Trainer and in TRL's SFTTrainer."""

import pytest
import torch

import floatline as fl

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from tests.integrations.tiny_trainers import as_logged, losses, make_arguments, make_llama, make_texts  # noqa: E402
from tests.slow import slow  # noqa: E402

from floatline.integrations.transformers import prepare_trainer  # noqa: E402


def make_lora(*, fp32_adapters):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(make_llama(torch.float16), config, autocast_adapter_dtype=fp32_adapters)


def make_trainer(folder, model, kind=transformers.Trainer, **options):
    usual = {"max_steps": 5, "per_device_train_batch_size": 4, "gradient_checkpointing": True}
    arguments = make_arguments(folder, **{**usual, **options})
    return kind(model, arguments, train_dataset=make_texts())


def adapters(model):
    return torch.cat([p.detach().float().reshape(-1) for n, p in model.named_parameters() if p.requires_grad])


@slow
@pytest.mark.parametrize("fp32_adapters", [True, False])
def test_lora_on_fp16_weights_with_checkpointing_trains(tmp_path, fp32_adapters):
    trainer = make_trainer(tmp_path, make_lora(fp32_adapters=fp32_adapters))
    callback = prepare_trainer(trainer)
    before = adapters(trainer.model)
    trainer.train()
    assert trainer.model.is_gradient_checkpointing
    assert not torch.equal(before, adapters(trainer.model))
    assert adapters(trainer.model).isfinite().all()
    assert callback.guard.plan.name == ("fp16-mixed" if fp32_adapters else "fp16-true")
    assert isinstance(trainer.optimizer.optimizer, fl.optim.AdamW) == (not fp32_adapters)
    history = fl.Ledger.read(tmp_path)
    assert history.applied == [True] * 5
    assert as_logged(history.loss, trainer) == pytest.approx(losses(trainer), rel=1e-6)


class AsOnAGPU(transformers.Trainer):
    """What the Trainer has on a GPU: torch's scaler and FP16 autocast."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


def test_with_torchs_scaler_fp16_adapters_cannot_be_trained(tmp_path):
    non_reentrant = {"use_reentrant": False}  # what prepare_trainer chooses, and transformers 5 by itself
    trainer = make_trainer(
        tmp_path, make_lora(fp32_adapters=False), kind=AsOnAGPU, gradient_checkpointing_kwargs=non_reentrant
    )
    with fl.HalfOnCPU(), pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        trainer.train()


@slow
def test_trls_sft_trainer_goes_the_same_way(tmp_path, capsys):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = [f"w{i}" for i in range(60)]
    words_to_ids = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "<bos>", *words])}
    core = Tokenizer(WordLevel(words_to_ids, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    texts = [" ".join(words[(i * k) % 60] for i in range(12)) for k in range(1, 17)]
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, fp16=True, bf16=False, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-2, max_length=32,
        gradient_checkpointing=True, dataset_num_proc=None,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=make_llama(torch.float16),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    prepare_trainer(trainer)
    before = adapters(trainer.model)
    trainer.train()
    assert type(trainer).__name__ == "SFTTrainer"
    assert not torch.equal(before, adapters(trainer.model))
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["floatline/skipped"] for entry in log] == [0.0] * 4
    assert "mean_token_accuracy" in log[0]  # TRL's own metrics are there, too
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("floatline: ")]
    assert said[0].startswith("floatline: weights ")
    assert as_logged(fl.Ledger.read(tmp_path).loss, trainer) == pytest.approx(losses(trainer), rel=1e-6)
