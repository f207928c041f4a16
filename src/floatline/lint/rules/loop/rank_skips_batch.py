"""FL204: one rank leaves out a batch that the others train on."""

from __future__ import annotations

from floatline.causes.elsewhere import DISTRIBUTED_DESYNC
from floatline.lint.reading.loop import Unit
from floatline.lint.reading.tensors import asks_for_finite
from floatline.lint.rules.loop import LoopRule

_SIGNS = (
    "torch.distributed",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed",
    "accelerate.Accelerator",
)


class RankSkipsBatch(LoopRule):
    """Flags `continue` on a loss that is not finite, before the backward pass of a distributed run.

    ## Why is this bad?
    The backward pass holds the all-reduce of the gradients. A rank that leaves it out joins the next one instead: from
    then on gradients of different steps are averaged, and the last collective has no partner and hangs.
    """

    code = "FL204"
    name = "rank-skips-batch"
    cause = DISTRIBUTED_DESYNC
    message = (
        "a rank that takes this `continue` alone leaves out an all-reduce: the ranks are one step apart, and then hang"
    )
    advice = "all-reduce the flag and skip on every rank; or run backward on all, and let scaler.step skip"
    good = (
        """
import torch
for x, y in batches:
    loss = loss_fn(model(x), y)
    if not torch.isfinite(loss):
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
import torch.distributed as dist
for x, y in batches:
    loss = loss_fn(model(x), y)
    bad = (~torch.isfinite(loss)).float()
    dist.all_reduce(bad)
    if bad > 0:
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
for x, y in batches:
    if len(x) == 0:
        continue
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import torch
import torch.distributed as dist
for x, y in batches:
    loss = loss_fn(model(x), y)
    loss.backward()
    if not torch.isfinite(global_norm(model)):
        continue
    optimizer.step()
    optimizer.zero_grad()
""",
    )
    bad = (
        """
import torch
import torch.distributed as dist
for x, y in batches:
    loss = loss_fn(model(x), y)
    if not torch.isfinite(loss):
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        """
import math
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(model)
def train(scaler, optimizer):
    for x, y in batches:
        loss = loss_fn(model(x), y)
        value = loss.item()
        if not math.isfinite(value):
            print("skipped")
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
for batch in loader:
    loss = model(**batch).loss
    if torch.isnan(loss).any():
        continue
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
""",
    )

    def visit_unit(self, unit: Unit) -> None:
        """A way that ends before any backward pass, on the word of one rank."""
        if not unit.is_loop or not any(path.startswith(_SIGNS) for path in self.source.aliases.values()):
            return
        for way in unit.ways:
            if way.ending != "continue" or way.at is None:
                continue
            if any(event.kind in ("backward", "agree") for event in way.events):
                continue
            if any(asks_for_finite(self.source, test) for test in way.tests):
                self.report(way.at)
