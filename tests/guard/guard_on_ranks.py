"""Launched by test_guard_ranks.py with torchrun: guarded runs on several processes, and what each found as JSON."""

import contextlib
import json
import math
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import layouts_on_ranks
import torch
import torch.distributed as dist
from layouts_on_ranks import flat
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import floatline as fl
from floatline.guard.guard import Guard
from floatline.guard.policy import Policy
from floatline.guard.step.layers import count_near_zero, report
from floatline.plans import Plan, Scaling

NAN = float("nan")
KINDS = ("DDP", "FSDP2")
FP16 = Plan(name="fp16", weights="fp32", compute="fp16", scaling=Scaling(init_scale=1024.0))
GOES_BACK = Policy(snapshot_gib=0.1, snapshot_every=2, rollback_reach=2, skip_outliers=True, outlier_warmup=100)


class Net(nn.Module):
    """Shards of unequal size, an empty one among four, and a buffer that holds -inf in a sound state."""

    def __init__(self, seed=0, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 7)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(7, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -math.inf]))

    def forward(self, x):
        logits = self.head(self.dropout(torch.relu(self.first(x)))).float()
        return torch.log_softmax(logits + self.mask, dim=-1)[:, :2]


def wrap(kind, model, group=None):
    if kind == "DDP":
        return DistributedDataParallel(model, process_group=group)
    if kind == "FSDP2":
        fully_shard(model.first)
        fully_shard(model)
    return model


def batch(step, rank=None):
    """Twelve rows; or those of one process."""
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(12, 5, generator=generator), torch.randint(0, 2, (12,), generator=generator)
    if rank is None:
        return x, y
    rows = 12 // dist.get_world_size()
    return x[rows * rank : rows * (rank + 1)], y[rows * rank : rows * (rank + 1)]


def losses(model):
    return lambda rows: nn.functional.nll_loss(model(rows[0]), rows[1])


def adamw(params):
    return fl.optim.AdamW(params, lr=0.05)


def fused(params):
    return torch.optim.AdamW(params, lr=0.05, fused=True)


