"""mmgcn: a multimodal graph recommender (MMGCN) with BPR loss, whose FP16 run ended in `Training loss is nan`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from floatline.errors import TargetError
from floatline.plans import Clip, Plan, Scaling
from floatline.plans.presets import resolve_plan
from floatline.systems.mmgcn.folders import load_folder
from floatline.systems.mmgcn.interactions import Interactions, make_batches
from floatline.systems.mmgcn.losses import LOSSES
from floatline.systems.mmgcn.messages import Summing
from floatline.systems.mmgcn.mmrec import translate
from floatline.systems.mmgcn.model import MMGCN
from floatline.systems.mmgcn.planted import plant
from floatline.systems.mmgcn.ranking import Ranking
from floatline.systems.mmgcn.tables import load_interactions
from floatline.workload import Workload, WorkloadConfig


class Config(WorkloadConfig):
    """Settings of mmgcn; the defaults learn on one CPU core in half a minute.

    Args:
        use_amp: FP16 autocast with a loss scale; False is FP32.
        growth_interval: Good steps before the loss scale grows.
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        clip_grad_norm: `max_norm` and `norm_type` (any, .inf too) of the gradients; null clips nothing.
        most_bad: Batches in a row with a loss or a gradient that is not finite that stop the run; null never stops it.
        batch_size: Triples (user, item taken, item not taken) in a batch.
        passes: Times that each pair is in an epoch, with another item beside it.
        num_layers: Graph layers of every modality.
        dim_id: Width of the id embeddings and of what is compared.
        dim_latent: Width that features are projected to before the first layer; null takes them as they are.
        normalize: Whether features and preferences are brought to length 1, as in the paper's code.
        top_k: Places of the ranked list that recall@K and NDCG@K look at.
        eval_users: Users who are ranked for the metric, at most.
        init: How embeddings begin: `xavier`, or the team's `uniform` from 0 to 1, where all have one sign.
        loss: `logsigmoid`, the team's `log-of-sigmoid`, or theirs with the eps they added, `log-of-sigmoid-eps`.
        registered: Whether embeddings are parameters, or the team's bare tensors.
        aggregation: How messages are summed: `grouped` in FP32, `scatter` in their own format, or `fused`: in FP32 by
            one kernel on a GPU, without a message in memory.
        interaction_file: Table with user and item columns (.csv, .tsv, .inter); null plants interactions.
        feature_files: Modality to .npy file, a row for each item; with `interaction_file`.
        data_path: Folder that holds data sets.
        dataset: Folder below it, with MMRec's or MMGCN's own files; the two above are then looked for in it.
        first_item: Number of the first item in MMGCN's files, where items follow users; null is the smallest that fits.
        holdout: Share of interactions that is held out, where the table does not say which.
        data_seed: Of planted interactions and of the split: the task. `seed` of a run changes weights and order.
        num_users: Planted users.
        num_items: Planted items.
        num_tastes: Planted clusters.
        interactions: Planted interactions of each user, about.
        noise: Share of interactions outside of a user's taste.
        hubs: Planted items that nearly everybody takes.
        modalities: Modality to the width of its planted features.
        feature_scale: What planted features are multiplied by: those of other networks are seldom of length 1.
        feature_offset: What is then added to every planted feature: 8-bit codes and raw units are seldom centred.
    """

    use_amp: bool = True
    growth_interval: int = Field(default=2000, ge=1)
    learning_rate: float = Field(default=0.005, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad_norm: Clip | None = Clip(max_norm=5.0)
    most_bad: int | None = Field(default=20, ge=1)
    batch_size: int = Field(default=2048, ge=1)
    passes: int = Field(default=25, ge=1)
    num_layers: int = Field(default=2, ge=1)
    dim_id: int = Field(default=32, ge=1)
    dim_latent: int | None = Field(default=32, ge=1)
    normalize: bool = True
    top_k: int = Field(default=10, ge=1)
    eval_users: int = Field(default=10_000, ge=1)
    init: Literal["xavier", "uniform"] = "xavier"
    loss: Literal["logsigmoid", "log-of-sigmoid", "log-of-sigmoid-eps"] = "logsigmoid"
    registered: bool = True
    aggregation: Summing = "grouped"
    interaction_file: str | None = None
    feature_files: dict[str, str] = Field(default_factory=dict)
    data_path: str = ""
    dataset: str | None = None
    first_item: int | None = Field(default=None, ge=0)
    holdout: float = Field(default=0.2, gt=0, lt=1)
    data_seed: int = 0
    num_users: int = Field(default=1000, ge=2)
    num_items: int = Field(default=400, ge=2)
    num_tastes: int = Field(default=8, ge=1)
    interactions: int = Field(default=24, ge=2)
    noise: float = Field(default=0.1, ge=0, le=1)
    hubs: int = Field(default=0, ge=0)
    modalities: dict[str, int] = Field(default_factory=lambda: {"visual": 64, "acoustic": 32, "textual": 48})
    feature_scale: float = Field(default=1.0, gt=0)
    feature_offset: float = 0.0


# Enough to fail, and quick to look into.
_SMALL: dict[str, object] = {"num_users": 300, "num_items": 150, "batch_size": 512, "passes": 10, "num_layers": 1}
# Features as other networks gave them: scores differ by 20 before the first step.
_APART: dict[str, object] = {"normalize": False, "feature_scale": 16.0}

VARIANTS: dict[str, dict[str, object]] = {
    # Their loss on features that nobody centred or scaled: scores of 75,000 that differ by less than 88, so that FP32
    # trains. In FP16 both are inf, and their difference is NaN before the first update.
    "broken": {
        "loss": "log-of-sigmoid",
        "normalize": False,
        "feature_offset": 600.0,
        "feature_scale": 0.5,
        "learning_rate": 0.002,
        **_SMALL,
    },
    # Scores that differ by 20, and a loss without eps: the log of 0. The loss is inf, and never NaN.
    "no-eps": {"loss": "log-of-sigmoid", **_APART, **_SMALL},
    # What their fix does: the eps is 0 in FP16, and the loss is as it was.
    "eps": {"loss": "log-of-sigmoid-eps", **_APART, **_SMALL},
    # The team's tensors: model.parameters() does not have them. FP32 learns no more than FP16.
    "unregistered": {"registered": False, "init": "uniform", **_SMALL},
    # Items that thousands of users took, and sums of messages in FP16.
    "stagnating": {
        "aggregation": "scatter",
        "init": "uniform",
        "num_users": 16_000,
        "num_items": 200,
        "hubs": 4,
        "interactions": 3,
        "holdout": 0.1,
        "num_layers": 1,
        "dim_id": 8,
        "dim_latent": 8,
        "batch_size": 8192,
        "passes": 2,
        "modalities": {"visual": 32},
    },
    # Fills an H200 in FP32: 60 million messages of 256 numbers in each sum.
    "h200": {
        "num_users": 1_000_000,
        "num_items": 200_000,
        "num_tastes": 200,
        "interactions": 32,
        "dim_id": 256,
        "dim_latent": 256,
        "batch_size": 65_536,
        "passes": 1,
        "eval_users": 20_000,
        "modalities": {"visual": 1024, "acoustic": 128, "textual": 384},
        "aggregation": "fused",
    },
}


def build(config: Config, seed: int = 0) -> Workload:
    """The workload; the data follow from the config, weights and order of batches from the seed."""
    data = find_data(config)
    torch.manual_seed(seed)
    model = MMGCN(
        data,
        num_layers=config.num_layers,
        dim_id=config.dim_id,
        dim_latent=config.dim_latent,
        normalize=config.normalize,
        aggregation=config.aggregation,
        init=config.init,
        registered=config.registered,
    )
    ranking = Ranking(data, top_k=config.top_k, num_users=config.eval_users)
    return Workload(
        model=model,
        batches=make_batches(data, batch_size=config.batch_size, passes=config.passes, seed=seed),
        loss_fn=LOSSES[config.loss],
        precision=make_plan(config),
        make_optimizer=lambda m: make_optimizer(m, config),
        evaluate=ranking.recall,
        metric=f"recall@{config.top_k}",
        higher_is_better=True,
        policy={} if config.most_bad is None else {"most_bad": config.most_bad},
    )


def read_settings(settings: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Settings of a file: mmgcn's own, or MMRec's; what of the latter means nothing here is named on stderr."""
    found, ignored = translate(settings, Config.model_fields)
    if ignored:
        sys.stderr.write(f"floatline: {path}: ignored, since mmgcn has no such setting: {', '.join(ignored)}\n")
    return found


