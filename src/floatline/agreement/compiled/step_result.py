"""CompiledStep: what torch.compile made of a training step, as frozen data; the verdict is derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from floatline.agreement.compiled.compiled_report import CompiledReport
from floatline.agreement.place import EntryPlace
from floatline.agreement.reading import Reading
from floatline.agreement.result import say

Nearness = Literal["nearer", "as near", "farther", "wrong"]
_ALIKE = 1.1  # distances to FP32 within this factor are the same


@dataclass(frozen=True)
class StepReading:
    """One output or gradient of one graph: the loss, what a graph hands on, a weight's gradient, a buffer.

    Args:
        graph: Number of the graph, from 0.
        reading: Eager (A) against compiled (B).
        emulated: Eager against compiled with eager's casts; None where the backend has no such option.
    """

    graph: int
    reading: Reading
    emulated: Reading | None = None

    @property
    def nearness(self) -> Nearness:
        """Where compiled code is, seen from FP32, beside eager code; 'wrong' is far beyond what rounding explains."""
        one = self.reading
        if one.blames_b:
            return "farther" if one.verdict == "farther" else "wrong"
        near, far = sorted((one.a, one.b))
        if far <= max(one.floor, _ALIKE * near):
            return "as near"
        return "nearer" if one.b < one.a else "farther"

    @property
    def explained(self) -> bool:
        """Whether rounding explains how far compiled code is from FP32."""
        return not self.reading.blames_b

    def __str__(self) -> str:
        one, third = self.reading, self.emulated
        name = f"{one.name}{'' if one.phase == 'forward' else ', gradient'}"
        casts = "" if third is None else f", with eager's casts {third.b:.2g}"
        explained = ", as rounding explains" if self.nearness == "farther" and self.explained else ""
        return f"{name}: eager {one.a:.2g} from {one.exact}, compiled {one.b:.2g}{casts}: {self.nearness}{explained}"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        third = self.emulated
        return {
            "graph": self.graph,
            "is": self.nearness,
            "explained": self.explained,
            **self.reading.as_json(),
            "emulated_to_fp32": None if third is None else third.b,
            "emulated_verdict": None if third is None else third.verdict,
        }


def is_mostly_farther(readings: Sequence[StepReading]) -> bool:
    """Whether more of a graph's readings are farther from FP32 than nearer: other roundings alone would be either."""
    found = [one.nearness for one in readings]
    return found.count("farther") > found.count("nearer")


@dataclass(frozen=True)
class CompiledStep:
    """One training step: eager, compiled, compiled with eager's casts, and in FP32.

    Args:
        backend: Name of what it was compiled with.
        num_graphs: How many graphs the step has.
        readings: One for each output and gradient of each.
        entry: The smallest part that shows what is wrong; None where nothing is, or nothing smaller than the whole.
        reproducer: A script that shows it; None where there is none.
        notes: What a reader must know.
        problem: Why nothing can be said; '' where something can.
        seconds: How long it took.
    """

    backend: str
    num_graphs: int = 0
    readings: tuple[StepReading, ...] = ()
    entry: EntryPlace | None = None
    reproducer: Path | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> StepReading | None:
        """The reading that decides: what compiled code has done, before what eager code has, in the whole or a part."""
        entered = () if self.entry is None or not self.readings else (StepReading(-1, self.entry.reading),)
        every = (*self.readings, *entered)
        return max(every, key=lambda one: (not one.explained, one.reading.weight), default=None)

    @property
    def is_hidden(self) -> bool:
        """Whether the outputs of the whole are within rounding, and a part is off by itself."""
        return self.entry is not None and all(one.explained for one in self.readings)

    @property
    def verdict(self) -> Literal["agree", "farther", "wrong", "no-verdict"]:
        """What is said of compiled code: within rounding, farther from FP32 than it explains, or wrong."""
        if self.worst is None:
            return "no-verdict"
        if self.worst.explained:
            return "agree"
        return "wrong" if self.worst.nearness == "wrong" else "farther"

    @property
    def status(self) -> int:
        """Its exit code: 1 where compiled code is off, 2 where nothing can be said, else 0."""
        return {"agree": 0, "farther": 1, "wrong": 1, "no-verdict": 2}[self.verdict]

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        if self.worst is None:
            return self.problem
        text = say(self.worst.reading, "eager", "compiled")
        if self.is_hidden and self.entry is not None:
            return f"in {self.entry.module or 'a part'}, {text}; the outputs are within rounding"
        return text

    def count(self) -> str:
        """'31 outputs and gradients of 2 graphs: 30 as near to FP32 as eager code, 1 nearer'."""
        found = [one.nearness for one in self.readings]
        counts = [(found.count(kind), kind) for kind in ("as near", "nearer", "farther", "wrong")]
        said = [f"{num:,} {kind}{' as eager code' * (kind == 'as near')}" for num, kind in counts if num]
        graphs = f"{self.num_graphs} graph{'s' * (self.num_graphs > 1)}"
        return f"{len(found):,} outputs and gradients of {graphs}, by their distance to FP32: {', '.join(said)}"

    def __str__(self) -> str:
        if self.worst is None:
            return f"compiled by {self.backend}: not compared: {self.problem}"
        lines = [f"compiled by {self.backend}: {self.verdict}. {self.summary}"]
        lines.append(f"  {self.count()}")
        lines += [f"  {one}" for one in self.told()]
        lines += [] if self.entry is None else [f"  enters at {self.entry}"]
        lines += [] if self.reproducer is None else [f"  reproducer: {self.reproducer}"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def told(self) -> Sequence[StepReading]:
        """The readings that are told one by one: the loss, and the worst where something is wrong."""
        worst = self.worst
        off = sorted((one for one in self.readings if not one.explained), key=lambda one: one.reading.weight)
        losses = [one for one in self.readings if one.reading.name == "loss"]
        told = [*losses, *([worst] if worst in off else []), *off[-3:]]
        return list(dict.fromkeys(told))

    def report(self) -> CompiledReport:
        """What a report says of it."""
        return CompiledReport(self.as_json(), str(self), self.status)

    def as_json(self) -> dict[str, Any]:
        """Plain data, for `--format json`."""
        return {
            "backend": self.backend,
            "verdict": self.verdict,
            "summary": self.summary,
            "graphs": self.num_graphs,
            "outputs": [one.as_json() for one in self.readings],
            "entry": None if self.entry is None else self.entry.as_json(),
            "reproducer": None if self.reproducer is None else str(self.reproducer),
            "notes": list(self.notes),
            "problem": self.problem,
            "seconds": round(self.seconds, 3),
        }
