"""Run by test_torchrun.py: Accelerate and the Trainer on two processes, a NaN on the second; JSON from each."""

import json
import math
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate.state import AcceleratorState
from tests.integrations.tiny_trainers import losses, make_regression, make_rows, make_trainer, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from floatline.integrations.accelerate import prepare_accelerator
from floatline.integrations.transformers import prepare_trainer

STEPS, BAD = 6, 3


def make_batch(step):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    if step == BAD and dist.get_rank() == dist.get_world_size() - 1:
        x[0, 0] = math.nan
    return x


def run_loop(*, guarded):
    """Accelerate's loop; the last process gets a NaN in one batch."""
    AcceleratorState._reset_state(False)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
    if guarded:
        prepare_accelerator(accelerator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    skipped = []
    for step in range(STEPS):
        accelerator.backward(0.1 * model(make_batch(step)).float().square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    found = {"skipped": skipped, "weights": weights(model).tolist(), "wrapped": type(model).__name__}
    if guarded:
        found["scale"] = accelerator.scaler.get_scale()
        accelerator.floatline.close()
    return found


def run_trainer(folder):
    """The Trainer hands out rows in turn: of two processes the second gets the odd ones."""
    AcceleratorState._reset_state(True)
    world = dist.get_world_size()
    rows = make_rows(STEPS * world, bad=[BAD * world + world - 1])
    trainer = make_trainer(folder / "trainer", model=make_regression(), rows=rows, max_steps=STEPS, ddp_backend="gloo")
    callback = prepare_trainer(trainer)
    trainer.train()
    return {
        "losses": losses(trainer),
        "weights": weights(trainer.model).tolist(),
        "summary": callback.summary(),
        "advances": trainer.lr_scheduler.last_epoch,
    }


def leave_out_alone():
    """The loop that people write: a process whose loss is not finite goes on to its next batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made, message = [], ""
    try:
        for step in range(STEPS):
            loss = model(make_batch(step)).square().mean()
            if not loss.isfinite():
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            made.append(step)
    except RuntimeError as error:
        message = str(error)
    return {"made": made, "message": message}


def work(rank, folder):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}  # what torchrun tells
    os.environ.update({name: str(value) for name, value in names.items()})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=250)
    )
    found = {
        "guarded": run_loop(guarded=True),
        "plain": run_loop(guarded=False),
        "trainer": run_trainer(folder),
        "alone": leave_out_alone(),  # last: the processes do not meet again
    }
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A forked process does not import everything again.
    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