def find_data(config: Config) -> Interactions:
    """The interactions and features that a config names: of files, or planted."""
    if config.dataset is not None:
        return load_folder(
            Path(config.data_path) / config.dataset,
            config.interaction_file,
            config.feature_files,
            first_item=config.first_item,
            holdout=config.holdout,
            seed=config.data_seed,
        )
    if config.interaction_file is None:
        if config.feature_files:
            raise TargetError("feature_files are given without an interaction_file. Give both, or neither.")
        return plant(
            num_users=config.num_users,
            num_items=config.num_items,
            num_tastes=config.num_tastes,
            interactions=config.interactions,
            noise=config.noise,
            hubs=config.hubs,
            modalities=config.modalities,
            feature_scale=config.feature_scale,
            feature_offset=config.feature_offset,
            holdout=config.holdout,
            seed=config.data_seed,
        )
    return load_interactions(
        config.interaction_file, config.feature_files, holdout=config.holdout, seed=config.data_seed
    )


def make_plan(config: Config) -> Plan:
    """The plan that `use_amp`, `growth_interval` and `clip_grad_norm` say."""
    plan = resolve_plan("fp16-mixed" if config.use_amp else "fp32")
    reasons = {**plan.reasons, "clip": "The config's clip_grad_norm."}
    scaling = Scaling(growth_interval=config.growth_interval) if config.use_amp else None
    # A guard clips to 1 where a plan says nothing: a bound that no gradient meets is none.
    clip = config.clip_grad_norm or Clip(max_norm=1e30)
    return plan.model_copy(update={"clip": clip, "scaling": scaling, "reasons": reasons})


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW over what the model shows as its parameters."""
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
