"""FSDP2 on two processes: counts what is gathered in a step and in one that is measured. Run by test_exchange.py."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import floatline as fl


class Gathers(TorchDispatchMode):
    """Counts calls that gather what lies on several processes."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += "gather" in func.__name__
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model(torch.ones(3, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Gathers() as bare:
        step()
    with Gathers() as measured:
        found = fl.manifest(model, optimizer, step=step)
    with Gathers() as whole:
        model[0].weight.full_tensor()
    if dist.get_rank() == 0:
        sys.stdout.write(f"{bare.num} {measured.num} {whole.num} {sum(row.num_updates for row in found.updates)}\n")
    dist.destroy_process_group()
