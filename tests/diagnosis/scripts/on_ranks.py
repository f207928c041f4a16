"""Trains on several processes, sound or with something wrong: run by torchrun from test_ranks.py."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def wrap(net, kind):
    if kind.startswith("sharded"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    if kind == "apart":
        return net
    model = DistributedDataParallel(net)
    if kind == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def main(kind):
    dist.init_process_group("gloo")
    second = dist.get_rank() == 1
    torch.manual_seed(7)
    model = wrap(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), kind)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    torch.manual_seed(7 + second)
    for step in range(24):
        batch = torch.randn(8, 16)
        odd = second and step == 13
        if odd and kind == "bad batch":
            batch[2, 3] = torch.nan
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch)
        size = 20.0 if odd and kind == "second overflows" else 1.0
        weight = torch.exp(size * torch.ones((), dtype=torch.float16))  # here
        loss = (out.float() - batch[:, :4]).square().mean() + 1e-9 * weight * out.float().mean()
        if kind == "hook" and step == 13:
            loss = loss * 1e6
        (loss if kind != "apart" else loss * (1 + second)).backward()
        if kind == "dies" and odd:
            raise RuntimeError("no space left")
        optimizer.step()
    if dist.get_rank() == 0:
        sys.stdout.write(f"loss {loss.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
