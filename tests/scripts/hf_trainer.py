"""Fine-tunes a small BERT-like classifier with transformers.Trainer."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

os.environ.setdefault("WANDB_DISABLED", "true")


class ReviewDataset(torch.utils.data.Dataset):
    """Token ids of made-up reviews; the label is which of two word groups is more frequent."""

    def __init__(self, n, vocab=64, length=16, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 2, (n,), generator=g)
        self.ids = torch.randint(4, vocab, (n, length), generator=g)
        marked = torch.rand(n, length, generator=g) < 0.5
        words = torch.where(self.labels[:, None] == 1, 10, 40) + torch.randint(0, 6, (n, length), generator=g)
        self.ids = torch.where(marked, words, self.ids)
        lengths = torch.randint(8, length + 1, (n,), generator=g)
        self.mask = (torch.arange(length)[None] < lengths[:, None]).long()
        self.ids = self.ids * self.mask

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


class ReviewClassifier(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return {"logits": self.classifier(pooled.to(hidden.dtype))}


class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"].float()
        loss = F.cross_entropy(logits, labels, ignore_index=-100)
        return (loss, outputs) if return_outputs else loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp16")
    args = parser.parse_args()
    torch.manual_seed(0)
    use_cpu = not torch.cuda.is_available()

    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    model = ReviewClassifier(config)
    train_dataset = ReviewDataset(640)
    with tempfile.TemporaryDirectory() as output_dir:
        training_args = TrainingArguments(
            output_dir=output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=16,
            learning_rate=args.learning_rate,
            warmup_steps=4,
            lr_scheduler_type="linear",
            fp16=args.precision == "fp16",
            bf16=args.precision == "bf16",
            use_cpu=use_cpu,
            logging_steps=4,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        trainer = MyTrainer(model=model, args=training_args, train_dataset=train_dataset)
        if training_args.fp16 and use_cpu:
            # accelerate leaves mixed precision off for FP16 on a CPU
            trainer.accelerator.native_amp = True
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        result = trainer.train()
    print(f"train loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