def sgd(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


OPTIMIZERS = {"floatline": adamw, "fused": fused, "plain": sgd}


class Ranks:
    """The processes of one launch, and a group of its own for each of them."""

    def __init__(self, folder):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.last = self.rank == self.world - 1
        self.folder = Path(folder)
        self.alone = [dist.new_group([r]) for r in range(self.world)][self.rank]

    def guard(self, kind, make=adamw, *, model=None, **options):
        """A guarded model; kind None is one process by itself."""
        model = model or Net()
        model = wrap(kind, model)
        if kind is None:
            options["process_group"] = self.alone
        return Guard(model, make(model.parameters()), **{"plan": "fp32", **options})

    def train(self, guard, steps, *, first=0, change=None):
        """Outcomes of some steps; `change` may spoil the rows of this process."""
        found = []
        for step in range(first, first + steps):
            rows = batch(step, self.rank)
            rows = rows if change is None else change(step, rows)
            found.append(guard.step(losses(guard.model), rows))
        return found


def told(guard, outcomes):
    """What a run came to, as JSON."""
    return {
        "reasons": [outcome.reason for outcome in outcomes],
        "ranks": [list(outcome.ranks) for outcome in outcomes],
        "scales": [outcome.scale for outcome in outcomes],
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "weights": flat(guard.model),
        "summary": guard.summary(),
    }


def nan_in_the_batch(ranks, kind, make, **options):
    def spoil(step, rows):
        return (rows[0] * NAN, rows[1]) if step == 2 and ranks.last else rows

    guard = ranks.guard(kind, make, plan=FP16, **options)
    return told(guard, ranks.train(guard, 5, change=spoil))


def nan_in_a_gradient(ranks, kind, make, **options):
    """In the gradient of one process, before the processes add theirs up."""
    guard = ranks.guard(kind, make, plan=FP16, **options)
    outcomes = []
    for step in range(5):
        model = guard.model

        def compute(rows, model=model, step=step):
            out = model(rows[0])
            if step == 2 and ranks.last:
                out.register_hook(lambda grad: grad * NAN)
            return nn.functional.nll_loss(out, rows[1])

        outcomes.append(guard.step(compute, batch(step, ranks.rank)))
    return told(guard, outcomes)


def nan_after_the_sum(ranks, kind, make, **options):
    """In the gradient of one process, after the processes have added theirs up."""
    guard = ranks.guard(kind, make, plan=FP16, **options)
    model, outcomes = guard.model, []
    for step in range(5):
        with guard.autocast():
            loss = losses(model)(batch(step, ranks.rank))
        guard.backward(loss)
        if step == 2 and ranks.rank == 0:
            grad = next(model.parameters()).grad
            getattr(grad, "to_local", lambda grad=grad: grad)().view(-1)[0] = NAN
        outcomes.append(guard.update())
    return told(guard, outcomes)


def spike(ranks, kind, **options):
    """The loss of one process jumps, and its gradient does not."""
    guard = ranks.guard(kind, policy=Policy(skip_outliers=True, outlier_warmup=8), **options)
    model, outcomes = guard.model, []
    for step in range(14):
        extra = 50.0 if step == 12 and ranks.rank == 1 else 0.0
        compute = losses(model)
        outcomes.append(guard.step(lambda rows, c=compute, e=extra: c(rows) + e, batch(step, ranks.rank)))
    return told(guard, outcomes)


def against_one(ranks, kind, make=adamw, **options):
    """The same eight steps on all processes, and on one with all the rows."""
    guard, one = ranks.guard(kind, make, **options), ranks.guard(None, make, **options)
    found = told(guard, ranks.train(guard, 8))
    return {**found, "one": told(one, [one.step(losses(one.model), batch(step)) for step in range(8)])}


def micro_batches(ranks, kind, *, weighted=False):
    """Rows in pieces, of unequal size where they are weighted, against one process with all of them."""
    guard, one = ranks.guard(kind), ranks.guard(None)
    compute, alone = losses(guard.model), losses(one.model)
    outcomes, alone_outcomes = [], []
    for step in range(6):
        if weighted:
            first = 1 if ranks.rank == 0 else 2
            pieces = cut(batch(step, ranks.rank), [first, 12 // ranks.world - first])
            outcome = guard.step(lambda rows: (compute(rows), float(len(rows[0]))), *pieces)
        else:
            outcome = guard.step(compute, *cut(batch(step, ranks.rank), [12 // ranks.world // 3] * 3))
        outcomes.append(outcome)
        alone_outcomes.append(one.step(alone, batch(step)))
    return {**told(guard, outcomes), "one": told(one, alone_outcomes)}


def cut(rows, sizes):
    return list(zip(rows[0].split(sizes), rows[1].split(sizes), strict=True))


def meetings(ranks, kind):
    """Numbers in each all-reduce of one step, besides those of gradients; and how often gradients are exchanged."""
    guard = ranks.guard(kind)
    model, compute = guard.model, losses(guard.model)
    pieces = cut(batch(0, ranks.rank), [12 // ranks.world // 3] * 3)
    guard.step(compute, *pieces)  # the first step may allocate
    with all_reduces() as sizes:
        guard.step(compute, *pieces)
    with all_reduces() as weighted:
        guard.step(lambda rows: (compute(rows), 1.0), *pieces)
    exchanges, unsynced = [], []
    if kind == "DDP":
        model.register_comm_hook(None, lambda _, bucket: exchanges.append(1) or allreduce_hook(None, bucket))
    else:
        params = guard.optimizer.param_groups[0]["params"]
        compute = lambda rows: unsynced.append(all(p.grad is None for p in params)) or losses(model)(rows)  # noqa: E731
    guard.step(compute, *pieces)
    return {"sizes": sizes, "weighted": weighted, "exchanges": len(exchanges), "unsynced": unsynced}


@contextlib.contextmanager
def all_reduces():
    sizes, real = [], dist.all_reduce

    def count(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = count
    try:
        yield sizes
    finally:
        dist.all_reduce = real


def half_a_step(ranks, kind):
    """On every process the second micro-batch raises; the next step must know nothing of the first."""
    guard, other = ranks.guard(kind), ranks.guard(kind)
    model = guard.model

    def compute(rows):
        if len(rows[0]) == 1:
            raise RuntimeError("a bad file")
        return losses(model)(rows)

    message = message_of(lambda: guard.step(compute, *cut(batch(0, ranks.rank), [12 // ranks.world - 1, 1])))
    found, expected = told(guard, ranks.train(guard, 2)), told(other, ranks.train(other, 2))
    return {"message": message, "same": found == expected}


def rows_of_unequal_ranks(ranks, kind, *, weighted=True):
    """Weights say how many rows each process has; against one process with all of them."""
    guard, one = ranks.guard(kind), ranks.guard(None)
    model, outcomes, alone = guard.model, [], []
    bounds = [0, *(2 * r + 1 for r in range(1, ranks.world)), 12]
    for step in range(6):
        x, y = batch(step)
        own = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
        compute = (lambda rows: (losses(model)(rows), len(rows[0]))) if weighted else losses(model)
        outcomes.append(guard.step(compute, (x[own], y[own])))
        alone.append(one.step(losses(one.model), (x, y)))
    return {**told(guard, outcomes), "one": told(one, alone)}


def damaged_weights(ranks, kind):
    """A weight of the second process becomes NaN; what all of them do about it."""
    guard = ranks.guard(kind, policy=GOES_BACK, model=Net(dropout=0.3))
    outcomes = ranks.train(guard, 9)
    if ranks.rank == 1:
        with torch.no_grad():
            weight = guard.optimizer.param_groups[0]["params"][0]
            getattr(weight, "to_local", lambda: weight)().detach().view(-1)[0] = NAN
    outcomes += ranks.train(guard, 6, first=9)
    return {**told(guard, outcomes), "event": str(guard.accounts.last_event)}


def overflowing_module(ranks, kind):
    """The rows of the second process leave FP16's range in the first layer; without clipping they would blow up."""
    guard = ranks.guard(kind, make=sgd, plan=FP16, policy=GOES_BACK, clip_norm=1.0)

    def enlarge(step, rows):
        return (rows[0] * 3e5, rows[1]) if ranks.rank == 1 else rows

    outcomes = ranks.train(guard, 14, change=enlarge)
    return {**told(guard, outcomes), "islands": list(guard.run.islands.names), "plan": guard.plan.compute}


def lost_gradients(ranks, kind):
    """Gradients are near zero: all of DDP's, and those that half of the processes hold of FSDP2's."""
    guard = ranks.guard(kind, plan=FP16, policy=Policy(underflow_every=2))
    model = guard.model
    with guard.autocast():
        loss = losses(model)(batch(0, ranks.rank))
    guard.backward(loss)
    guard.update()
    with guard.autocast():
        loss = losses(model)(batch(1, ranks.rank))
    guard.backward(loss)
    torch.manual_seed(0)
    names, grads = [], []
    for name, param in model.named_parameters():
        grad = getattr(param.grad, "to_local", lambda param=param: param.grad)()
        if kind == "DDP" or ranks.rank < ranks.world // 2:
            grad.copy_(2.0**-24 / ranks.world * torch.randint(0, 4, grad.shape))
        names.append(name)
        grads.append(grad)
    counts = count_near_zero(grads, smallest=2.0**-24 / ranks.world)
    own = report(names, counts, [grad.numel() for grad in grads], policy=Policy())
    return {**told(guard, [guard.update()]), "scale": float(guard.scale), "own": own.share}


def resumed(ranks, kind, make):
    """Ten steps in one go; and five, a checkpoint, and five more with everything made again."""
    folder = ranks.folder / f"resumed-{kind}-{make.__name__}-{ranks.world}"

    def begin(seed):
        guard = ranks.guard(kind, make, plan=FP16, model=Net(seed, dropout=0.5), folder=None)
        guard.scheduler(torch.optim.lr_scheduler.StepLR(guard.optimizer, 3, 0.5))
        torch.manual_seed(1000 + ranks.rank)
        return guard

    whole = begin(0)
    expected = told(whole, ranks.train(whole, 10))
    first = begin(0)
    ranks.train(first, 5)
    first.save(folder, extra={"place": 5})
    second = begin(7)
    torch.manual_seed(0)
    extra = second.load(folder)
    again = told(second, ranks.train(second, 5, first=5))
    lists = ("reasons", "ranks", "scales", "losses", "norms")
    expected = {name: v[5:] if name in lists else v for name, v in expected.items()}
    same_seed = begin(0)
    same_seed.load(folder)
    torch.manual_seed(0)
    return {
        "same": again == expected,
        "extra": extra,
        "other numbers differ": told(same_seed, ranks.train(same_seed, 5, first=5)) != expected,
        "draw": torch.rand(()).item(),
    }


def message_of(call):
    try:
        call()
    except fl.GuardStop as stop:
        return f"GuardStop: {stop}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def odd_folders(ranks):
    """A folder that holds nothing, and one with what an older run has left."""
    stale = ranks.folder / f"stale-{ranks.world}"
    if ranks.rank == 0:
        (stale / "rank-00009").mkdir(parents=True)
    ranks.guard("DDP").save(stale)
    found = {"beside an older run's": message_of(lambda: ranks.guard("DDP").load(stale))}
    found["none"] = message_of(lambda: ranks.guard("DDP").load(ranks.folder / "nothing"))
    part = sorted((stale / "rank-00000").glob("checkpoint-*"))[-1]
    found["a part"] = message_of(lambda: ranks.guard(None).load(part))
    return found


def torn_checkpoints(ranks):
    """A process that cannot write, one that cannot read, and one that died before it had written the last."""
    found, folder = {}, ranks.folder / f"torn-{ranks.world}"
    guard = ranks.guard("DDP")
    ranks.train(guard, 1)
    guard.save(folder)
    ranks.train(guard, 1, first=1)
    guard.save(folder)
    if ranks.rank == 1:
        newest = sorted((folder / "rank-00001").glob("checkpoint-*"))[-1]
        newest.rename(folder / "lost")
    dist.barrier()
    again = ranks.guard("DDP")
    again.load(folder)
    found["attempts"] = again.attempts
    if ranks.rank == 1:
        (sorted((folder / "rank-00001").glob("checkpoint-*"))[-1] / "state.json").write_text("{}")
    dist.barrier()
    found["damaged on one"] = message_of(lambda: ranks.guard("DDP").load(folder))
    full = ranks.folder / f"full-{ranks.world}"
    if ranks.rank == 1:
        full.mkdir()
        (full / "rank-00001").write_text("in the way")
    dist.barrier()
    found["not written on one"] = message_of(lambda: guard.save(full))
    return found


def stopped(ranks, kind):
    """NaN on one process, until the policy ends the run."""
    folder = ranks.folder / f"stopped-{kind}-{ranks.world}"
    guard = ranks.guard(kind, policy=Policy(most_bad=3), folder=folder)
    ranks.train(guard, 3)
    message = message_of(
        lambda: ranks.train(guard, 5, first=3, change=lambda _, r: (r[0] * (NAN if ranks.last else 1.0), r[1]))
    )
    found = {"message": message, "attempts": guard.attempts, "writes": guard.ledger is not None}
    found["summary"] = guard.accounts.summary()
    guard.close()
    dist.barrier()
    found["recorded"] = len(fl.Ledger.read(folder))
    again = ranks.guard(kind)
    again.load(folder / "stopped")
    found["resumed at"] = again.attempts
    return found


def names(ranks):
    """A plan and an average speak of the model's own names, which DDP puts a word in front of."""
    plan = Plan(name="p", weights="fp32", compute="bf16", fp32_modules=[{"pattern": "head", "reason": "a test"}])
    guard = ranks.guard("DDP", plan=plan, record_layers_every=1)
    average, plain = guard.averaged(0.5), Net(seed=3)
    outcome = ranks.train(guard, 1)[0]
    average.copy_to(plain)
    moved = flat(plain) != flat(Net(seed=3))
    return {"islands": list(guard.run.islands.names), "layers": list(outcome.layer_norms), "average": moved}


def left_alone(ranks):
    """The closure of one process raises, and that process does not end: when the others hear of it."""
    seconds = 5
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    model = DistributedDataParallel(Net(), process_group=group)
    guard = Guard(model, adamw(model.parameters()), plan="fp32", process_group=group)
    ranks.train(guard, 2)

    def compute(rows):
        if ranks.last:
            raise RuntimeError("this process's data is gone")
        return losses(model)(rows)

    dist.barrier()  # else one that is late is taken for one that does not come
    message = message_of(lambda: guard.step(compute, batch(2, ranks.rank)))
    left = [param.grad is None for param in model.parameters()]
    return {"message": message, "no gradients left": all(left)}


def checks(ranks):
    runs = {}
    makes = OPTIMIZERS if ranks.world == 2 else {"floatline": adamw}
    for kind in kinds_here():
        for name, make in makes.items():
            runs[f"NaN in the batch: {kind}, {name}"] = lambda k=kind, m=make: nan_in_the_batch(ranks, k, m)
            runs[f"NaN in a gradient: {kind}, {name}"] = lambda k=kind, m=make: nan_in_a_gradient(ranks, k, m)
            runs[f"NaN after the sum: {kind}, {name}"] = lambda k=kind, m=make: nan_after_the_sum(ranks, k, m)
            runs[f"resumed: {kind}, {name}"] = lambda k=kind, m=make: resumed(ranks, k, m)
        runs |= {
            f"spike: {kind}": lambda k=kind: spike(ranks, k),
            f"whole batch: {kind}": lambda k=kind: against_one(ranks, k),
            f"weighted micro-batches: {kind}": lambda k=kind: micro_batches(ranks, k, weighted=True),
            f"unequal ranks: {kind}": lambda k=kind: rows_of_unequal_ranks(ranks, k),
            f"meetings: {kind}": lambda k=kind: meetings(ranks, k),
            f"half a step: {kind}": lambda k=kind: half_a_step(ranks, k),
            f"damaged weights: {kind}": lambda k=kind: damaged_weights(ranks, k),
            f"overflowing module: {kind}": lambda k=kind: overflowing_module(ranks, k),
            f"lost gradients: {kind}": lambda k=kind: lost_gradients(ranks, k),
            f"stopped: {kind}": lambda k=kind: stopped(ranks, k),
        }
        if ranks.world == 2:
            by_one = {"clip_norm": 0.02, "norm_type": 1.0}
            runs[f"micro-batches: {kind}"] = lambda k=kind: micro_batches(ranks, k)
            runs[f"clipped by 1-norm: {kind}"] = lambda k=kind, o=by_one: against_one(ranks, k, sgd, **o)
            runs[f"clipped by value: {kind}"] = lambda k=kind: against_one(ranks, k, sgd, clip_value=0.01)
        else:
            by_inf = {"clip_norm": 0.02, "norm_type": math.inf}
            runs[f"clipped by inf-norm: {kind}"] = lambda k=kind, o=by_inf: against_one(ranks, k, sgd, **o)
    if ranks.world == 2:
        runs["names"] = lambda: names(ranks)
    apart = {"process_group": ranks.alone}
    runs["each by itself: NaN in the batch"] = lambda: nan_in_the_batch(ranks, "DDP", adamw, **apart)
    runs["each by itself: NaN after the sum"] = lambda: nan_after_the_sum(ranks, "DDP", adamw, **apart)
    runs["each by itself: spike"] = lambda: spike(ranks, "DDP", **apart)
    runs["unequal ranks without weights"] = lambda: rows_of_unequal_ranks(ranks, "DDP", weighted=False)
    runs["odd folders"] = lambda: odd_folders(ranks)
    runs |= layout_checks(ranks)
    runs["torn checkpoints"] = lambda: torn_checkpoints(ranks)
    runs["left alone"] = lambda: left_alone(ranks)
    return runs


def layout_checks(ranks):
    runs = {}
    kinds = kinds_here()
    for kind in kinds:
        for half in (False, True):
            name = f"{kind}, {'half' if half else 'single'}"
            leg = layouts_on_ranks.first_leg if ranks.world == 2 else layouts_on_ranks.next_legs
            runs[f"legs: {name}"] = lambda k=kind, h=half, leg=leg: leg(ranks, k, half=h)
            runs[f"uninterrupted: {name}"] = lambda k=kind, h=half: layouts_on_ranks.uninterrupted(ranks, k, half=h)
        if ranks.world == 2:
            runs[f"twice: {kind}"] = lambda k=kind: layouts_on_ranks.twice(ranks, k)
    for half in (False, True):
        name = "half" if half else "single"
        runs[f"uninterrupted: one, {name}"] = lambda h=half: layouts_on_ranks.uninterrupted(ranks, None, half=h)
    if ranks.world == 2 and len(kinds) == 2:
        runs["other kind"] = lambda: layouts_on_ranks.other_kind(ranks)
        runs["8-bit blocks"] = lambda: layouts_on_ranks.blocks(ranks, message_of)
    return runs


def kinds_here():
    return KINDS[: 1 if torch.__version__.startswith("2.6.") else 2]


def raises(ranks):
    """The closure of one process raises, and the process ends."""
    guard = ranks.guard("DDP")
    ranks.train(guard, 2)

    def compute(rows):
        if ranks.last:
            raise RuntimeError("this process's data is gone")
        return losses(guard.model)(rows)

    guard.step(compute, batch(2, ranks.rank))


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=250))
    ranks = Ranks(sys.argv[1])
    if sys.argv[2:] == ["raises"]:
        raises(ranks)
    found = {name: check() for name, check in checks(ranks).items() if all(word in name for word in sys.argv[2:])}
    path = ranks.folder / f"{ranks.world}-{ranks.rank}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
