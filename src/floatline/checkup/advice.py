"""Why memory is not lower, and why it is not faster: sentences made from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn
from torch.optim import Optimizer

from floatline.base.texts import format_bytes
from floatline.checkup.choose import Note
from floatline.checkup.forward import ForwardPass, largest_gemm
from floatline.checkup.memory import Memory
from floatline.checkup.model_checks import list_names
from floatline.hardware import Hardware
from floatline.plans import Plan
from floatline.precision.dtypes import floating_parameters
from floatline.precision.placements import Placement, place_modules

# 10 million multiply-adds are 0.3 µs at 65 TFLOP/s (a T4's peak); launching a kernel takes microseconds.
_LAUNCH_BOUND = 10_000_000


def note_kept(model: nn.Module, plan: Plan) -> list[Note]:
    """What a plan keeps in FP32 or rewrites, in a line or two."""
    placed = place_modules(model, plan)
    kept = [row for row in placed if row.reason.startswith("kept")]
    texts: list[str] = []
    if kept:
        listed = "; ".join(f"{row.name} ({_why(row)})" for row in kept[:3]) + (" …" if len(kept) > 3 else "")
        texts.append(f"Plan {plan.name} keeps {len(kept)} of {len(placed)} modules in FP32: {listed}.")
    others = [kept.function for kept in plan.fp32_functions]
    if others:
        texts.append(f"In FP32 as well: {', '.join(others)}.")
    if plan.rewrites:
        texts.append("Rewritten: " + ", ".join(f"{r.kind} in {r.module or r.function}" for r in plan.rewrites) + ".")
    return [Note("precision", " ".join(texts))] if texts else []


def _why(row: Placement) -> str:
    """The plan's reason, or the pattern where it gives none."""
    inner = row.reason.partition(" (")[2]
    return inner.removesuffix(")") if inner else row.reason


def note_memory(memory: Memory, plan: Plan, optimizer: Optimizer) -> list[Note]:
    """Which parts a plan shrinks, and which it does not."""
    notes = list(_note_failed(memory, plan))
    before, after = memory.parts["fp32"], memory.parts[plan.name]
    if before.states and before.gradients:
        per_weight = before.states / (before.gradients // 4)
        notes.append(
            Note(
                "memory",
                f"{type(optimizer).__name__} holds {per_weight:.3g} bytes for each trained weight "
                f"({format_bytes(before.states)}), in FP32 under every plan here.",
            )
        )
    if plan.compute == "fp32" or before.total is None or after.total is None:
        return notes
    change = 100 * (after.total / before.total - 1)
    totals = format_bytes(after.total), format_bytes(before.total)
    text = f"{plan.name} takes {totals[0]}, fp32 {totals[1]} ({change:+.0f} %). "
    if plan.mixed:
        fixed = after.weights + after.gradients + (after.states or 0)
        text += (
            f"Weights, gradients and optimizer states stay in FP32 ({format_bytes(fixed)}), and autocast "
            f"adds {format_bytes(after.copies)} of 16-bit weights. Only activations shrink: "
            f"{format_bytes(before.activations)} to {format_bytes(after.activations)} for this batch."
        )
    else:
        text += (
            f"Weights and gradients halve, activations go from {format_bytes(before.activations)} to "
            f"{format_bytes(after.activations)}; the optimizer states stay."
        )
    return [*notes, Note("memory", text)]


def _note_failed(memory: Memory, plan: Plan) -> Iterator[Note]:
    problem = memory.problems.get(plan.name)
    if problem:
        text = f"Activations are not known: the forward pass in {plan.name} raised {problem}."
        yield Note("memory", text + " Give the message to 'floatline explain'.")


def note_speed(memory: Memory, model: nn.Module, plan: Plan, hardware: Hardware) -> list[Note]:
    """Why 16 bits may bring no speed: sizes that tensor cores do not like, products too small to matter."""
    done = memory.passes.get(plan.name)
    if done is None or plan.compute == "fp32" or not hardware.supports(plan.compute).matrix_units:
        return []
    notes: list[Note] = []
    if hardware.kind == "cuda":
        notes += _note_alignment(done, model)
    largest = largest_gemm(done.gemms)
    if largest < _LAUNCH_BOUND:
        notes.append(
            Note(
                "speed",
                f"The largest matrix product of the first batch has {largest:,} multiply-adds: launching "
                "kernels takes longer than computing them, which 16 bits do not change. Use larger batches.",
            )
        )
    return notes


def _note_alignment(done: ForwardPass, model: nn.Module) -> list[Note]:
    odd = [gemm for gemm in done.gemms if not gemm.aligned]
    work = sum(gemm.multiply_adds for gemm in done.gemms)
    if not odd or not work:
        return []
    share = 100 * sum(gemm.multiply_adds for gemm in odd) / work
    text = (
        f"{len(odd)} of {len(done.gemms)} matrix products ({share:.0f} % of the work) have a size that is no "
        "multiple of 8, which tensor cores need for full speed."
    )
    layers = dict(_odd_layers(model))
    if layers:
        held = sum(layers.values())
        total = sum(parameter.numel() for _, parameter in floating_parameters(model))
        text += f" Layers of such a width: {list_names(layers)} ({100 * held / total:.0f} % of the weights)."
    return [Note("speed", text)]


def _odd_layers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Linear and convolution layers with a width that is no multiple of 8, and how many weights they hold."""
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear):
            widths = (module.in_features, module.out_features)
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            widths = (module.in_channels // module.groups, module.out_channels // module.groups)
        else:
            continue
        if weight is not None and any(width % 8 for width in widths):
            yield name or "the model", weight.numel()
