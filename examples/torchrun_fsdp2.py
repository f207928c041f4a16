"""FSDP2 under torchrun with FP16 weights, guarded: one process gets a bad batch, and all of them skip it.

Run it with: torchrun --standalone --nproc-per-node 2 examples/torchrun_fsdp2.py RUN_FOLDER
"""

import hashlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import floatline as fl

STEPS, BAD_STEP = 30, 12


def start() -> torch.device:
    """Join the other processes; on GPUs where there are any."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # without GPUs: all processes are on this machine
    cuda = torch.cuda.is_available()
    # Longer than the slowest step: the only thing that ends a wait for a process that has died.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=2))
    if not cuda:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def make_batch(step: int, part: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Other data on every process; in one step the second process reads garbage."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
    x = torch.randn(32, 16, generator=generator)
    y = x[:, :4].argmax(1)
    if step == BAD_STEP and dist.get_rank() == 1:
        x[0, 0] = float("nan")
    return x.half().to(device), y.to(device)


def digest(model: nn.Module) -> str:
    """A word for the weights, gathered from all processes: equal words are equal bits."""
    parts = [param.full_tensor().detach().cpu().numpy().tobytes() for param in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def main() -> None:
    """Train a sharded model whose weights have two bytes, and lose no update."""
    folder = Path(sys.argv[1])
    device = start()
    torch.manual_seed(0)  # the same weights on every process
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device, torch.float16)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (model[0], model[2], model):
        fully_shard(block, mesh=mesh)
    optimizer = fl.optim.AdamW(model.parameters(), lr=1e-2)  # 16 more bits beside each weight, sharded as it is
    guard = fl.Guard(model, optimizer, plan="fp16-true", clip_norm=1.0, folder=folder)

    def compute_loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x).float(), y)

    with fl.HalfOnCPU():  # FP16 on a CPU; does nothing to a GPU
        for step in range(STEPS):
            # Two micro-batches: gradients are exchanged once, in the second.
            outcome = guard.step(compute_loss, make_batch(step, 0, device), make_batch(step, 1, device))
            if step == BAD_STEP:
                print(f"process {dist.get_rank()}, step {step}: {outcome}", flush=True)

    print(f"process {dist.get_rank()}: {STEPS} steps, weights {digest(model)}", flush=True)
    guard.save(folder / "checkpoints")  # every process writes its shards
    dist.barrier()
    if dist.get_rank() == 0:
        print(guard.summary())
    guard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
