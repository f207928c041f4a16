"""Planted faults: what a guarded run, and the loops people write, make of them.

A 400-step small GPT in FP16 (autocast), several seeds. "+x %": the validation loss against the FP32 run of the same
seed, by the plain loop and without a fault. Plain loops advance the schedule with every batch; the guard with every
applied step. Every run ends where its schedule ends, so the guard takes new batches in place of those that it skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from tiny_gpt import GPT, SYMBOLS, crops, cross_entropy, make_text
from torch import Tensor, nn

import floatline as fl
from floatline.guard.policy import POLICIES
from floatline.numerics import cuda_autocast_lists
from floatline.plans import Scaling
from floatline.plans.presets import resolve_plan

STEPS, BATCH, LR, CLIP = 400, 32, 2e-3, 1.0
MOST_ATTEMPTS = 3 * STEPS
SAFE = POLICIES["safe"]


class Batch(NamedTuple):
    """A batch and its number, so that a closure that runs again does the same again."""

    number: int
    tokens: Tensor


@dataclass(frozen=True)
class Row:
    """A fault: what is done to batches, weights or loss, and when. Batches are numbered from 0."""

    title: str
    tokens: Callable[[int, Tensor], Tensor] | None = None
    weights: Callable[[int, GPT], None] | None = None
    loss: Callable[[int, Tensor, GPT], Tensor] | None = None
    second_text_from: int | None = None  # from this batch on, and for validation: another language
    part_of_task: bool = False  # the reference run has it too
    scaling: Scaling = field(default_factory=Scaling)
    policy: fl.Policy = SAFE


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    loss: float
    attempts: int
    applied: int
    scale: float = 1.0
    events: tuple[str, ...] = ()
    stop: str = ""


# ---- faults ----------------------------------------------------------------------------------------------------------


def between(first: int, num: int) -> range:
    """Numbers of `num` batches."""
    return range(first, first + num)


def garbage(when: range) -> Callable[[int, Tensor], Tensor]:
    """Batches of random characters."""

    def plant(number: int, tokens: Tensor) -> Tensor:
        if number not in when:
            return tokens
        dice = torch.Generator().manual_seed(number)
        return torch.randint(0, SYMBOLS, tokens.shape, generator=dice).to(tokens.device)

    return plant


def flip_bit(when: int, bit: int) -> Callable[[int, GPT], None]:
    """One bit of one gain: the largest below 1 in the norms of the blocks."""

    def plant(number: int, model: GPT) -> None:
        if number != when:
            return
        norms = [norm.weight.data for block in model.blocks for norm in (block.norm1, block.norm2)]
        below = [torch.where(gains < 1, gains, 0).max() for gains in norms]
        gains = norms[int(torch.stack(below).argmax())]
        gains.view(torch.int32)[int(torch.where(gains < 1, gains, 0).argmax())] ^= 1 << bit

    return plant


def multiply_gain(when: int, factor: float) -> Callable[[int, GPT], None]:
    """One gain of the first block's norm."""

    def plant(number: int, model: GPT) -> None:
        if number == when:
            model.blocks[0].norm1.weight.data[0] *= factor

    return plant


def nan_weight(*when: int) -> Callable[[int, GPT], None]:
    """NaN in one weight."""

    def plant(number: int, model: GPT) -> None:
        if number in when:
            model.blocks[0].qkv.weight.data[0, 0] = math.nan

    return plant


def nan_loss(when: range) -> Callable[[int, Tensor, GPT], Tensor]:
    """A forward pass that gives NaN, as a broken input does."""
    return lambda number, loss, _: loss * math.nan if number in when else loss


def nan_gradient(when: range) -> Callable[[int, Tensor, GPT], Tensor]:
    """Adds 0 with the derivative NaN: the square root of a distance that is 0."""

    def plant(number: int, loss: Tensor, model: GPT) -> Tensor:
        if number not in when:
            return loss
        weight = model.blocks[0].qkv.weight[0, 0]
        return loss + (weight - weight.detach()).square().sqrt()

    return plant


