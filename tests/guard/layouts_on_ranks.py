"""Used by guard_on_ranks.py: one run on two processes, then one, then four; and the same run twice."""

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import floatline as fl
from floatline.guard.guard import Guard
from floatline.guard.policy import Policy
from floatline.optim import mesh
from floatline.plans import Plan, Scaling

FP16 = Plan(name="fp16", weights="fp32", compute="fp16", scaling=Scaling(init_scale=1024.0))
POLICY = Policy(skip_outliers=True, outlier_warmup=8)
STEPS, ENDS = 20, (7, 13)  # two processes to step 7, one to step 13, four to the end
ROWS = 12
# Step and row of all processes' batch: the process that has the row gets the fault.
NAN_IN_THE_BATCH, INF_IN_THE_BATCH = {2: 11, 14: 0}, {9: 4}
INF_IN_THE_GRADIENT, SPIKE = {5: 6, 16: 3}, {18: 8}


class Net(nn.Module):
    """Shards of unequal size, an empty one among four."""

    def __init__(self, dtype=torch.float32, *, seed=0, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.dropout, self.head = nn.Linear(5, 7), nn.Dropout(dropout), nn.Linear(7, 3)
        self.to(dtype)

    def forward(self, x):
        x = x.to(self.first.weight.dtype)
        return torch.log_softmax(self.head(self.dropout(torch.relu(self.first(x)))).float(), dim=-1)


class Layout:
    """All processes, or, where kind is None, this one by itself."""

    def __init__(self, ranks, kind):
        self.kind = kind
        self.world = 1 if kind is None else dist.get_world_size()
        self.rank = 0 if kind is None else dist.get_rank()
        self.own = slice(ROWS // self.world * self.rank, ROWS // self.world * (self.rank + 1))
        self.alone = ranks.alone

    def guard(self, *, folder=None, resume=False, states="fp32", half=False, **model_options):
        model = Net(torch.float16 if half else torch.float32, **model_options)
        plan = "fp16-true" if half else FP16
        if self.kind == "DDP":
            model = DistributedDataParallel(model)
        if self.kind == "FSDP2":
            fully_shard(model.first)
            fully_shard(model)
        optimizer = fl.optim.AdamW(model.parameters(), lr=0.02, states=states)
        group = self.alone if self.kind is None else None
        return Guard(model, optimizer, plan=plan, policy=POLICY, process_group=group, folder=folder, resume=resume)

    def train(self, guard, first, last):
        """Steps of the run; the same rows are bad whoever has them."""
        outcomes = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 + step)
            x, y = torch.randn(ROWS, 5, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)
            for rows, value in ((NAN_IN_THE_BATCH, math.nan), (INF_IN_THE_BATCH, math.inf)):
                if step in rows:
                    x[rows[step]] = value
            outcomes.append(
                guard.step(lambda rows, s=step: self.loss(guard.model, rows, s), (x[self.own], y[self.own]))
            )
        return outcomes

    def loss(self, model, rows, step):
        out = model(rows[0])
        if self.has(INF_IN_THE_GRADIENT.get(step)):
            out.register_hook(lambda grad: grad * math.inf)
        extra = 50.0 if self.has(SPIKE.get(step)) else 0.0
        return nn.functional.nll_loss(out, rows[1]) + extra

    def has(self, row):
        return row is not None and self.own.start <= row < self.own.stop


def told(guard, outcomes):
    return {
        "reasons": [outcome.reason for outcome in outcomes],
        "scales": [outcome.scale for outcome in outcomes],
        "losses": [outcome.loss for outcome in outcomes],
        "weights": flat(guard.model),
        "attempted": guard.attempts,
        "summary": guard.summary(),
    }


def flat(model):
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1).float() for p in parts]).tolist()


def uninterrupted(ranks, kind, *, half=False):
    layout = Layout(ranks, kind)
    guard = layout.guard(half=half)
    return told(guard, layout.train(guard, 0, STEPS))


