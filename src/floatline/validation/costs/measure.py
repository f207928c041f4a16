"""Speed, memory and layers of each candidate, from processes of their own, and why it is not faster or smaller."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from floatline.base.plain_records import from_plain, to_plain
from floatline.base.texts import format_bytes
from floatline.diagnosis.headroom.step_rows import Row, chart_rows, narrow_format
from floatline.errors import ComparisonError
from floatline.formats import Format
from floatline.probe.steps.capture import Replay, capture_step, compare_steps
from floatline.validation.costs.measure_child import Build, builder_of, make_trainer
from floatline.validation.result import LayerNumbers, PeakMemory, Speed
from floatline.validation.running.processes import call_in_child
from floatline.validation.study.preparation import Subject
from floatline.validation.study.store import file_name
from floatline.validation.verdict.pairs import REFERENCE
from floatline.validation.verdict.timing import compare_times
from floatline.workload import Workload

_STEPS_BEFORE = 10  # by then the loss scale of most runs has been found, and the weights have moved


def record_target(settings: dict[str, Any]) -> dict[str, Any]:
    """Called in a child process: train a few steps, and record one."""
    return record_layers(builder_of(settings), settings)


def record_layers(build: Build, settings: dict[str, Any]) -> dict[str, Any]:
    """The modules of one step in order of execution, and how many of its operations are casts.

    Numerics:
        The step is replayed twice from the same weights, batch and random numbers: as the plan has it, with every
        operation recorded, and in FP32. Headroom is log2 of the format's largest number over the largest magnitude
        that the module wrote, or that FP32 has in its place. Cosine and norm ratio are those of all gradients of
        the module's own parameters as one vector, unscaled, in float64.

    Args:
        build: Gives the workload.
        settings: 'plan' as plain data, 'seed' and 'steps'.
    """
    trainer = make_trainer(build(), settings["plan"], settings["seed"])
    workload, plan = trainer.workload, trainer.plan
    with trainer.arithmetic():
        for _ in range(min(_STEPS_BEFORE, settings["steps"])):
            trainer.step()
        trainer.guard.drain()
        first = trainer.steps_done * plan.accumulate
        step = capture_step(
            workload.model,
            None,
            lambda batch: workload.compute_loss(*batch),
            *(trainer.micro_batch(first + i) for i in range(plan.accumulate)),
            plan=plan,
            scale=float(trainer.guard.scale),
        )
        narrow, wide = step.replay(trace=True), step.replay(precision="fp32")
    trainer.guard.close()
    trace = narrow.trace
    if trace is None:
        raise AssertionError  # it was asked for
    fmt = narrow_format(trace)
    rows = {} if fmt is None else {row.module: row for row in chart_rows(trace, fmt)}
    owners = {name: name.rpartition(".")[0] for name in wide.raw}
    modules = list(dict.fromkeys([*rows, *owners.values()]))
    numbers = [_numbers_of(module, rows.get(module), fmt, narrow, wide, owners) for module in modules]
    casts = sum(op.name == "aten._to_copy" for op in trace.ops)
    return {"layers": to_plain(numbers), "casts": casts, "operations": len(trace.ops)}


def _numbers_of(
    module: str, row: Row | None, fmt: Format | None, narrow: Replay, wide: Replay, owners: dict[str, str]
) -> LayerNumbers:
    own = {name for name, owner in owners.items() if owner == module}
    agreement = None
    if own:
        ours, theirs = (
            replace(replay, raw={name: grad for name, grad in replay.raw.items() if name in own})
            for replay in (narrow, wide)
        )
        agreement = compare_steps(ours, theirs).whole
    return LayerNumbers(
        module=module,
        headroom=None if row is None or fmt is None else _headroom(row, fmt),
        lost=0.0 if agreement is None else agreement.lost_share,
        cosine=None if agreement is None else agreement.cosine,
        norm_ratio=None if agreement is None else agreement.norm_ratio,
    )


def _headroom(row: Row, fmt: Format) -> float | None:
    largest = max((max(span.largest, span.reach) for span in row.spans), default=0.0)
    return math.log2(fmt.max) - math.log2(largest) if 0 < largest < math.inf else None


TIMING_BUDGET = 30.0
_LONGEST = 900.0
_HOST_BOUND = 0.9
_MANY_CASTS = 0.2
_SMALLER = 0.9
_CHILD = "floatline.validation.costs.measure_child"


class Shelf(Protocol):
    """Where measurements are kept by name, so that a resumed study does not take them again."""

    def read(self, name: str) -> dict[str, Any] | None:
        """What was kept; None where there is nothing."""
        ...

    def write(self, name: str, data: dict[str, Any]) -> None:
        """Keep it."""
        ...


@dataclass
class Costs:
    """What was measured.

    Args:
        speed: One for each candidate that could be timed.
        memory: One for each arm that could be measured.
        layers: By candidate.
        reasons: By candidate, why it is not faster or smaller, and what could not be measured.
        problems: By candidate, what could not be measured; those of FP32 are everyone's.
    """

    speed: list[Speed] = field(default_factory=list[Speed])
    memory: list[PeakMemory] = field(default_factory=list[PeakMemory])
    layers: dict[str, tuple[LayerNumbers, ...]] = field(default_factory=dict[str, "tuple[LayerNumbers, ...]"])
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    problems: dict[str, list[str]] = field(default_factory=dict[str, "list[str]"])

    def blame(self, name: str, text: str) -> None:
        """Note what could not be measured of an arm."""
        for own in [self.problems[name]] if name in self.problems else self.problems.values():
            if text not in own:
                own.append(text)


@dataclass(frozen=True)
class Bench:
    """Takes the measurements of one study.

    Args:
        subject: What is measured. One that exists in this process only has its memory not measured.
        steps: Steps of an arm.
        shelf: Where they are kept.
        tell: Called with what is measured next.
    """

    subject: Subject
    steps: int
    shelf: Shelf
    tell: Callable[[str], None]

    def measure(self, plans: dict[str, dict[str, Any]]) -> Costs:
        """Measure FP32 and these candidates, given by name with their plans as plain data."""
        costs = Costs(problems={name: [] for name in plans})
        self._add_memory(costs, REFERENCE, self._reference)
        for name, plan in plans.items():
            self._add_speed(costs, name, plan)
            self._add_memory(costs, name, plan)
            layers = self._take(costs, "layers", name, plan)
            if layers is not None:
                costs.layers[name] = tuple(from_plain(LayerNumbers, entry) for entry in layers["layers"])
            costs.reasons[name] = tuple(self._reasons(costs, name, plan, layers))
        return costs

    @property
    def _reference(self) -> dict[str, Any]:
        return self.subject.reference.model_dump(mode="json")

    def _add_speed(self, costs: Costs, name: str, plan: dict[str, Any]) -> None:
        times = self._take(costs, "timing", name, plan)
        if times is None:
            return
        costs.speed.append(
            Speed(
                name,
                compare_times(times["reference"], times["candidate"]),
                statistics.median(times["reference"]),
                statistics.median(times["candidate"]),
                times["first_seconds"],
            )
        )

    def _add_memory(self, costs: Costs, name: str, plan: dict[str, Any]) -> None:
        if self.subject.build is not None:
            costs.blame(REFERENCE, "memory was not measured: a workload of this process cannot be built in a fresh one")
            return
        found = self._take(costs, "memory", name, plan)
        if found is None:
            return
        if found["peak"] is None:
            costs.blame(REFERENCE, "memory was not measured: this system does not tell a process its peak")
            return
        costs.memory.append(PeakMemory(name, found["peak"], found["parts"], found["device"]))

    def _reasons(self, costs: Costs, name: str, plan: dict[str, Any], layers: dict[str, Any] | None) -> list[str]:
        """Why it is not faster, and why it is not smaller; nothing about what it is."""
        hints = self._take(costs, "costs", name, plan)
        reasons: list[str] = []
        if hints is not None:
            _add_parts(costs, name, hints["parts"])
        speed = next((s for s in costs.speed if s.arm == name), None)
        if speed is not None and speed.timing.verdict != "faster":
            issuing = (self._take(costs, "timing", name, plan) or {}).get("issuing")
            if issuing is not None and issuing > _HOST_BOUND:
                reasons.append(
                    f"The host is busy for {100 * issuing:.0f} % of a step with telling the GPU what to do, which "
                    "16 bits do not change: the GPU waits. Use larger batches, torch.compile or CUDA graphs."
                )
            reasons += [] if hints is None else hints["speed"]
            if layers is not None and layers["casts"] > _MANY_CASTS * layers["operations"]:
                reasons.append(
                    f"{layers['casts']:,} of the {layers['operations']:,} operations of a step are casts between "
                    "formats: keep what runs in a row in one format."
                )
        memory = {m.arm: m for m in costs.memory}
        if name in memory and REFERENCE in memory and memory[name].peak > _SMALLER * memory[REFERENCE].peak:
            reasons += [] if hints is None else hints["memory"]
            process = memory[name].parts.get("process", 0)
            if process > 0.5 * memory[name].peak:
                reasons.append(
                    f"{format_bytes(process)} of the {format_bytes(memory[name].peak)} are Python and torch, "
                    "whatever is trained."
                )
        return [*reasons, *costs.problems[name]]

    def _take(self, costs: Costs, kind: str, name: str, plan: dict[str, Any]) -> dict[str, Any] | None:
        """One measurement, from the shelf or taken now; None where it failed, which is said and ends nothing."""
        file = f"{kind}/{file_name(name)}.json"
        kept = self.shelf.read(file)
        if kept is not None:
            return kept
        self.tell(f"{kind} of {name}")
        asked = {**self.subject.settings(), "plan": plan, "reference": self._reference, "steps": self.steps}
        asked["budget"] = TIMING_BUDGET
        try:
            found = self._call(kind, asked)
        except ComparisonError as error:
            costs.blame(name, f"{kind} of {name} could not be measured: {error}")
            return None
        self.shelf.write(file, found)
        return found

    def _call(self, kind: str, asked: dict[str, Any]) -> dict[str, Any]:
        if self.subject.build is None:
            call = {
                "timing": f"{_CHILD}:time_target",
                "memory": f"{_CHILD}:measure_memory",
                "costs": f"{_CHILD}:explain_costs",
                "layers": f"{__name__}:record_target",
            }[kind]
            return call_in_child(call, asked, timeout=_LONGEST)
        from floatline.validation.costs.measure_child import explain_workload, time_steps
        from floatline.validation.study.trained_arm import first_batches

        whole, num = self.subject.build, self.subject.limits.batches

        def build() -> Workload:
            return first_batches(whole(self.subject.seed), num)

        try:
            if kind == "costs":
                return explain_workload(build(), asked)
            return (time_steps if kind == "timing" else record_layers)(build, asked)
        except Exception as error:
            raise ComparisonError(f"{type(error).__name__}: {error}") from None


def _add_parts(costs: Costs, name: str, parts: dict[str, dict[str, int]]) -> None:
    """Activations and autocast's copies of both arms, beside the parts that were counted in their processes."""
    for place, memory in enumerate(costs.memory):
        key = name if memory.arm == name else REFERENCE if memory.arm == REFERENCE else None
        if key is not None:
            more = {part: size for part, size in parts.get(key, {}).items() if size}
            costs.memory[place] = PeakMemory(memory.arm, memory.peak, {**memory.parts, **more}, memory.device)
