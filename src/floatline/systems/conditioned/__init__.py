"""conditioned: a transformer that generates with the accuracy it is asked for, and how FP16 broke it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from floatline.errors import TargetError
from floatline.plans import Plan, Scaling
from floatline.plans.presets import resolve_plan
from floatline.systems.conditioned.data import IGNORED, Sequences, make_rules, sample_sequences
from floatline.systems.conditioned.model import ConditionedTransformer, ConditioningName, MaskName
from floatline.systems.conditioned.tensors import load_sequences
from floatline.workload import Workload, WorkloadConfig

__all__ = ["VARIANTS", "Config", "build", "make_data"]

Count = Annotated[int, Field(ge=1)]
_EVALUATED_AT_ONCE = 256


class Config(WorkloadConfig):
    """Settings.

    Args:
        use_mixed_precision: FP16 autocast with a loss scale, or FP32.
        vocabulary: Tokens.
        length: Of the longest sequence; the shortest are half as long, and padded.
        num_accuracies: Accuracies of a sequence; they take turns.
        num_categories: Categories; each has a rule of its own.
        num_batches: Of the training set.
        batch_size: Sequences in a batch.
        held_out: Sequences that the metric is taken on.
        data_seed: Of rules, training set and held-out set.
        data_file: Your own sequences, .npz or .safetensors, whose sizes are then taken; null draws them.
        width: Of the residual stream.
        heads: Of the attention; divides width.
        layers: Blocks.
        learning_rate: Of AdamW.
        conditioning: "bounded"; "relu", as the team began; "gelu-clamp", what they made of it.
        mask: What hides positions: the "lowest" number of the dtype, or the "constant" -1e9.
        feed_forward_scale: How many times larger than needed the hidden values of a feed-forward net are.
        feed_forward_clamp: Clamp these values to 65000.
    """

    use_mixed_precision: bool = True
    vocabulary: Annotated[int, Field(ge=2)] = 8
    length: Annotated[int, Field(ge=2)] = 16
    num_accuracies: Count = 1
    num_categories: Count = 3
    num_batches: Count = 200
    batch_size: Count = 64
    held_out: Count = 512
    data_seed: int = 0
    data_file: str | None = None
    width: Annotated[int, Field(ge=2)] = 32
    heads: Count = 2
    layers: Count = 2
    learning_rate: Annotated[float, Field(gt=0)] = 8e-3
    conditioning: ConditioningName = "bounded"
    mask: MaskName = "lowest"
    feed_forward_scale: Annotated[float, Field(gt=0)] = 1.0
    feed_forward_clamp: bool = False

    @model_validator(mode="after")
    def _heads_fit(self) -> Config:
        if self.width % self.heads:
            raise TargetError(f"heads is {self.heads}, which does not divide width {self.width}. Change one of them.")
        return self


VARIANTS: dict[str, dict[str, object]] = {
    # As the team had it: raises in FP16.
    "broken": {"conditioning": "relu", "mask": "constant"},
    # What they changed, the mask not among it: raises as before.
    "folk-fix": {"conditioning": "gelu-clamp", "mask": "constant"},
    # The one line that fixes it, their unbounded ReLU left alone.
    "fixed": {"conditioning": "relu", "mask": "lowest"},
    # What does overflow: no error, and no step that can be applied.
    "overflow": {"feed_forward_scale": 32768.0},
    # The clamp where there is something to clamp: no error, and a finite lie.
    "overflow-clamp": {"feed_forward_scale": 32768.0, "feed_forward_clamp": True},
    # 0.8 billion parameters; by estimate about 120 GB in FP32 with AdamW.
    "h200": {
        "vocabulary": 512,
        "length": 128,
        "num_categories": 64,
        "num_batches": 16,
        "batch_size": 448,
        "held_out": 256,
        "width": 2048,
        "heads": 16,
        "layers": 16,
        "learning_rate": 1e-4,
    },
}


def build(config: Config, seed: int = 0) -> Workload:
    """The workload; `seed` draws the weights and the order of the data, `config.data_seed` the data."""
    config, train, held_out = find_data(config)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    parts = [train.rows(order[i : i + config.batch_size]) for i in range(0, len(train), config.batch_size)]
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    return Workload(
        model=_make_model(config),
        batches=[(part.inputs, (part.targets,)) for part in parts],
        loss_fn=compute_loss,
        precision=_make_plan(config),
        make_optimizer=partial(_make_optimizer, learning_rate=config.learning_rate),
        evaluate=partial(_evaluate, held_out=held_out),
        metric="held_out_loss",
        higher_is_better=False,
    )


def find_data(config: Config) -> tuple[Config, Sequences, Sequences]:
    """The settings, with the sizes of the data, the training set and the held-out set: of a file, or drawn."""
    if config.data_file is None:
        _, train, held_out = make_data(config)
        return config, train, held_out
    vocabulary, train, held_out = load_sequences(config.data_file, held_out=config.held_out, seed=config.data_seed)
    sizes = {
        "vocabulary": vocabulary,
        "length": train.tokens.shape[1],
        "num_accuracies": train.accuracies.shape[1],
        "num_categories": int(torch.cat([train.categories, held_out.categories]).max()) + 1,
    }
    return config.model_copy(update=sizes), train, held_out


def make_data(config: Config) -> tuple[Tensor, Sequences, Sequences]:
    """The rules, the training set and the held-out set; the same for every seed of a run."""
    generator = torch.Generator().manual_seed(config.data_seed)
    rules = make_rules(config.vocabulary, config.num_categories, generator)
    # The held-out set first: it stays the same when the training set grows.
    held_out, train = (
        sample_sequences(num, config.length, rules, num_accuracies=config.num_accuracies, generator=generator)
        for num in (config.held_out, config.num_batches * config.batch_size)
    )
    return rules, train, held_out


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats per token that counts."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _make_model(config: Config) -> ConditionedTransformer:
    return ConditionedTransformer(
        vocabulary=config.vocabulary,
        length=config.length,
        num_accuracies=config.num_accuracies,
        num_categories=config.num_categories,
        width=config.width,
        heads=config.heads,
        layers=config.layers,
        conditioning=config.conditioning,
        mask=config.mask,
        feed_forward_scale=config.feed_forward_scale,
        feed_forward_clamp=config.feed_forward_clamp,
    )


def _make_plan(config: Config) -> Plan:
    if not config.use_mixed_precision:
        return resolve_plan("fp32")
    plan = resolve_plan("fp16-mixed")
    scaling = Scaling(init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
    reasons = {**plan.reasons, "scaling": "As the team wants it: from 65536, doubled after 2,000 good steps."}
    return plan.model_copy(update={"scaling": scaling, "reasons": reasons})


def _make_optimizer(model: nn.Module, *, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate)


def _evaluate(model: nn.Module, *, held_out: Sequences) -> float:
    """Held-out loss in nats per token; the parts are weighed by their tokens."""
    here = held_out.to(next(model.parameters()).device)
    total = torch.zeros((), dtype=torch.float64, device=here.tokens.device)
    for start in range(0, len(here), _EVALUATED_AT_ONCE):
        rows = here.rows(slice(start, start + _EVALUATED_AT_ONCE))
        total += compute_loss(model(*rows.inputs), rows.targets).double() * (rows.targets != IGNORED).sum()
    return float(total / (here.targets != IGNORED).sum())
