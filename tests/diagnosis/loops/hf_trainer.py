"""A Hugging Face Trainer: healthy in BF16, or with half weights and a mask of -1e9 on request."""

import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput


class Pooler(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.score = nn.Linear(16, 1)
        self.limit = limit

    def forward(self, states, padding):
        weights = self.score(states).squeeze(-1).masked_fill(padding, self.limit)
        return (weights.softmax(-1)[..., None] * states).sum(1)


class Classifier(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.pool = Pooler(limit)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.pool(self.embed(input_ids), input_ids == 0))
        loss = nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def make_rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (96, 8), generator=generator)
    ids[:, 6:] = 0
    return [{"input_ids": row, "labels": row[0] % 3} for row in ids]


if __name__ == "__main__":
    broken = "--broken" in sys.argv
    torch.manual_seed(0)
    model = Classifier(-1e9 if broken else -1e4)
    if broken:
        model.half()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, bf16=not broken, max_steps=14, per_device_train_batch_size=8,
            learning_rate=1e-3, report_to=[], save_strategy="no", logging_steps=5, disable_tqdm=True,
            optim="sgd" if broken else "adamw_torch",
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=make_rows()).train()
