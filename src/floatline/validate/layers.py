"""One recorded step of a candidate, module by module: headroom, and how far its gradients agree with FP32's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from floatline.diagnosis.step_rows import Row, chart_rows, narrow_format
from floatline.formats import Format
from floatline.probe.replay import Replay, capture_step, compare_steps
from floatline.validate.measure_child import Build, builder_of, make_trainer
from floatline.validate.plain import to_plain
from floatline.validate.result import LayerNumbers

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
            scale=float(trainer.guard.run.judge.scale),
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
