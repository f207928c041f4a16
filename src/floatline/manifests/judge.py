"""The verdict on a manifest: pure functions from its facts to lines, each with the catalogue's id and the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from floatline.causes import Cause, find_cause
from floatline.manifests.facts import ManifestFacts
from floatline.manifests.rows import SumRow, UpdateRow
from floatline.precision.holding import (
    NARROW_FORMATS,
    describe_holdings,
    formats_of,
    is_without_master,
    say_formats,
)

# Shares from which on something is told: of lost updates in 16 bits and in FP32, of lost decay, of states that stand
# still, of an accumulated gradient, of FLOPs in FP32 under autocast, of FP16's range.
_UPDATES, _UPDATES_OF_FP32, _DECAYS, _STUCK, _SUMS, _FLOPS, _RANGE = 0.01, 0.1, 0.5, 0.5, 1e-3, 0.5, 0.25
DIGEST, SEED, LOSS = "weights after the step", "seed", "loss"
NOT_MEASURED = "not measured: "  # a note on what failed begins so
_MOST_SEEDS = 4
_DIAGNOSE = "Find the cause: floatline diagnose -- python train.py."
# Who sums up gradients, and how it does so in FP32.
_REDUCERS = {
    "fsdp2": ("FSDP2", "MixedPrecisionPolicy(reduce_dtype=torch.float32)"),
    "ddp": ("DDP", "FP32 weights under torch.autocast have FP32 gradients, or a hook that widens them"),
    "ddp-hook": ("a communication hook of DDP", "no hook that compresses"),
    "deepspeed": ("DeepSpeed", '"communication_data_type": "fp32" in its configuration'),
    "megatron": ("Megatron", "grad_reduce_in_fp32=True in its DistributedDataParallelConfig"),
    "loop": ("the loop", "torch.distributed.all_reduce of gradient.float()"),
}


@dataclass(frozen=True)
class ManifestLine:
    """One thing that is wrong.

    Args:
        text: What was seen, with its numbers.
        cause: The entry of the catalogue; None where that takes a diagnosis.
        fix: What to change, as one line.
    """

    text: str
    cause: Cause | None
    fix: str

    def as_json(self) -> dict[str, Any]:
        """The fields that a finding of any command has."""
        cause = self.cause
        fields = {"cause": None if cause is None else cause.id, "seen": self.text, "fix": self.fix}
        return {**fields, "remedies": [] if cause is None else list(cause.remedies)}

    def __str__(self) -> str:
        """Three lines for people."""
        why = "" if self.cause is None else f"\n  why:  floatline explain {self.cause.id}"
        return f"{self.text}\n  fix:  {self.fix}{why}"


def judge(facts: ManifestFacts) -> Iterator[ManifestLine]:
    """What is wrong with what a run computes in, the worst first."""
    yield from _judge_ranks(facts)
    yield from _judge_alone(facts)
    yield from _judge_finiteness(facts)
    yield from _judge_updates(facts)
    yield from _judge_decay(facts)
    yield from _judge_states(facts)
    yield from _judge_sums(facts)
    yield from _judge_autocast(facts)
    yield from _judge_scale(facts)
    yield from _judge_tied(facts)
    yield from _judge_buffers(facts)
    yield from _judge_loss(facts)
    yield from _judge_peaks(facts)
    yield from _judge_exchange(facts)


def _judge_ranks(facts: ManifestFacts) -> Iterator[ManifestLine]:
    """What is different between processes: what is the same on several of them, or of several things, is told once."""
    cause = find_cause("distributed-desync")
    same: dict[tuple[str, str, str], list[int]] = {}
    for row in facts.apart:
        if row.what != SEED:  # most runs have one for each process
            same.setdefault((row.what, row.first, "" if row.what == DIGEST else row.other), []).append(row.rank)
    alike: dict[tuple[tuple[int, ...], str, str], list[str]] = {}
    for (what, first, other), ranks in same.items():
        alike.setdefault((tuple(ranks), first, other), []).append(what)
    for (ranks, first, other), whats in alike.items():
        who = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
        if whats == [DIGEST]:
            yield ManifestLine(
                f"{who} and rank {facts.rank} have other weights after the same step: they train apart",
                cause,
                "Start from the same weights on every rank, and reduce every gradient: DistributedDataParallel does.",
            )
            continue
        text = f"{', '.join(whats)}: {other} on {who}, {first} on rank {facts.rank}"
        if whats == [LOSS]:
            fix = f"Look at the batches of that rank. {_DIAGNOSE}"
            yield ManifestLine(f"{text}, so that it came before the reduction", None, fix)
        else:
            yield ManifestLine(text, cause, "Make it the same on every rank.")


def _judge_alone(facts: ManifestFacts) -> Iterator[ManifestLine]:
    if facts.alone:
        yield ManifestLine(
            "every process makes the same step of the same loss, and exchanges nothing: each trains alone, on the same "
            "batches",
            find_cause("distributed-desync"),
            "Wrap the model (DistributedDataParallel, or accelerator.prepare), and cut the data between processes. On "
            "a CPU accelerate does so with ACCELERATE_USE_CPU=true, or Accelerator(cpu=True).",
        )


def _judge_finiteness(facts: ManifestFacts) -> Iterator[ManifestLine]:
    """Formats say nothing of a run that is lost already."""
    if facts.bad_loss is not None:
        text = f"the loss was not finite at step {facts.bad_loss}, so that nothing below says whether the run is sound"
        yield ManifestLine(text, None, _DIAGNOSE)


def describe_ranks(facts: ManifestFacts) -> str:
    """How many processes there are, and whether they are alike; '' for one."""
    if facts.num_ranks < 2:
        return ""
    apart = " that are not alike" * any(row.what != SEED for row in facts.apart)
    seeds = [f"{row.other} on rank {row.rank}" for row in facts.apart if row.what == SEED]
    more = ", …" * (len(seeds) > _MOST_SEEDS)
    listed = ", ".join([f"{facts.seed} on rank {facts.rank}", *seeds[:_MOST_SEEDS]]) + more
    return f"{facts.num_ranks} processes{apart}{f'; the seed of torch is {listed}' if seeds else ''}"


def summarize(facts: ManifestFacts) -> str:
    """One line: weights, states, where FLOPs ran, the loss."""
    if facts.step is None:
        return f"{describe_holdings(facts.holdings)} (no step was measured)"
    flops = facts.flops()
    parts = [describe_holdings(facts.holdings)]
    if flops:
        parts.append(f"{_list_shares(flops)} of FLOPs")
    loss = Counter({row.format: row.num for row in facts.ran if row.kind == "loss"})
    if loss:
        parts.append(f"loss {say_formats(loss)}")
    is_fp32 = all(row.format == "fp32" for row in facts.holdings) and set(flops) <= {"fp32"}
    if is_fp32 and facts.switches.matmul not in (None, "highest"):
        parts.append(f"on a GPU, FP32 products are TF32 or less (matmul '{facts.switches.matmul}')")
    elif is_fp32 and next(judge(facts), None) is None:
        return f"FP32 as believed: {'; '.join(parts)}"
    return "; ".join(parts)


def _list_shares(flops: Counter[str]) -> str:
    total = sum(flops.values()) or 1
    return ", ".join(f"{name.upper()} {_percent(num / total)}" for name, num in flops.most_common())


def _percent(share: float) -> str:
    """'61 %'; two digits below one per cent, and never 100 for less than all."""
    if share < 0.01:
        return f"{100 * share:.2g} %"
    return f"{min(100 * share, 99.9) if share < 1 else 100.0:.3g} %"


def _judge_updates(facts: ManifestFacts) -> Iterator[ManifestLine]:
    cause = find_cause("update-lost-to-rounding")
    without = is_without_master(facts.holdings)
    for row in sorted(_merge_updates(facts), key=lambda row: -_share_lost(row)):
        share, name = _share_lost(row), row.format.upper()
        of = {"adapters": "adapters"}.get(row.group, "weights")
        if row.format in NARROW_FORMATS and share >= _UPDATES:
            fix = cause.advice if of == "weights" else "Keep adapters in FP32: autocast_adapter_dtype=True in PEFT."
            where = f", most in {row.example}" if row.example else ""
            yield ManifestLine(
                f"{name} {of} without a master copy: {_percent(share)} of updates round away{where}", cause, fix
            )
        elif row.format not in NARROW_FORMATS and share >= _UPDATES_OF_FP32:
            fix = f"The learning rate {row.rate:g} is below what these weights can take: raise it."
            yield ManifestLine(f"{name} {of}: {_percent(share)} of updates round away", cause, fix)
    if not facts.updates and without:
        formats = formats_of(facts.holdings, "weights")
        narrow = [name for name in formats if name in NARROW_FORMATS]
        bound = "|w|/512" if narrow[0] == "bf16" else "|w|/4096"
        yield ManifestLine(
            f"{narrow[0].upper()} weights without a master copy: updates below {bound} round away", cause, cause.advice
        )


def _merge_updates(facts: ManifestFacts) -> list[UpdateRow]:
    """Updates by format, those of adapters apart."""
    found: dict[tuple[str, str], UpdateRow] = {}
    for row in facts.updates:
        key = ("adapters" if row.group == "adapters" else "", row.format)
        old = found.get(key)
        if old is None:
            found[key] = row
            continue
        worse = max(old, row, key=lambda one: (_share_lost(one), one.num_lost))
        found[key] = UpdateRow(
            key[0],
            row.format,
            old.num_updates + row.num_updates,
            old.num_lost + row.num_lost,
            old.num_decays + row.num_decays,
            old.num_decays_lost + row.num_decays_lost,
            max(old.rate, row.rate),
            max(old.decay, row.decay),
            worse.example,
        )
    return list(found.values())


def _share_lost(row: UpdateRow) -> float:
    return row.num_lost / row.num_updates if row.num_updates else 0.0


def _judge_decay(facts: ManifestFacts) -> Iterator[ManifestLine]:
    cause = find_cause("decay-lost-to-rounding")
    for row in _merge_updates(facts):
        share = row.num_decays_lost / row.num_decays if row.num_decays else 0.0
        if row.format in NARROW_FORMATS and share >= _DECAYS:
            yield ManifestLine(
                f"weight decay of {row.format.upper()} weights: {_percent(share)} rounds away "
                f"(learning rate × decay is {row.rate * row.decay:.2g})",
                cause,
                cause.advice,
            )


def _judge_states(facts: ManifestFacts) -> Iterator[ManifestLine]:
    for row in facts.states:
        share = row.num_stuck / row.num if row.num else 0.0
        if share >= _STUCK:
            yield ManifestLine(
                f"{row.name} in {row.format.upper()} cannot hold its decay of {row.decay:g}: {_percent(share)} of its "
                "values stay as they are",
                find_cause("accumulator-stagnation"),
                "Keep the optimizer's states in FP32: FP32 weights under torch.autocast, or an optimizer that does.",
            )


def _judge_sums(facts: ManifestFacts) -> Iterator[ManifestLine]:
    # Where a framework adds up beside autograd the worse of the two is told.
    worst: dict[str, SumRow] = {}
    for row in sorted(facts.sums, key=lambda row: row.share):
        worst[row.format] = row
    for row in worst.values():
        if row.share >= _SUMS:
            yield ManifestLine(
                f"gradients of {row.num_passes} backward passes are added up in {row.format.upper()}: "
                f"{_percent(row.share)} of the accumulated gradient is lost",
                find_cause("accumulator-stagnation"),
                "Accumulate in FP32: FP32 weights under torch.autocast, or FP32 buffers that gradients are added to.",
            )


def _judge_autocast(facts: ManifestFacts) -> Iterator[ManifestLine]:
    flops = facts.flops()
    total = sum(flops.values())
    if not total or not (facts.regions or facts.refused):
        return
    share = flops["fp32"] / total
    if not facts.regions:
        if share >= _FLOPS:
            device = facts.refused[0].upper()
            yield ManifestLine(
                f"autocast for {device} was asked for, and torch switched it off, as there is no {device} in "
                f"this process: {_percent(share)} of FLOPs run in FP32",
                find_cause("autocast-region-misuse"),
                "torch.autocast(device.type), of the device that the model is on. --as cuda shows what a GPU would do.",
            )
        return
    if share >= _FLOPS:
        yield ManifestLine(
            f"autocast is on but {_percent(share)} of FLOPs run in FP32 because {_explain_fp32(facts)}",
            find_cause("autocast-region-misuse"),
            "Put the whole forward pass and the loss into the region, and nothing behind it.",
        )


def _explain_fp32(facts: ManifestFacts) -> str:
    """Why most of the FP32 products are in FP32."""
    # A backward pass follows what its forward pass did, and regions are left by then.
    own = [row for row in facts.work if row.format == "fp32" and row.phase == "forward"]
    worst = max(own, key=lambda row: row.flops, default=None)
    if worst is None:
        return "a backward pass computes in it"
    where = f", most in {worst.example}" if worst.example else ""
    if worst.region == "off":
        return f"they are outside of the region{where}"
    if worst.region == "disabled":
        return f"the region is switched off around them{where}"
    return f"autocast does not cast these operations{where}"


def _judge_scale(facts: ManifestFacts) -> Iterator[ManifestLine]:
    flops = facts.flops("backward")
    if facts.scaled or not flops["fp16"]:
        return
    yield ManifestLine(
        f"FP16 computes {_percent(flops['fp16'] / sum(flops.values()))} of the backward pass, and the loss is not "
        "scaled: gradients up to 2.98e-08 are zero",
        find_cause("gradient-underflow"),
        "Scale the loss: torch.amp.GradScaler, or compute in BF16.",
    )


def _judge_tied(facts: ManifestFacts) -> Iterator[ManifestLine]:
    for row in facts.tied:
        names, formats = row.names, [name.upper() for name in row.formats]
        yield ManifestLine(
            f"{names[0]} is {formats[0]} and {names[1]} is {formats[1]}, with the same numbers: they were tied, and "
            "train apart from here",
            find_cause("dtype-mismatch"),
            f"Cast both, or tie them again: {names[1].rpartition('.')[0]}.weight = {names[0]}.",
        )


def _judge_buffers(facts: ManifestFacts) -> Iterator[ManifestLine]:
    for row in facts.holdings:
        if row.kind != "buffers" or row.format not in NARROW_FORMATS:
            continue
        if row.name == "positions":
            cause, what = find_cause("integer-not-exact"), "positions are computed from it"
        elif row.name == "averages":
            cause, what = find_cause("accumulator-stagnation"), "an average is kept in it"
        else:
            continue
        yield ManifestLine(f"buffer {row.example} is {row.format.upper()}, and {what}", cause, cause.advice)


def _judge_loss(facts: ManifestFacts) -> Iterator[ManifestLine]:
    for row in facts.ran:
        if row.kind == "loss" and row.format in NARROW_FORMATS:
            yield ManifestLine(
                f"the loss is computed in {row.format.upper()} ({row.name})",
                find_cause("changed-in-16-bits"),
                "Compute the loss in FP32: loss_fn(logits.float(), target).",
            )


def _judge_peaks(facts: ManifestFacts) -> Iterator[ManifestLine]:
    for row in facts.peaks:
        if row.format in NARROW_FORMATS and not row.largest < _RANGE * row.end:
            yield ManifestLine(
                f"the largest {row.format.upper()} activation is {row.largest:.4g}, {_percent(row.largest / row.end)} "
                f"of what the format holds, in {row.example or 'the model'}",
                find_cause("activation-overflow"),
                f"Keep {row.example or 'this module'} in FP32 or BF16, or make its activations smaller.",
            )


def _judge_exchange(facts: ManifestFacts) -> Iterator[ManifestLine]:
    for row in facts.exchanges:
        if row.reduce in NARROW_FORMATS and facts.num_ranks > 1:
            who, fix = _REDUCERS[row.kind]
            yield ManifestLine(
                f"{who} sums up gradients of {facts.num_ranks} processes in {row.reduce.upper()}",
                find_cause("accumulator-stagnation"),
                f"Reduce in FP32: {fix}.",
            )
