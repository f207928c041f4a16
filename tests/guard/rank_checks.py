"""Run by test_scaler_ranks.py: trains on several processes; each writes what it found as JSON."""

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import floatline as fl

NAN = float("nan")


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def train(model, optimizer, scaler, rank, *, bad_rank, plant, clip=None, unscale=False, dtype=torch.float32):
    """Six steps; in the third the bad rank has a NaN in its gradient, after the reduction."""
    scales, applied = [], []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
        scaler.scale(model(x).float().square().mean()).backward()
        if step == 2 and rank == bad_rank:
            plant()
        if unscale:
            scaler.unscale_(optimizer)
        if clip is None:
            scaler.step(optimizer)
        else:
            scaler.step(optimizer, clip_norm=clip)
        scaler.update()
        scales.append(scaler.get_scale())
        if isinstance(scaler, fl.LossScaler):
            applied.append(scaler.applied)
    return {"scales": scales, "applied": applied}


def flat(model):
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1).float() for p in parts]).tolist()


def replicated(rank, scaler, make_optimizer, dtype=torch.float32, **options):
    model = make_model(dtype)
    wrapped = DistributedDataParallel(model)
    optimizer = make_optimizer(model.parameters())

    def plant():
        next(model.parameters()).grad.view(-1)[0] = NAN

    bad_rank = dist.get_world_size() - 1
    found = train(wrapped, optimizer, scaler, rank, bad_rank=bad_rank, plant=plant, dtype=dtype, **options)
    return {**found, "weights": flat(model)}


def sharded(rank, scaler, make_optimizer, mesh, dtype=torch.float32, **options):
    model = make_model(dtype)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())

    def plant():
        model[0].weight.grad.to_local().view(-1)[0] = NAN

    found = train(model, optimizer, scaler, rank, bad_rank=0, plant=plant, dtype=dtype, **options)
    return {**found, "weights": flat(model)}


def uneven(rank, scaler):
    """Only the first process has gradients, and they are not finite."""
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler.scale(torch.ones(()))
    if rank == 0:
        param.grad = torch.full((3,), NAN)
    scaler.step(optimizer)
    scaler.update()
    return {"scales": [scaler.get_scale()], "applied": [scaler.applied], "weights": param.tolist()}


def nobody(scaler):
    """No process has gradients."""
    scaler.scale(torch.ones(()))
    try:
        scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
    except AssertionError as error:
        return str(error)
    return "no error"


def alone(rank):
    """Each process in a group of its own decides alone."""
    own = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    param = nn.Parameter(torch.ones(3))
    scaler = fl.LossScaler("cpu", process_group=own)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((3,), NAN if rank == 0 else 1.0)
    scaler.step(torch.optim.SGD([param], lr=0.1))
    return scaler.applied


def plain_sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def checks(rank):
    def new():
        return fl.LossScaler("cpu", init_scale=1024.0)

    def torchs():
        return torch.amp.GradScaler("cpu", init_scale=1024.0)

    half, bf16 = torch.float16, torch.bfloat16
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runs = {
        "DDP, SGD": lambda: replicated(rank, new(), plain_sgd),
        "DDP, SGD, unscale_": lambda: replicated(rank, new(), plain_sgd, unscale=True),
        "DDP, fused AdamW": lambda: replicated(rank, new(), fused_adamw),
        "DDP, fp16, floatline": lambda: replicated(rank, new(), fl.optim.AdamW, half, clip=1.0),
        "DDP, hysteresis": lambda: replicated(rank, fl.LossScaler("cpu", init_scale=1024.0, hysteresis=2), plain_sgd),
        "FSDP2, SGD": lambda: sharded(rank, new(), plain_sgd, mesh),
        "FSDP2, bf16, SGD": lambda: sharded(rank, new(), plain_sgd, mesh, bf16),
        "FSDP2, fp16, floatline": lambda: sharded(rank, new(), fl.optim.AdamW, mesh, half, clip=1.0),
        "gradients on one rank": lambda: uneven(rank, new()),
        "torch: DDP, SGD": lambda: replicated(rank, torchs(), plain_sgd),
    }
    if hasattr(torch.Tensor, "grad_dtype"):
        runs["FSDP2, fp16, unscale_"] = lambda: sharded(rank, new(), fl.optim.AdamW, mesh, half, unscale=True)
        runs["DDP, fp16, unscale_"] = lambda: replicated(rank, new(), fl.optim.AdamW, half, unscale=True)
    if torch.__version__.startswith("2.6."):  # FSDP2 does not run on the CPU there
        runs = {name: make for name, make in runs.items() if "FSDP2" not in name}
    found = {name: make() for name, make in runs.items()}
    found["no gradients"] = nobody(new())
    found["alone"] = alone(rank)
    return found


def work(rank, world, folder):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{folder}/meeting{world}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=250))
    found = checks(rank)
    (Path(folder) / f"{world}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main():
    warnings.simplefilter("ignore")
    # A forked process does not import everything again.
    method = "fork" if "fork" in mp.get_all_start_methods() else "spawn"
    for world in map(int, sys.argv[2:]):
        mp.start_processes(work, (world, sys.argv[1]), nprocs=world, start_method=method)


if __name__ == "__main__":
    main()
