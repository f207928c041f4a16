"""Trainers of transformers with models so small that a run takes a second."""

import math

import torch
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Regression(nn.Module):
    """A plain module with the manners of a transformers model."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 2)
        self.dtypes = []

    def forward(self, x, labels):
        hidden = self.first(x)
        self.dtypes.append(hidden.dtype)
        out = self.last(self.drop(torch.tanh(hidden)))
        return {"loss": 0.1 * (out.float() - labels).square().mean(), "logits": out}


def make_regression():
    torch.manual_seed(0)
    return Regression()


def make_rows(num=8, *, bad=()):
    """One row a batch; bad ones hold a NaN."""
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(num)]
    rows = [{"x": x, "labels": y} for x, y in pairs]
    for number in bad:
        rows[number]["x"][0, 0] = math.nan
    return rows


class InOrder(Trainer):
    """Takes the rows in their order."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def make_arguments(folder, **options):
    usual = {
        "max_steps": 8,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "fp16": True,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "remove_unused_columns": False,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(folder), **{**usual, **options})


def make_trainer(folder, *, model=None, rows=None, eval_rows=None, **options):
    """A Trainer on the regression, in the order of the rows."""
    return InOrder(
        make_regression() if model is None else model,
        make_arguments(folder, **options),
        train_dataset=make_rows() if rows is None else rows,
        eval_dataset=eval_rows,
        data_collator=lambda items: items[0],
    )


def make_llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for param in model.parameters():  # as from_pretrained does: rotary frequencies stay in FP32
        param.data = param.data.to(dtype)
    return model


def make_texts(num=32):
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(4, 64, (16,), generator=generator) for _ in range(num)]
    return [{"input_ids": row, "labels": row} for row in rows]


def losses(trainer):
    """What the Trainer logged, step by step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def as_logged(values, trainer):
    """These losses as the Trainer writes them: in transformers 4 it rounds to four digits."""
    rounds = all(seen == round(seen, 4) for seen in losses(trainer))
    return [round(value, 4) for value in values] if rounds else values


def weights(model):
    return torch.cat([param.detach().reshape(-1).float() for param in model.parameters()])
