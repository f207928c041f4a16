"""transformers' Trainer on FP16 weights, with a loss that turns NaN once: one line after the Trainer is made.

Run it with: python examples/hf_trainer.py (needs: pip install 'floatline[hf]')
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import floatline as fl
from floatline.integrations.transformers import prepare_trainer

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


class NaNOnce(Trainer):
    """A Trainer of your own, whose loss is NaN in the step after the sixth."""

    def compute_loss(self, *args, **kwargs):
        """The Trainer's loss, but for one step."""
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("nan") if self.state.global_step == 6 else loss


def main() -> None:
    """Train 16 steps, and read what happened."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.float16)  # yours: from_pretrained(..., dtype=torch.float16)
    rows = [{"input_ids": row, "labels": row} for row in (torch.arange(16) * step % 64 for step in range(1, 65))]
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(
        folder,
        fp16=True,
        use_cpu=True,
        max_steps=16,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = NaNOnce(model, arguments, train_dataset=rows)
    run = prepare_trainer(trainer, policy=fl.Policy(read_after=0))
    trainer.train()
    print(run.guard.plan.name, "with", type(trainer.optimizer.optimizer).__module__)
    print(run.summary())
    weights = all(bool(weight.isfinite().all()) for weight in model.parameters())
    print(f"{len(fl.Ledger.read(folder))} steps in the ledger; weights {'finite' if weights else 'not finite'}")


if __name__ == "__main__":
    main()
