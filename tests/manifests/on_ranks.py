"""Trains on several processes, in one of several ways: run by torchrun from test_ranks.py."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

BY_LOOP = ("other weights", "BF16 weights by the loop")


def squeeze(_, bucket):
    """A hook whose name says nothing; torch's own for BF16 wants NCCL."""
    small = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
    summed = dist.all_reduce(small, async_op=True).get_future()
    return summed.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def wrap(net, kind):
    if kind in (*BY_LOOP, "alone"):
        return net
    if kind in ("reduced in BF16", "reduced in FP32"):
        dtype = torch.bfloat16 if kind.endswith("BF16") else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
        return fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    model = DistributedDataParallel(net)
    if kind == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    if kind == "own hook":
        model.register_comm_hook(None, squeeze)
    return model


def main(kind):
    dist.init_process_group("gloo")
    second = dist.get_rank() == 1
    torch.manual_seed(int(second) if kind == "other weights" else 7)
    if kind == "reduced in FP32":  # as most runs do: it is told, and nothing is wrong with it
        torch.manual_seed(7 + dist.get_rank())
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    if kind in ("BF16 weights", "BF16 weights by the loop"):
        net.to(torch.bfloat16)
    if kind == "switch" and second:
        torch.set_float32_matmul_precision("high")
    model = wrap(net, kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "nan")
    for _ in range(3):
        batch = torch.randn(8, 16, dtype=net[0].weight.dtype if kind.startswith("BF16") else None)
        if kind == "nan" and second:
            batch[0, 0] = torch.nan
        if kind == "dies" and second:
            raise RuntimeError("no space left")
        optimizer.zero_grad()
        scaler.scale(model(batch).float().square().mean()).backward()
        if kind in BY_LOOP:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main(sys.argv[1])