def first_leg(ranks, kind, *, half=False):
    """Two processes; what they save, others go on from."""
    layout, folder = Layout(ranks, kind), _folder(ranks, kind, half)
    guard = layout.guard(half=half)
    found = told(guard, layout.train(guard, 0, ENDS[0]))
    guard.save(folder, extra={"place": ENDS[0]})
    return found


def next_legs(ranks, kind, *, half=False):
    """One process goes on, then four."""
    folder, found = _folder(ranks, kind, half), {}
    if ranks.rank == 0:
        layout = Layout(ranks, None)
        guard = layout.guard(half=half, seed=3)
        extra = guard.load(folder)
        found["one, loaded"] = {"weights": flat(guard.model), "extra": extra}
        found["one"] = told(guard, layout.train(guard, *ENDS))
        guard.save(folder)
    dist.barrier()
    layout = Layout(ranks, kind)
    guard = layout.guard(half=half, seed=4)
    guard.load(folder)
    found["offsets"] = [own_offsets(param) for param in guard.optimizer.param_groups[0]["params"]]
    draw = torch.rand(()).item()
    found["four, loaded"] = {"weights": flat(guard.model), "draw": draw}
    found["four"] = told(guard, layout.train(guard, ENDS[1], STEPS))
    guard.load(folder)
    found["four, loaded"]["same draw"] = torch.rand(()).item() == draw
    forgetful = layout.guard(half=half)  # only the weights of the saved run
    forgetful.load(folder)
    forgetful.optimizer.state.clear()
    forgetful.optimizer._roster = None
    found["weights alone"] = told(forgetful, layout.train(forgetful, ENDS[1], STEPS))
    return found


def own_offsets(param):
    """Whether torch and the stand-in for its private function say the same; None of what is not sharded."""
    if not mesh.is_distributed(param):
        return None
    shape, offset = mesh.offsets_of(param)
    return [list(shape), list(offset)] == list(mesh._find_offsets(param.shape, param.device_mesh, param.placements))


def other_kind(ranks):
    """As many processes, replicas in one run and shards in the other."""
    found = {}
    for kind, then in (("DDP", "FSDP2"), ("FSDP2", "DDP")):
        guard = Layout(ranks, then).guard(seed=5)
        guard.load(_folder(ranks, kind, False))
        found[then] = flat(guard.model)
    return found


def blocks(ranks, message_of):
    """8-bit states of sharded weights, saved by all processes and read by one; and those of replicas."""
    found = {}
    for kind in ("FSDP2", "DDP"):
        layout, folder = Layout(ranks, kind), ranks.folder / f"blocks-{kind}-{ranks.world}"
        guard = layout.guard(states="int8")
        layout.train(guard, 0, 2)
        guard.save(folder)
        found[kind] = message_of(lambda f=folder: Layout(ranks, None).guard(states="int8").load(f))
    return found


def twice(ranks, kind):
    """The ledger of a run, of the same run again, and of one with other random numbers; times taken out."""
    ledgers = []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        folder = ranks.folder / f"twice-{kind}-{name}"
        layout = Layout(ranks, kind)
        guard = layout.guard(folder=folder, dropout=0.3)
        torch.manual_seed(10 * seed + ranks.rank)
        layout.train(guard, 0, STEPS)
        guard.close()
        dist.barrier()
        ledgers.append(lines_of(folder))
    return {"same": ledgers[0] == ledgers[1], "other": ledgers[0] == ledgers[2], "lines": len(ledgers[0])}


def lines_of(folder):
    """The lines of a ledger without what names a run and its times."""
    lines = [json.loads(line) for path in sorted(Path(folder).glob("ledger-*.jsonl")) for line in path.open()]
    return [{key: value for key, value in line.items() if key not in ("time", "started", "run_id")} for line in lines]


def _folder(ranks, kind, half):
    return ranks.folder / f"chain-{kind}-{half}"
