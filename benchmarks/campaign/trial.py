"""The run that faults are planted into: a tiny guarded model, and a witness that the guard knows nothing of."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import floatline as fl
from campaign.plan import Setting
from campaign.plants import Plant
from floatline.errors import LedgerError
from floatline.guard.checkpoints import guard_state
from floatline.guard.guard import Guard
from floatline.plans import Plan, Scaling
from floatline.precision.wrappers import reshard

ROWS = 12
GOES_BACK = fl.Policy(snapshot_gib=0.05, snapshot_every=2, rollback_reach=4, skip_outliers=True, outlier_warmup=8)
PLANS = {
    "fp32": "fp32",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": Plan(name="fp16-mixed", weights="fp32", compute="fp16", scaling=Scaling(init_scale=1024.0)),
    "fp16-true": Plan(name="fp16-true", weights="fp16", compute="fp16", scaling=Scaling(init_scale=1024.0)),
}


class Net(nn.Module):
    """Four modules with a name; dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.act = nn.GELU()
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.dropout(self.act(self.norm(self.first(x)))))


@dataclass(frozen=True)
class Seen:
    """What a witness saw of one step.

    Args:
        loss: Of this process, taken down inside the closure.
        applied: As the guard said.
        reason: As the guard said.
        changed: Whether a bit of the weights is another one.
        weights: Digest of them after the step.
    """

    loss: float
    applied: bool
    reason: str | None
    changed: bool
    weights: str


class Trial:
    """A guarded run of a setting, one step at a time.

    Args:
        setting: What runs.
        rank: This process.
        folder: Run folder; None keeps nothing.
        resume: Go on with its ledger.
        witness: File that takes down each step at once, for a process that is going to be killed.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        rank: int = 0,
        folder: Path | None = None,
        resume: bool = False,
        witness: Path | None = None,
    ) -> None:
        self.setting, self.rank, self.folder, self.witness = setting, rank, folder, witness
        torch.manual_seed(setting.seed)
        self.net = Net().to(torch.float16 if setting.plan == "fp16-true" else torch.float32)
        self.model = _wrap(setting.layout, self.net)
        policy = GOES_BACK if setting.snapshots else None
        self.guard = Guard(
            self.model,
            _optimizer(setting.optimizer, self.model),
            plan=PLANS[setting.plan],
            policy=policy,
            folder=folder,
            resume=resume,
        )
        random.seed(setting.seed)
        torch.manual_seed(1000 + 10 * setting.seed + rank)  # each process drops out other units
        self.place = 0
        self.seen: list[Seen] = []

    def step(self, plant: Plant | None = None, *, skip: bool | None = None) -> Seen:
        """One step with the next batch; an exception leaves the batch out."""
        plant = plant or Plant()
        rows = plant.rows(self.batch(self.place))
        self.place += 1
        losses: list[float] = []

        def compute(piece: tuple[int, tuple[Tensor, Tensor]]) -> Tensor:
            number, (x, y) = piece
            plant.before(number)
            loss = plant.after(number, F.cross_entropy(self.model(x).float(), y))
            losses.append(float(loss.detach()))
            return loss

        before, handles = self.weights(), plant.arm(self.net)
        try:
            if plant.manual:
                with self.guard.autocast():
                    loss = compute((0, rows))
                self.guard.backward(loss)
                plant.gradients(self.net)
                outcome = self.guard.update(skip=skip)
            else:
                cut = zip(rows[0].chunk(plant.pieces), rows[1].chunk(plant.pieces), strict=True)
                outcome = self.guard.step(compute, *enumerate(cut), skip=skip)
        except LedgerError:
            # It is raised behind the step, which is made.
            after = self.weights()
            self.note(Seen(losses[0], before != after, None, before != after, after))
            raise
        finally:
            for handle in handles:
                handle.remove()
        after = self.weights()
        seen = Seen(losses[0], outcome.applied, outcome.reason, before != after, after)
        self.note(seen)
        return seen

    def note(self, seen: Seen) -> None:
        """Take a completed step down, and on the disk where there is a file."""
        self.seen.append(seen)
        if self.witness is not None:
            with self.witness.open("ab", buffering=0) as file:
                file.write(json.dumps(asdict(seen)).encode() + b"\n")

    def batch(self, place: int) -> tuple[Tensor, Tensor]:
        """The rows of this process."""
        dice = torch.Generator().manual_seed(10_000 * self.setting.seed + place)
        x, y = torch.randn(ROWS, 6, generator=dice), torch.randint(0, 4, (ROWS,), generator=dice)
        num = ROWS // self.setting.world
        x = x.to(next(self.net.parameters()).dtype)
        return x[num * self.rank : num * (self.rank + 1)], y[num * self.rank : num * (self.rank + 1)]

    def save(self) -> None:
        """A checkpoint, of all processes together."""
        self.guard.save(self.checkpoints, extra={"place": self.place})

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return (self.folder or Path()) / "checkpoints"

    def load(self, path: Path | None = None) -> None:
        """Go on from the newest checkpoint, or from this one."""
        self.place = self.guard.load(path or self.checkpoints)["place"]

    def resumed(self) -> Trial:
        """Save, end, and go on in a new guard with a new model."""
        self.save()
        self.guard.close()
        again = Trial(self.setting, rank=self.rank, folder=self.folder, resume=True, witness=self.witness)
        again.load()
        again.seen = self.seen
        return again

    def weights(self) -> str:
        """Digest of every bit of the weights of this process."""
        reshard(self.net)
        return _digest(*(guard_state.local(param) for param in self.net.parameters()))

    def digests(self) -> dict[str, str]:
        """Digest of each tensor a step depends on: weights, states, scale, windows, random numbers."""
        tensors = guard_state.live_tensors(self.guard.run)
        # A counter of overflows in a row: a step that was skipped on request has not moved it.
        named = {name: tensor for name, tensor in tensors.items() if name != "judge.overflows"}
        return {name: _digest(tensor) for name, tensor in {**named, "rng": torch.get_rng_state()}.items()}


def run_steps(trial: Trial, last: int, change: Callable[[Trial], None] | None = None) -> Trial:
    """Steps up to this batch."""
    while trial.place < last:
        trial.step()
        if change is not None:
            change(trial)
    return trial


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _wrap(layout: str, net: Net) -> nn.Module:
    if layout == "ddp":
        # Else torch lays its buckets out again after the first step, and a resumed run, whose first step is later,
        # adds the gradients of three processes up in another order.
        return DistributedDataParallel(net, find_unused_parameters=True)
    if layout == "fsdp2":
        fully_shard(net.first)
        fully_shard(net)
    return net


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "floatline":
        return fl.optim.AdamW(model.parameters(), lr=1e-2)
    if name == "fused":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def read_witness(path: Path) -> list[Seen]:
    """What a process saw before it was killed."""
    if not path.exists():
        return []
    return [Seen(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
