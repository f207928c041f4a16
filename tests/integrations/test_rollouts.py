"""watch_rollouts: a GRPO trainer's log-probs against those of its rollouts, in the trainer's own log."""

import pytest
import torch
from tests.integrations.tiny_trainers import make_arguments, make_llama
from tests.slow import slow
from transformers import Trainer

from floatline.errors import ParityError
from floatline.integrations.transformers import prepare_trainer, watch_rollouts


class Policy(Trainer):
    """A trainer whose batches have the names of TRL's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        return model(input_ids=ids, labels=ids).loss


def make_rows(*, moved=0.0, engine=True, num=4):
    generator = torch.Generator().manual_seed(3)
    model = make_llama().eval()
    rows = []
    for _ in range(num):
        ids = torch.randint(64, (2, 9), generator=generator)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, 3:-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
        logprobs[1, 2] += moved
        mask = torch.ones(2, 5, dtype=torch.long)
        mask[0, 4:] = 0
        row = {"prompt_ids": ids[:, :4], "prompt_mask": torch.ones(2, 4, dtype=torch.long)}
        row |= {"completion_ids": ids[:, 4:], "completion_mask": mask}
        rows.append(row | ({"sampling_per_token_logps": logprobs} if engine else {}))
    return rows


def make_policy(folder, rows, **options):
    arguments = make_arguments(folder, fp16=False, max_steps=4, learning_rate=0.0, **options)
    return Policy(make_llama(), arguments, train_dataset=rows, data_collator=lambda items: items[0])


def logged(trainer, name="floatline/ratios_outside"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_one_token_of_another_probability_is_in_the_log_every_other_step(tmp_path):
    trainer = make_policy(tmp_path, make_rows(moved=-0.5))
    drift = watch_rollouts(trainer, every=2)
    trainer.train()
    assert logged(trainer) == pytest.approx([1 / 9, 1 / 9])  # 9 tokens count, one is masked
    assert (drift.recorded, drift.problem, drift.last.num_tokens) == (True, "", 9)
    assert drift.last.largest == pytest.approx(1.6487, rel=1e-3)
    assert type(trainer).__name__ == "Policy"


def test_without_the_engines_log_probs_they_are_computed_as_generate_does(tmp_path):
    trainer = make_policy(tmp_path, make_rows(engine=False))
    drift = watch_rollouts(trainer, every=4)
    trainer.train()
    assert (drift.recorded, drift.problem) == (False, "")
    assert logged(trainer) == [0.0]
    assert 0 <= logged(trainer, "floatline/rollout_kl")[0] < 1e-9


@slow
def test_training_is_what_it_is_without(tmp_path):
    options = {"learning_rate": 1e-2, "max_steps": 4, "fp16": False}

    def train(folder, *, watched):
        arguments = make_arguments(folder, **options)
        trainer = Policy(make_llama(), arguments, train_dataset=make_rows(), data_collator=lambda items: items[0])
        if watched:
            watch_rollouts(trainer, every=1)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert train(tmp_path / "a", watched=True) == train(tmp_path / "b", watched=False)


def test_batches_of_another_kind_leave_a_reason_and_the_run_alone(tmp_path):
    rows = [{name: value for name, value in row.items() if name != "completion_mask"} for row in make_rows()]
    trainer = make_policy(tmp_path, rows)
    drift = watch_rollouts(trainer)
    trainer.train()
    assert drift.problem == "the batch has no 'completion_mask'"
    assert (drift.last, logged(trainer)) == (None, [])


@slow
def test_a_guarded_trainer_is_watched_too(tmp_path):
    trainer = make_policy(tmp_path, make_rows(moved=-0.5))
    prepare_trainer(trainer, "bf16-mixed")
    watch_rollouts(trainer, every=4)
    trainer.train()
    assert logged(trainer) == pytest.approx([1 / 9])
    assert "floatline/skipped" in trainer.state.log_history[0]


def test_wrong_numbers_get_one_line(tmp_path):
    trainer = make_policy(tmp_path, make_rows())
    with pytest.raises(ParityError, match="every is 0"):
        watch_rollouts(trainer, every=0)
    with pytest.raises(ParityError, match="does not hold the ratio 1"):
        watch_rollouts(trainer, band=(1.1, 1.2))
    watch_rollouts(trainer)
    with pytest.raises(ParityError, match="watched already"):
        watch_rollouts(trainer)


@slow
def test_trls_grpo_trainer_logs_the_drift_of_its_rollouts(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "<bos>", *(f"w{i}" for i in range(60))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, num_generations=4, bf16=True,
        max_completion_length=6, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        learning_rate=1e-3, beta=0.0,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=make_llama(),
        args=arguments,
        reward_funcs=lambda completions, **_: [float(text.count("w1")) for text in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w3 w4", "w5 w6 w7", "w8", "w9 w2"] * 2}),
        processing_class=tokenizer,
    )
    drift = watch_rollouts(trainer, every=1)
    trainer.train()
    assert drift.problem == ""
    assert len(logged(trainer)) == 3
    assert all(0 <= share <= 1 for share in logged(trainer))
    assert all(kl >= 0 for kl in logged(trainer, "floatline/rollout_kl"))
    assert type(trainer).__name__ == "GRPOTrainer"
