"""What breaks mmgcn, and what the team's remedies do: recall@10 and applied steps, the same data and seeds.

    python benchmarks/mmgcn_remedies.py --out benchmarks/results/mmgcn_remedies_cpu.md

Every run is `floatline train`'s own loop. The page of mmgcn has these tables.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from floatline.training.trainer import Trainer
from floatline.workload import load_target


@dataclass(frozen=True)
class Arm:
    """A way to train: settings that differ from the table's target, and how many seeds are shown."""

    title: str
    settings: tuple[str, ...] = ()
    seeds: int = 1


@dataclass(frozen=True)
class Table:
    """Arms of one target, trained for as many steps."""

    target: str
    steps: int
    arms: tuple[Arm, ...]


_REGISTERED = ("registered=true",)
TABLES = (
    Table(
        "mmgcn:broken",
        300,
        (
            Arm("nothing changed"),
            Arm("FP32 (`use_amp=false`), seeds 0, 1, 2", ("use_amp=false",), 3),
            Arm("`loss=log-of-sigmoid-eps`, their fix", ("loss=log-of-sigmoid-eps",)),
            Arm("`learning_rate=0.0001`", ("learning_rate=0.0001",)),
            Arm("`growth_interval=5000`", ("growth_interval=5000",)),
            Arm("`clip_grad_norm.max_norm=1.0`", ("clip_grad_norm.max_norm=1.0",)),
            Arm("`init=uniform`, their `torch.rand`", ("init=uniform",)),
            Arm("`loss=logsigmoid`", ("loss=logsigmoid",)),
            Arm("`normalize=true`", ("normalize=true",)),
            Arm("`normalize=true` in FP32", ("normalize=true", "use_amp=false")),
        ),
    ),
    Table(
        "mmgcn:eps",
        60,
        (
            Arm("nothing changed: the eps of 1e-8 is in"),
            Arm("`loss=log-of-sigmoid`: no eps", ("loss=log-of-sigmoid",)),
            Arm("`learning_rate=0.0001`", ("learning_rate=0.0001",)),
            Arm("`growth_interval=5000`", ("growth_interval=5000",)),
            Arm("`clip_grad_norm.max_norm=1.0`", ("clip_grad_norm.max_norm=1.0",)),
            Arm("`use_amp=false`", ("use_amp=false",)),
            Arm("`loss=logsigmoid`", ("loss=logsigmoid",)),
        ),
    ),
    Table(
        "mmgcn:unregistered",
        60,
        (
            Arm("bare tensors, FP32", ("use_amp=false",)),
            Arm("bare tensors"),
            Arm("the same numbers as `nn.Parameter`, FP32", (*_REGISTERED, "use_amp=false")),
            Arm("the same numbers as `nn.Parameter`", _REGISTERED),
            Arm("`nn.Parameter`, Xavier", (*_REGISTERED, "init=xavier")),
        ),
    ),
    Table(
        "mmgcn:stagnating",
        20,
        (
            Arm("FP32 (`use_amp=false`)", ("use_amp=false",)),
            Arm("`scatter`"),
            Arm("`aggregation=grouped`", ("aggregation=grouped",)),
        ),
    ),
)


def train(table: Table, arm: Arm, seed: int) -> tuple[int, float, float]:
    """Steps applied, the last loss, and recall@10 at the end, of a run that was stopped as well."""
    workload = load_target(table.target, pairs=arm.settings).build(seed)
    trainer = Trainer(workload, folder=None, steps=table.steps, seed=seed)
    result = trainer.run(evaluate=False)
    return result.applied, torch.nan if result.last_loss is None else result.last_loss, trainer.measure()


def describe(table: Table) -> str:
    """The table of a target."""
    rows = [
        f"| {table.steps} steps of `{table.target}` | steps applied | last loss | recall@10 |",
        "|---|---:|---:|---:|",
    ]
    for arm in table.arms:
        found = [train(table, arm, seed) for seed in range(arm.seeds)]
        applied, losses, recalls = (
            ", ".join(f"{x:{how}}" for x in each)
            for each, how in zip(zip(*found, strict=True), ("d", ".4g", ".3f"), strict=True)
        )
        rows.append(f"| {arm.title} | {applied} | {losses} | {recalls} |")
        print(rows[-1], flush=True)
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"# What breaks mmgcn, and what remedies do, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        f"{platform.machine()} CPU, torch {torch.__version__}; FP16 where no format is named, and seed 0.",
    ]
    text = "\n\n".join([*lines, *(describe(table).rstrip() for table in TABLES)]) + "\n"
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