def overflowing_block(when: int) -> Callable[[int, GPT], None]:
    """From here on the second block's MLP works with numbers beyond FP16's range, and gives the same in FP32."""

    def plant(number: int, model: GPT) -> None:
        model.blocks[1].mlp.boost = 2.0**20 if number >= when else 1.0

    return plant


def small_gradients(factor: float) -> dict[str, Any]:
    """A loss in a small unit, and a scale that starts at 1: part of the task, and of the reference run."""
    return {
        "loss": lambda _, loss, __: loss * factor,
        "part_of_task": True,
        "scaling": Scaling(init_scale=1.0),
        "policy": replace(SAFE, underflow_every=10),
    }


ROWS: dict[str, Row] = {
    "none": Row("no fault"),
    "garbage": Row("20 garbage batches", tokens=garbage(between(200, 20))),
    "gain": Row("a norm gain × 256", weights=multiply_gain(200, 256.0)),
    "flip": Row("top exponent bit of a norm gain (× 2¹²⁸)", weights=flip_bit(200, 30)),
    "nan-weight": Row("NaN in a weight", weights=nan_weight(200)),
    "nan-batches": Row("150 forward-NaN batches", loss=nan_loss(between(100, 150))),
    "nan-gradient": Row("one NaN gradient", loss=nan_gradient(between(200, 1))),
    "nan-gradients": Row(
        "150 NaN gradients in a row, then healthy ones",
        loss=nan_gradient(between(100, 150)),
        policy=replace(SAFE, collapse_after=200),
    ),
    "escalation": Row("a block that overflows FP16 for good", weights=overflowing_block(200)),
    "lr-cut": Row("NaN in a weight, three times", weights=nan_weight(150, 200, 250)),
    "budget": Row("NaN in a weight every 40 batches", weights=nan_weight(*range(100, MOST_ATTEMPTS, 40))),
    "regime": Row("the text changes for good", second_text_from=200, part_of_task=True),
    "underflow": Row("gradients too small for FP16 (loss × 2⁻⁷)", **small_gradients(2.0**-7)),
    "silent": Row("gradients far too small (loss × 2⁻¹²)", **small_gradients(2.0**-12)),
    "collapse": Row("no finite gradient from here on", loss=nan_gradient(range(200, MOST_ATTEMPTS))),
}

# ---- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Model, optimizer settings and data of one run."""

    row: Row
    seed: int
    device: str

    def model(self) -> GPT:
        """A new model, the same for every arm."""
        torch.manual_seed(self.seed)
        return GPT().to(self.device)

    def texts(self) -> tuple[Tensor, Tensor]:
        """Of training, up to the change and behind it; the second is the one that is validated on."""
        first = make_text(self.seed, 200_000)
        return first, first if self.row.second_text_from is None else make_text(self.seed + 1000, 200_000)

    def batches(self) -> Iterator[Batch]:
        """Without end, with the row's faults in them."""
        first, second = self.texts()
        dice = torch.Generator().manual_seed(self.seed)
        change = self.row.second_text_from
        for number in itertools.count():
            text = first if change is None or number < change else second
            tokens = crops(text[20_000:], BATCH, dice).to(self.device)
            yield Batch(number, tokens if self.row.tokens is None else self.row.tokens(number, tokens))

    def loss(self, model: GPT) -> Callable[[Batch], Tensor]:
        """The closure of a step."""

        def compute(batch: Batch) -> Tensor:
            loss = cross_entropy(model, batch.tokens)
            return loss if self.row.loss is None else self.row.loss(batch.number, loss, model)

        return compute

    def plant(self, number: int, model: GPT) -> None:
        """What happens to the weights before a batch."""
        if self.row.weights is not None:
            self.row.weights(number, model)

    @torch.no_grad()
    def validate(self, model: GPT) -> float:
        """Loss in FP32 on text that was not trained on."""
        tokens = crops(self.texts()[1][:20_000], 256, torch.Generator().manual_seed(0)).to(self.device)
        return float(cross_entropy(model, tokens))


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """20 steps of warm-up, then half a cosine."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * min(step / STEPS, 1.0)))
    )


Rule = Callable[[float, float], float | None]


def plain(task: Task, rule: Rule, *, half: bool = True) -> Result:
    """The loop people write: autocast, GradScaler, clip; a rule says what to clip to, or None to skip."""
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    rates = schedule(optimizer)
    init = task.row.scaling.init_scale
    scaler = torch.amp.GradScaler(task.device, init_scale=init, enabled=half)
    compute = task.loss(model)
    applied = 0
    for batch in itertools.islice(task.batches(), STEPS):
        task.plant(batch.number, model)
        with torch.autocast(task.device, dtype=torch.float16, enabled=half):
            loss = compute(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        bound = rule(float(loss.detach()), float(norm))
        if bound is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), bound, norm)
            scaler.step(optimizer)
            applied += math.isfinite(norm)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        rates.step()
    return Result(task.validate(model), STEPS, applied, scaler.get_scale())


def guarded(task: Task) -> Result:
    """floatline's guard."""
    model = task.model()
    optimizer = fl.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    plan = resolve_plan("fp16-mixed").model_copy(update={"scaling": task.row.scaling})
    guard = fl.Guard(model, optimizer, plan=plan, clip_norm=CLIP, policy=task.row.policy)
    events = listen(guard)
    rates = guard.scheduler(schedule(optimizer))
    compute = task.loss(model)
    stop = ""
    try:
        for batch in itertools.islice(task.batches(), MOST_ATTEMPTS):
            task.plant(batch.number, model)
            guard.step(compute, batch)
            if rates.last_epoch >= STEPS:
                guard.drain()
            if rates.last_epoch >= STEPS:
                break
    except fl.GuardStop as error:
        stop = str(error)
    account = guard.accounts.run
    return Result(task.validate(model), guard.attempts, account.applied, float(guard.scale), tuple(events), stop)


