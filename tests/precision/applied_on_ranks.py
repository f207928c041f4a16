"""Launched by test_applied_plan_ranks.py with torchrun: an applied plan under DDP and FSDP2; findings as JSON."""

import copy
import json
import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two processes, and gloo: on the CPU

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.precision import losses_for_plans as losses

from floatline.guard.guard import Guard
from floatline.plans import KeptFunction, KeptModule, Plan, Rewrite

KINDS = ("DDP", "FSDP2")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 8)

    def forward(self, x):
        y = self.qkv(x)
        mask = torch.ones(len(x), len(x)).triu(1).bool()
        return (y @ y.transpose(-1, -2)).masked_fill(mask, -1e9).softmax(-1) @ y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.norm, self.head = Attention(), nn.LayerNorm(8), nn.Linear(8, 8)
        nn.init.constant_(self.head.weight, 9000.0)

    def forward(self, x):
        return self.head(self.norm(self.attention(x)) + 1)


def wrap(kind, model):
    if kind == "DDP":
        return DistributedDataParallel(model)
    fully_shard(model.attention)
    fully_shard(model)
    return model


def check(kind, rank):
    plan = Plan(
        name="mine",
        weights="fp32",
        compute="fp16",
        fp32_modules=(KeptModule(pattern="head"),),
        fp32_functions=(KeptFunction(function="losses_for_plans.py:dice"),),
        rewrites=(Rewrite(kind="mask-constant", module="type:Attention"),),
    )
    model = Net()
    reference = copy.deepcopy(model)
    wrapped = wrap(kind, model)
    guard = Guard(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.0), plan=plan)
    seen = {}
    model.head.register_forward_hook(lambda _, args, out: seen.update(inputs=args[0].detach(), out=out.detach()))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))

    def compute_loss(batch):
        logits = wrapped(batch) / 1e4
        narrow = logits.half()
        loss = losses.dice(narrow, torch.ones_like(narrow))
        seen.update(narrow=narrow.detach(), loss=loss.detach())
        return loss

    outcome = guard.step(compute_loss, x)
    guard.close()
    expected = reference.head(seen["inputs"].float())
    return {
        "head": torch.equal(seen["out"], expected),
        "needed": bool(reference.head(seen["inputs"].float()).abs().max() > 65504),
        "function": torch.equal(seen["loss"], losses.dice(seen["narrow"].float(), torch.ones(6, 8))),
        "function_dtype": str(seen["loss"].dtype),
        "applied": outcome.applied,
        "norm": outcome.grad_norm,
    }


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    kinds = KINDS[: 1 if torch.__version__.startswith("2.6.") else 2]  # FSDP2 does not run on the CPU there
    found = {kind: check(kind, rank) for kind in kinds}
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
