"""Which faults are planted: every kind with its layouts and share, drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

STEPS = 10
"""Steps of a run; those with a damaged memory take LONG, so that outliers can be told."""
LONG = 24
SAVE_EVERY = 3
LAYOUTS = ("plain", "ddp", "fsdp2")

# Kind, its row in the table, and its share of the campaign in each layout.
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "forward": ("NaN or inf in an output", {"plain": 90, "ddp": 45, "fsdp2": 30}),
    "backward": ("NaN or inf in a gradient, on its way back", {"plain": 90, "ddp": 45, "fsdp2": 30}),
    "reduced": ("NaN or inf in a gradient, after the all-reduce", {"plain": 40, "ddp": 45, "fsdp2": 30}),
    "weight-flip": ("a bit of a weight flips", {"plain": 100, "ddp": 20, "fsdp2": 15}),
    "state-flip": ("a bit of an optimizer state flips", {"plain": 100, "ddp": 20, "fsdp2": 15}),
    "batch": ("a corrupt or empty batch", {"plain": 50, "ddp": 25, "fsdp2": 20}),
    "exception": ("the loss raises, on every rank", {"plain": 50, "ddp": 20, "fsdp2": 15}),
    "lone-exception": ("the loss raises, on one rank", {"ddp": 10, "fsdp2": 5}),
    "kill": ("SIGKILL", {"plain": 20, "ddp": 15, "fsdp2": 10}),
    "term": ("SIGTERM while a checkpoint is written", {"plain": 40, "ddp": 15, "fsdp2": 10}),
    "full-disk": ("full disk", {"plain": 40, "ddp": 15, "fsdp2": 10}),
    "damage": ("a checkpoint is cut, flipped or lost in part", {"plain": 180, "ddp": 25, "fsdp2": 20}),
    "torn-ledger": ("the ledger ends in mid-line", {"plain": 30}),
    "clock": ("the clock jumps", {"plain": 20, "ddp": 10}),
    "two-processes": ("two processes on one run folder", {"plain": 20}),
}
PLANS = ("fp32", "bf16-mixed", "fp16-mixed", "fp16-true")
OPTIMIZERS = ("floatline", "fused", "sgd")


@dataclass(frozen=True)
class Setting:
    """A run that faults are planted into.

    Args:
        layout: plain, ddp or fsdp2.
        world: Processes.
        plan: One of PLANS.
        optimizer: One of OPTIMIZERS.
        seed: Of weights, batches and dropout.
        snapshots: Whether the policy can go back.
    """

    layout: str
    world: int
    plan: str
    optimizer: str
    seed: int
    snapshots: bool


@dataclass(frozen=True)
class Fault:
    """One fault: what, where, when.

    Args:
        number: Its place in the campaign.
        kind: A key of KINDS.
        setting: The run.
        step: The step it strikes, from 0.
        rank: The process it strikes.
        details: What the kind needs besides.
    """

    number: int
    kind: str
    setting: Setting
    step: int
    rank: int
    details: dict[str, Any] = field(default_factory=dict)


def draw_faults(seed: int, num: int, *, only: str | None = None) -> list[Fault]:
    """The faults of a campaign; the same ones for the same numbers.

    Args:
        seed: Of everything that is drawn.
        num: How many; each kind has one at least.
        only: A kind, to plant no other.
    """
    return [draw_fault(seed, number, kind, layout) for number, (kind, layout) in enumerate(_cells(num, only))]


def _cells(num: int, only: str | None) -> list[tuple[str, str]]:
    """Kind and layout of each fault: one of each kind first, then as the shares say."""
    shares = {
        (kind, layout): share
        for kind, (_, layouts) in KINDS.items()
        for layout, share in layouts.items()
        if only in (None, kind)
    }
    counts = dict.fromkeys(shares, 0)
    for turn, kind in enumerate(dict.fromkeys(kind for kind, _ in shares)):
        layouts = [layout for name, layout in shares if name == kind]
        counts[kind, layouts[turn % len(layouts)]] = 1
    while sum(counts.values()) < num:
        counts[max(shares, key=lambda cell: shares[cell] / (counts[cell] + 0.5))] += 1
    return [cell for cell in shares for _ in range(counts[cell])]


def draw_fault(seed: int, number: int, kind: str, layout: str) -> Fault:
    """One fault of a kind."""
    dice = random.Random(f"{seed}-{number}-{kind}-{layout}")
    world = 1 if layout == "plain" else dice.choice((2, 2, 3, 4))
    plan = dice.choice(PLANS)
    optimizer = "floatline" if plan == "fp16-true" else dice.choice(OPTIMIZERS)
    in_memory = kind in ("weight-flip", "state-flip")
    setting = Setting(layout, world, plan, optimizer, dice.randrange(3), in_memory or dice.random() < 0.25)
    # After the first step, because a state must be there; not the last, because the next one must show the harm.
    step = dice.randrange(12, 18) if in_memory else dice.randrange(1, STEPS - 1)
    return Fault(number, kind, setting, step, dice.randrange(world), _details(kind, layout, dice))


def _details(kind: str, layout: str, dice: random.Random) -> dict[str, Any]:
    element = dice.randrange(1 << 20)
    if kind in ("forward", "backward"):
        module = dice.choice(("first", "norm", "act", "head"))
        values = ["nan", "inf", "-inf"]
        if kind == "forward" and module == "head":
            values.remove("-inf")  # a logit of -inf is a mask, not a fault
        return {"module": module, "value": dice.choice(values), "element": element, "resume": dice.random() < 0.5}
    if kind == "reduced":
        value = dice.choice(("nan", "inf", "-inf"))
        return {"param": dice.randrange(6), "value": value, "element": element, "resume": dice.random() < 0.5}
    if kind in ("weight-flip", "state-flip"):
        # Half of them are the sign or the upper bits of the exponent: most of the others cannot be seen by anyone.
        return {
            "tensor": dice.randrange(1 << 20),
            "element": element,
            "bit": dice.random(),
            "high": dice.random() < 0.5,
        }
    if kind == "batch":
        return {"how": dice.choice(("nan", "inf", "empty")), "element": element, "resume": dice.random() < 0.5}
    if kind == "exception":
        error = dice.choice(("RuntimeError", "MemoryError", "KeyboardInterrupt"))
        return {"where": dice.choice(("before", "after", "second")), "error": error, "resume": dice.random() < 0.5}
    if kind == "lone-exception":
        return {"where": dice.choice(("before", "after"))}
    if kind == "kill":
        return {"where": dice.choice(("before", "forward", "backward", "after", "saving"))}
    if kind == "term":
        return {"call": dice.randrange(28), "handler": dice.random() < 0.3}
    if kind == "full-disk":
        target = "checkpoint" if layout != "plain" else dice.choice(("checkpoint", "checkpoint", "ledger"))
        return {"target": target, "room": dice.random()}
    if kind == "damage":
        return {"file": dice.choice(("tensors", "state")), "how": dice.choice(DAMAGES), "where": dice.random()}
    if kind == "torn-ledger":
        return {"where": dice.random()}
    if kind == "clock":
        seconds = dice.choice((-1e9, -3.2e7, -3600.0, -1.0, 1.0, 3600.0, 3.2e7, 1e9))
        return {"seconds": seconds, "resume": dice.random() < 0.5}
    return {"how": dice.choice(("create", "resume", "saving", "at-once"))}


# Where a file is damaged and how: the first bytes, the header, what it holds, the last byte.
DAMAGES = (
    "flip length",
    "flip header",
    "flip middle",
    "flip middle",
    "flip middle",
    "flip last",
    "cut to 0",
    "cut header",
    "cut middle",
    "cut last",
    "append",
    "zeros",
    "delete",
    "older",
    "folder",
)