def listen(guard: fl.Guard) -> list[str]:
    """What the guard notes besides steps, as it happens."""
    events: list[str] = []
    diary = guard.run.diary
    note = diary.note

    def heard(event: str, message: str, **values: float) -> None:
        events.append(f"after batch {guard.attempts - 1}: {event}: {message}")
        note(event, message, **values)

    diary.note = heard
    return events


# ---- the other columns -----------------------------------------------------------------------------------------------


def clip_only() -> Rule:
    """Norm 1, always; non-finite gradients are the scaler's business."""
    return lambda _loss, _norm: CLIP


def skip_above_two() -> Rule:
    """A fixed limit; NaN is above it, too."""
    return lambda _loss, norm: CLIP if norm <= 2 else None


def zclip(*, alpha: float = 0.97, limit: float = 2.5, warmup: int = 25) -> Rule:
    """ZClip (arXiv:2504.02507) as published, with its default bound of 1 on top.

    Beyond `limit` standard deviations above the moving average the norm is clipped to mean + limit² std / z, and what
    it was clipped to enters the averages.
    """
    first: list[float] = []
    mean = var = math.nan

    def rule(_loss: float, norm: float) -> float:
        nonlocal mean, var
        if len(first) < warmup:
            first.append(norm)
            if len(first) == warmup:
                mean = sum(first) / warmup
                var = sum((x - mean) ** 2 for x in first) / warmup
            return CLIP
        deviation = math.sqrt(var)
        z = (norm - mean) / (deviation + 1e-6)
        kept = mean + limit * deviation / (z / limit) if z > limit else norm
        mean = alpha * mean + (1 - alpha) * kept
        var = alpha * var + (1 - alpha) * (kept - mean) ** 2
        return min(kept, CLIP)

    return rule


