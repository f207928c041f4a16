"""The examination behind `floatline doctor`: machine, choice, findings, notes and memory as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from floatline.checkup.choose import Note, PlanDecision, choose_plan
from floatline.checkup.scale import Scale, scale_up
from floatline.checkup.shapes import find_transformer
from floatline.errors import PlanError, TargetError
from floatline.findings import Finding
from floatline.hardware import Hardware, Machine, detect_devices, find_hardware
from floatline.hardware.rates import find_rates
from floatline.plans import Plan
from floatline.plans.presets import PLANS, resolve_plan
from floatline.precision.holding import Holding
from floatline.workload import Target, Workload

if TYPE_CHECKING:
    from floatline.checkup.memory import Memory

# What the memory table compares; the presets take the same bytes as fp16-mixed.
_COMPARED = ("fp32", "fp16-mixed", "bf16-mixed", "fp16-true", "bf16-true")


@dataclass(frozen=True)
class Checkup:
    """What was found.

    Args:
        machine: This machine; None where another one was asked about.
        hardware: The device that is judged.
        choice: The plan to use there, and why.
        target: The target as the user wrote it; '' without one.
        plan: The plan that was asked for, or the target's own; None without either.
        findings: What would break.
        notes: What else to know.
        memory: Bytes by part and plan; None without a target.
        holdings: What the target's weights and buffers are held in as it builds them; a manifest tells it after a step.
        scale: What one process of many would hold and move; None where nobody asked.
    """

    machine: Machine | None
    hardware: Hardware
    choice: PlanDecision
    target: str
    plan: Plan | None
    findings: tuple[Finding, ...]
    notes: tuple[Note, ...]
    memory: Memory | None
    holdings: tuple[Holding, ...] = ()
    scale: Scale | None = None

    def as_json(self) -> dict[str, Any]:
        """The object that `floatline doctor --format json` prints."""
        machine = self.machine.as_json() if self.machine else {}
        chosen = self.choice.value
        return {
            "machine": {**machine, "hardware": self.hardware.as_json()},
            "choice": {"plan": chosen.name, "reason": self.choice.reason, "settings": chosen.model_dump()},
            "target": self.target,
            "plan": self.plan.model_dump() if self.plan else None,
            "findings": [finding.as_json() for finding in self.findings],
            "notes": [{"topic": note.topic, "text": note.text} for note in self.notes],
            "memory": self.memory.as_json() if self.memory else None,
            "holdings": [asdict(row) for row in self.holdings],
            "scale": self.scale.as_json() if self.scale else None,
        }


def examine(target: Target | None = None, *, on: str | None = None, plan: Plan | str | None = None) -> Checkup:
    """Examine this machine or another, and a target on it.

    Args:
        target: What is trained; None looks at the machine only.
        on: Another device: 'sm_75', 'T4'. None detects this machine's.
        plan: The plan to judge; None takes the target's own.
    """
    asked = resolve_plan(plan) if plan is not None else None
    machine = None
    if on is None:
        machine = detect_devices()
        hardware = machine.best.hardware
    else:
        hardware = find_hardware(on)
    notes = _machine_notes(machine)
    if target is None or target.builder is None:
        if target is not None:
            notes.append(Note("setup", "The target has only train(): add build() to have its model checked."))
        notes += _plan_notes(asked, hardware)
        choice = choose_plan(hardware)
        text = target.text if target else ""
        return Checkup(machine, hardware, choice, text, asked, (), tuple(notes), None)
    workload = target.build()
    asked = asked or resolve_plan(workload.precision)
    asked.check_modules(workload.model)
    try:
        findings, more, memory = _examine_workload(workload, asked, hardware)
    except TargetError as error:
        raise TargetError(f"Target '{target.text}': {error}") from error.__cause__
    notes += [*_plan_notes(asked, hardware), *more]
    choice = choose_plan(hardware, model=workload.model)
    from floatline.precision.live_holdings import find_holdings  # torch is there by now

    held = find_holdings([workload.model])
    return Checkup(machine, hardware, choice, target.text, asked, tuple(findings), tuple(notes), memory, held)


def examine_scale(
    model: str,
    *,
    world: int,
    on: str | None = None,
    plan: Plan | str | None = None,
    batch: int = 1,
    sequence: int = 4096,
    checkpointing: bool = False,
) -> Checkup:
    """Examine a machine, and what one of many processes on such machines would hold of a model under FSDP2.

    Args:
        model: '7b', '70b' and so on: a key of `shapes.TRANSFORMERS`.
        world: How many processes.
        on: Another device: 'H100'. None detects this machine's.
        plan: The plan; None takes the device's.
        batch: Sequences of one process.
        sequence: Tokens of each.
        checkpointing: Whether blocks are computed again in backward.
    """
    found = examine(on=on, plan=plan)
    asked = found.plan or found.choice.value
    if asked.fp32_modules or asked.fp32_functions:
        raise PlanError(
            f"Plan {asked.name!r} keeps modules in FP32, and a model on paper has none. Use a plan without."
        )
    size = 4 if asked.compute == "fp32" else 2
    shape = find_transformer(model)
    weighed = shape.size(model.lower(), batch=batch, sequence=sequence, size=size, checkpointing=checkpointing)
    rates = find_rates(on or (found.machine.best.name if found.machine else ""))
    return replace(found, plan=asked, scale=scale_up(weighed, asked, world=world, rates=rates))


def _machine_notes(machine: Machine | None) -> list[Note]:
    if machine is None:
        return []
    notes = [Note("setup", f"{d.where}: {d.note}.") for d in machine.devices if d.note]
    if machine.torch is None:
        notes.append(Note("setup", "torch is not installed: pip install 'floatline[torch]'."))
    kinds = {device.hardware.id for device in machine.devices if device.where != "cpu"}
    if len(kinds) > 1:
        notes.append(Note("setup", f"The devices differ: the choice is for {machine.best.where}."))
    return notes


def _plan_notes(plan: Plan | None, hardware: Hardware) -> list[Note]:
    """What the device makes of the plan's 16-bit format."""
    if plan is None or plan.compute == "fp32":
        return []
    support = hardware.supports(plan.compute)
    if support.level == "native":
        return []
    text = f"{plan.compute} is {support} on {hardware.title}: plan {plan.name} saves memory there, not time."
    if support.level == "none":
        text = f"{plan.compute} does not run on {hardware.title}: choose another plan."
    return [Note("speed", text)]


def _examine_workload(workload: Workload, plan: Plan, hardware: Hardware) -> tuple[list[Finding], list[Note], Memory]:
    # torch comes in here, and only here: without a target nothing above needs it.
    from floatline.checkup import advice, model_checks
    from floatline.checkup.memory import estimate_memory, make_optimizer

    optimizer = make_optimizer(workload)
    plans = {name: PLANS[name] for name in _COMPARED}
    compared = {**plans, plan.name: plan}.values()
    like_cuda = hardware.kind in ("cuda", "rocm")
    memory = estimate_memory(workload, compared, optimizer=optimizer, like_cuda=like_cuda)
    findings = [
        *model_checks.find_half_parameters(workload.model, plan),
        *model_checks.find_vanishing_eps(workload.model, optimizer, plan),
        *model_checks.find_forward_failure(memory.problems.get(plan.name, ""), plan),
    ]
    notes = [
        *model_checks.note_stored_weights(workload.model, plan),
        *advice.note_kept(workload.model, plan),
        *advice.note_memory(memory, plan, optimizer),
        *advice.note_speed(memory, workload.model, plan, hardware),
    ]
    return findings, notes, memory
