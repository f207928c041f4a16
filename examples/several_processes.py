"""A guarded run on several processes: one of them gets a bad batch, and all of them skip it.

Run it with: python -m torch.distributed.run --standalone --nproc-per-node 2 examples/several_processes.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import floatline as fl

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
dist.init_process_group("gloo", timeout=timedelta(minutes=2))
rank = dist.get_rank()

torch.manual_seed(0)  # the same weights on every process
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
guard = fl.Guard(model, optimizer, plan="bf16-mixed")


def compute_loss(x: torch.Tensor) -> torch.Tensor:
    """The model learns to add."""
    return (model(x).float() - x.sum(1, keepdim=True)).square().mean()


torch.manual_seed(1 + rank)  # other data on every process
for step in range(60):
    batch = torch.randn(32, 16)
    if step == 40 and rank == 1:
        batch[0, 0] = float("nan")
    outcome = guard.step(compute_loss, batch)
    if step == 40:
        print(f"process {rank}: {outcome}", flush=True)

dist.barrier()
if rank == 0:
    print(guard.summary())
dist.destroy_process_group()
