"""A training step's graphs eager, compiled, compiled with eager's casts, and in FP32; what is wrong is cut down."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from floatline.agreement.compiled.backends import Compiler, measure_compiled
from floatline.agreement.compiled.graphs import GraphPart, find_hidden, shrink
from floatline.agreement.compiled.reproducer import write_reproducer
from floatline.agreement.compiled.seen_graphs import GraphNotes, SeenGraph
from floatline.agreement.compiled.step_result import CompiledStep, StepReading, is_mostly_farther
from floatline.agreement.measuring import Measured
from floatline.agreement.reading import Reading
from floatline.agreement.sides import Side
from floatline.errors import FloatlineError, ParityError
from floatline.probe.steps.captured_step import CapturedStep

_INPUT = re.compile(r"\binput\[(\d+)\]")
NOTHING = "nothing that trains was compiled: torch.compile saw no operation of the step"


def compare_compiled_step(
    step: CapturedStep,
    *,
    backend: str | Callable[..., Any] = "inductor",
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
) -> CompiledStep:
    """Run one captured step eager, compiled, compiled with eager's casts and in FP32, and say who is nearer.

    Numerics:
        Compared are the graphs that torch.compile takes out of the step: each on the inputs that it had in the step,
        and with the gradients that came back to it. Eager is such a graph run as it is. Distances, floor and verdicts
        are those of `parity`. Checked by tests/agreement/compiled/test_steps.py.

    Args:
        step: The step. Its run is not changed.
        backend: As torch.compile takes it.
        options: Options of Inductor.
        folder: Where a script goes that shows what is wrong; None writes none.
    """
    compiler = Compiler(backend, options or {})
    notes = GraphNotes(compiler)
    try:
        step.replay(compiled=notes)
    except Exception as error:
        return CompiledStep(compiler.name, problem=_say_problem(error))
    return compare_graphs(notes.graphs, folder=folder)


def compare_graphs(
    graphs: Sequence[SeenGraph],
    *,
    backend: str | None = None,
    folder: str | Path | None = None,
    on_progress: Callable[[CompiledStep], None] | None = None,
) -> CompiledStep:
    """Compare graphs with what a backend makes of them.

    Args:
        graphs: As they were called in one step.
        backend: What to compile with; None: what each was to be compiled with.
        folder: See `compare_compiled_step`.
        on_progress: Told what is known when every graph was measured, before the part is looked for that is wrong.
    """
    began = time.perf_counter()
    if backend is not None:
        graphs = [replace(seen, compiler=Compiler(backend)) for seen in graphs]
    if not graphs:
        return CompiledStep(backend or Compiler().name, problem=NOTHING)
    name = " and ".join(dict.fromkeys(seen.compiler.name for seen in graphs))
    readings: list[StepReading] = []
    notes: list[str] = []
    off, farther = list[SeenGraph](), list[SeenGraph]()
    for number, seen in enumerate(graphs):
        try:
            measured = _measure(seen, seen.compiler)
        except Exception as error:
            notes.append(f"graph {number + 1} of {len(graphs)}: {_say_problem(error)}")
            continue
        emulated = _measure_emulated(seen, notes)
        found = [
            StepReading(number, _rename(reading, seen), emulated.get((reading.phase, reading.name)))
            for reading in measured.readings
        ]
        readings += found
        notes += [known for note in measured.notes if (known := _name_inputs(note, seen)) not in notes]
        if not all(one.explained for one in found):
            off.append(seen)
        elif is_mostly_farther(found):
            farther.append(seen)
    problem = "" if readings else "; ".join(notes) or NOTHING
    result = CompiledStep(
        name,
        len(graphs),
        tuple(readings),
        notes=tuple(notes) if readings else (),
        problem=problem,
        seconds=time.perf_counter() - began,
    )
    if not off and not farther:
        return result
    if on_progress is not None:
        on_progress(replace(result, notes=(*result.notes, "what is wrong was not looked for to the end")))
    part = _find_part(off, result.verdict) if off else _find_hidden(farther)
    if part is None:
        lost = ("No part of its graph is wrong by itself: only the whole is.",) if off else ()
        return replace(result, notes=(*result.notes, *lost), seconds=time.perf_counter() - began)
    script, problem = _write(part, folder)
    return replace(
        result,
        entry=part.place(),
        reproducer=script,
        notes=(*result.notes, *([problem] if problem else [])),
        seconds=time.perf_counter() - began,
    )


def _measure(seen: SeenGraph, compiler: Compiler) -> Measured:
    a, backward = Side.of(seen.graph, seen.around), bool(seen.cotangents)
    return measure_compiled(a, compiler, seen.given, backward=backward, cotangents=seen.cotangents or None)


def _measure_emulated(seen: SeenGraph, notes: list[str]) -> dict[tuple[str, str], Reading]:
    emulating = seen.compiler.emulating()
    if emulating is None or not seen.may_be_narrow:
        return {}
    try:
        return {(reading.phase, reading.name): reading for reading in _measure(seen, emulating).readings}
    except Exception as error:
        notes.append(f"emulate_precision_casts: {_say_problem(error)}")
        return {}


def _rename(reading: Reading, seen: SeenGraph) -> Reading:
    """A reading by the names of the user's modules instead of places in a graph."""
    name = _name_inputs(reading.name, seen)
    if name != reading.name:
        return replace(reading, name=name)
    if name in seen.cotangents and not seen.cotangents[name].dim() and len(seen.cotangents) == 1:
        return replace(reading, name="loss")
    return reading


def _name_inputs(text: str, seen: SeenGraph) -> str:
    """A text with the user's names for 'input[3]'."""
    names = seen.input_names
    return _INPUT.sub(lambda found: names[int(found[1])] if int(found[1]) < len(names) else found[0], text)


def _find_part(graphs: Sequence[SeenGraph], verdict: str) -> GraphPart | None:
    verdicts = ("wrong", "other-function") if verdict == "wrong" else ("farther", "wrong", "other-function")
    for seen in graphs:
        part = shrink(seen, seen.compiler, backward=bool(seen.cotangents), verdicts=verdicts)
        if part is not None:
            return part
    return None


def _find_hidden(graphs: Sequence[SeenGraph]) -> GraphPart | None:
    found = (find_hidden(seen, seen.compiler, backward=bool(seen.cotangents)) for seen in graphs)
    return next((part for part in found if part is not None), None)


def _write(part: GraphPart, folder: str | Path | None) -> tuple[Path | None, str]:
    if folder is None:
        return None, ""
    try:
        return write_reproducer(part, part.compiler, Path(folder)), ""
    except ParityError as error:
        return None, str(error)


def _say_problem(error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    return reason if isinstance(error, FloatlineError) else f"{type(error).__name__}: {reason}"
