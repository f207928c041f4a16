"""FSDP2 and DDP on one process: prints the manifests. Run by test_exchange.py."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import floatline as fl


def measure(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model(torch.ones(3, 8)).float().square().sum().backward()
        optimizer.step()

    return fl.manifest(model, optimizer, step=step)


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    dist.init_process_group("gloo", rank=0, world_size=1)
    sharded = nn.Sequential(nn.Linear(8, 8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    found = measure(sharded)
    lines = [f"{found.summary} {found.exchanges} {sum(row.num_updates for row in found.updates)}"]
    hooked = DistributedDataParallel(nn.Linear(8, 8))
    hooked.register_comm_hook(None, fp16_compress_hook)
    lines += [str(measure(one).exchanges) for one in (hooked, DistributedDataParallel(nn.Linear(8, 8)))]
    sys.stdout.write("\n".join(lines) + "\n")
    dist.destroy_process_group()
