"""Two-process data-parallel run in which one rank skips a NaN batch.

Symptom:   one rank logs "NaN loss, skipping batch"; the job goes on, gets worse, and hangs / times out in a collective
           at the end of the epoch (immediately, if the next collective has another shape).
Truth:     `continue` on one rank means it does not take part in the gradient all-reduce of that step: from then on the
           ranks are one step apart, gradients of different steps are averaged, and the last collective has no partner.
           The NaN itself is a data problem; the hang is the desync.
Right fix: agree on skipping across ranks (all-reduce a flag) or let every rank run backward and let the scaler skip.
Wrong fix: longer timeout; FP32; find_unused_parameters=True.
Source:    NVIDIA-NeMo/Automodel#2468
CUDA:      same with NCCL (watchdog timeout).
"""

import datetime
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

TARGET, FP32_TRAINS, FP32_AS_GIVEN = 0.3, False, True


def _rank(rank, path, steps, agree, out):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=6)
    )
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), 0.2)
    g = torch.Generator().manual_seed(85 + rank)
    losses = []
    try:
        for i in range(steps):
            x = torch.randn(16, 3, generator=g)
            if rank == 1 and i == 4:
                x[0] = float("nan")
            loss = (model(x) - x[:, :1]).pow(2).mean()
            bad = torch.tensor(float(not loss.isfinite()))
            if agree:
                dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if bad > 0:
                continue
            opt.zero_grad()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(2)
            opt.step()
            losses.append(float(loss.detach()))
        dist.barrier()  # end of epoch
        torch.save(dict(losses=losses, state=model.state_dict()), f"{out}.{rank}")
    except RuntimeError as e:
        torch.save(dict(error=str(e).splitlines()[0]), f"{out}.{rank}")
    finally:
        os._exit(0)  # do not wait for the other rank in the destructor


def _loop(steps, fp32, probe, agree):
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as tmp:
        out = f"{tmp}/out"
        ps = [
            mp.get_context("spawn").Process(target=_rank, args=(r, f"{tmp}/rdv", steps, agree, out)) for r in range(2)
        ]
        for p in ps:
            p.start()
        for p in ps:
            p.join(60)
            if p.is_alive():
                p.terminate()
        res = [torch.load(f"{out}.{r}") if Path(f"{out}.{r}").exists() else dict(error="rank died") for r in range(2)]
    errors = [r["error"] for r in res if "error" in r]
    if errors:
        raise RuntimeError(errors[0])
    model = nn.Linear(3, 1)
    model.load_state_dict(res[0]["state"])
    return dict(losses=res[0]["losses"], model=model)


def train(steps=30, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=30, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="distributed-desync",
    where="train|085_rank_skips_bad_batch.py:46",
    code="continue",
    op="torch.distributed.all_reduce",
    fix="all-reduce the skip decision so that all ranks skip together",
)