def skip_six_sigma(*, window: int = 128, limit: float = 6.0) -> Rule:
    """OLMo-core's SkipStepOptimizer: skip beyond 6 standard deviations of the last 128 steps, all of which count."""
    losses: deque[float] = deque(maxlen=window + 1)
    norms: deque[float] = deque(maxlen=window + 1)

    def score(values: deque[float]) -> float:
        deviation, mean = torch.std_mean(torch.tensor(list(values)[:-1]))
        return float((values[-1] - mean).abs() / deviation)

    def rule(loss: float, norm: float) -> float | None:
        losses.append(loss)
        norms.append(norm)
        if len(losses) < max(20, window // 2):
            return CLIP
        return CLIP if score(losses) <= limit and score(norms) <= limit else None

    return rule


ARMS: dict[str, Callable[[Task], Result]] = {
    "plain scaler + clip": lambda task: plain(task, clip_only()),
    "this guard": guarded,
    "skip norm > 2": lambda task: plain(task, skip_above_two()),
    "ZClip": lambda task: plain(task, zclip()),
    "OLMo-style skip": lambda task: plain(task, skip_six_sigma()),
}
REFERENCE = "FP32"

# ---- the table -------------------------------------------------------------------------------------------------------


def run(job: tuple[str, str, int, str]) -> tuple[tuple[str, str, int], Result]:
    """One run in a process of its own."""
    name, arm, seed, device = job
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    row = ROWS[name]
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(fl.HalfOnCPU())
            stack.enter_context(cuda_autocast_lists())
        if arm == REFERENCE:
            result = plain(Task(row if row.part_of_task else ROWS["none"], seed, device), clip_only(), half=False)
        else:
            result = ARMS[arm](Task(row, seed, device))
    return (name, arm, seed), result


def cell(results: list[Result], references: list[Result]) -> str:
    """Mean and range of the difference to FP32, or what happened instead."""
    num = len(results)
    stopped = [r for r in results if r.stop]
    if stopped:
        places = sorted(r.attempts for r in stopped)
        return f"stops after {places[0]}" + ("" if places[0] == places[-1] else f"…{places[-1]}") + " batches"
    lost = sum(not math.isfinite(r.loss) for r in results)
    if lost:
        return "NaN" if lost == num else f"NaN ({lost} of {num})"
    percent = [100 * (r.loss / f.loss - 1) for r, f in zip(results, references, strict=True)]
    text = f"{statistics.mean(percent):+.2f} %"
    return text if num == 1 else f"{text} ({min(percent):+.2f} … {max(percent):+.2f})"


def table(found: dict[tuple[str, str, int], Result], names: list[str], arms: list[str], seeds: list[int]) -> str:
    """Rows and columns as Markdown."""
    lines = [f"| planted fault | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    for name in names:
        references = [found[name if ROWS[name].part_of_task else "none", REFERENCE, seed] for seed in seeds]
        cells = [cell([found[name, arm, seed] for seed in seeds], references) for arm in arms]
        lines.append(f"| {ROWS[name].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def account(found: dict[tuple[str, str, int], Result], names: list[str], arms: list[str], seeds: list[int]) -> str:
    """Applied steps of every arm, and what the guard did with the first seed."""
    lines = [f"| applied of attempted | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    for name in names:
        counts = [
            " ".join(f"{found[name, arm, seed].applied}/{found[name, arm, seed].attempts}" for seed in seeds)
            for arm in arms
        ]
        lines.append(f"| {ROWS[name].title} | {' | '.join(counts)} |")
    lines += ["", f"What the guard noted (seed {seeds[0]}; batches count from 0):", ""]
    for name in names:
        result = found.get((name, "this guard", seeds[0]))
        if result is None:
            continue
        lines.append(f"- {ROWS[name].title}: scale {result.scale:g} at the end")
        lines += [f"  - {event}" for event in result.events]
        lines += [f"  - {result.stop}"] if result.stop and not any("stop:" in e for e in result.events) else []
    return "\n".join(lines)


def main() -> None:
    """Run what was asked for, and print it as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    seeds = list(range(options.seeds))
    references = ["none", *(name for name in options.rows if ROWS[name].part_of_task)]
    jobs = [(name, REFERENCE, seed, options.device) for name in references for seed in seeds]
    jobs += [(name, arm, seed, options.device) for name in options.rows for arm in options.arms for seed in seeds]
    start = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(pool.map(run, jobs))
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU ({platform.machine()})"
    print(f"{machine}, torch {torch.__version__}, {len(seeds)} seeds, {len(jobs)} runs")
    losses = ", ".join(f"{found['none', REFERENCE, seed].loss:.4f}" for seed in seeds)
    print(f"FP32 validation loss without a fault: {losses}\n")
    print(table(found, options.rows, options.arms, seeds))
    print()
    print(account(found, options.rows, options.arms, seeds))
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
