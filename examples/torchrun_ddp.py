"""DDP under torchrun, guarded: one process gets a bad batch, all skip it, and a second run goes on from a checkpoint.

Run it with: torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py RUN_FOLDER
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
from torch.nn.parallel import DistributedDataParallel

import floatline as fl

STEPS, BAD_STEP, SAVE_EVERY = 40, 12, 20


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


def make_batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Other data on every process; in one step the second process reads garbage."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(32, 16, generator=generator)
    y = x[:, :4].argmax(1)
    if step == BAD_STEP and dist.get_rank() == 1:
        x[0, 0] = float("nan")
    return x.to(device), y.to(device)


def digest(model: nn.Module) -> str:
    """A word for the weights: equal words are equal bits."""
    parts = [param.detach().cpu().numpy().tobytes() for param in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def main() -> None:
    """Train, or go on with what the folder holds."""
    folder = Path(sys.argv[1])
    device = start()
    torch.manual_seed(0)  # the same weights on every process
    network = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    model = DistributedDataParallel(network)
    optimizer = fl.optim.AdamW(model.parameters(), lr=1e-2)
    resume = (folder / "ledger-00000.jsonl").exists()
    dist.barrier()  # all have looked before one of them begins the ledger
    guard = fl.Guard(model, optimizer, plan="fp16-mixed", clip_norm=1.0, folder=folder, resume=resume)
    rates = guard.scheduler(torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS))

    def compute_loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x).float(), y)

    first = guard.load(folder / "checkpoints")["next"] if resume else 0
    last = first + SAVE_EVERY
    with fl.HalfOnCPU():  # FP16 on a CPU; does nothing to a GPU
        for step in range(first, last):
            outcome = guard.step(compute_loss, make_batch(step, device))
            if step == BAD_STEP:
                print(f"process {dist.get_rank()}, step {step}: {outcome}", flush=True)
    guard.save(folder / "checkpoints", extra={"next": last})

    place = f"{rates.last_epoch} of {STEPS} on the schedule"
    print(f"process {dist.get_rank()}: {last} steps, {place}, weights {digest(network)}", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        print(guard.summary())
    guard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
