"""One step eager, compiled, compiled with eager's casts, and in FP32: who is nearer, and the smallest wrong part."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from floatline.agreement.compiled.backends import Compiler, find_compiler, measure_compiled
from floatline.agreement.compiled.graphs import find_smallest
from floatline.agreement.compiled.reproducer import write_reproducer
from floatline.agreement.descent import DescentEnd, descend
from floatline.agreement.measuring import Measured
from floatline.agreement.place import EntryPlace
from floatline.agreement.reading import Reading
from floatline.agreement.result import Parity, say
from floatline.agreement.sides import Around, Given, Side
from floatline.errors import ParityError


@dataclass(frozen=True)
class CompiledParity:
    """Eager code and what torch.compile made of it.

    Args:
        parity: Eager (A) against compiled (B).
        emulated: Eager (A) against compiled with 16-bit casts where eager code has them (B); empty where the backend
            has no such option.
        reproducer: The script that shows what is wrong; None where nothing is.
    """

    parity: Parity
    emulated: tuple[Reading, ...] = ()
    reproducer: Path | None = None

    @property
    def verdict(self) -> str:
        """That of eager against compiled."""
        return self.parity.verdict

    def __str__(self) -> str:
        lines = [str(self.parity)]
        if self.emulated:
            worst = max(self.emulated, key=lambda reading: reading.weight)
            lines.append(f"  with emulate_precision_casts: {say(worst, 'eager', 'compiled')}")
        return "\n".join([*lines, *([f"  reproducer: {self.reproducer}"] if self.reproducer else [])])

    def as_json(self) -> dict[str, Any]:
        """Plain data, for `--format json`."""
        return {
            **self.parity.as_json(),
            "emulated": [reading.as_json() for reading in self.emulated],
            "reproducer": None if self.reproducer is None else str(self.reproducer),
        }


def compare_compiled(
    model: Callable[..., Any],
    batch: Any,
    *,
    backend: str | Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    backward: bool = True,
    folder: str | Path | None = None,
    around: Around = nullcontext,
) -> CompiledParity:
    """Compare eager code with what torch.compile makes of it, and with FP32.

    Nothing that was compiled before is used. What is wrong is followed from module to module, each compiled alone, then
    from node to node of its graph.

    Args:
        model: A module or function; a compiled module is compiled again, with its backend.
        batch: What it is called with, as for `parity`.
        backend: As torch.compile takes it; None: the one that the model was compiled with, else Inductor.
        options: Options of Inductor.
        backward: Whether gradients are compared, too.
        folder: Where a reproducer is written where something is wrong; None writes none.
        around: Gives the context that it runs in, such as autocast.

    Raises:
        ParityError: It cannot be compiled, or run.
    """
    start = time.perf_counter()
    compiler = Compiler(backend, options or {}) if backend is not None else find_compiler(model)
    if options and backend is None:
        compiler = replace(compiler, options={**compiler.options, **options})
    a, given = Side.of(Side.of(model).plain, around), Given.of(batch)
    notes: list[str] = []
    measured = _measure(a, given, compiler, backward=backward)
    emulated: tuple[Reading, ...] = ()
    emulating = compiler.emulating()
    if emulating is not None:
        try:
            emulated = _measure(a, given, emulating, backward=backward).readings
        except ParityError as error:
            notes.append(f"emulate_precision_casts: {error}")
    parity, entry, script = Parity("eager", "compiled", readings=measured.readings, asks_of_b=True), None, None
    if parity.verdict != "agree":
        entry, script = find_wrong_part(a, given, measured, compiler, notes, backward=backward, folder=folder)
    parity = replace(parity, entry=entry, notes=(*measured.notes, *notes), seconds=time.perf_counter() - start)
    return CompiledParity(parity, emulated, script)


def _measure(a: Side, given: Given, compiler: Compiler, *, backward: bool) -> Measured:
    try:
        return measure_compiled(a, compiler, given, backward=backward, look=True)
    except ParityError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ParityError(
            f"It cannot be compiled and run: {type(error).__name__}: {reason}. Run it by itself."
        ) from error


def find_wrong_part(
    a: Side,
    given: Given,
    measured: Measured,
    compiler: Compiler,
    notes: list[str],
    *,
    backward: bool,
    folder: str | Path | None = None,
) -> tuple[EntryPlace, Path | None]:
    """Where compiled code is off: module by module, each compiled alone, then node by node; and a script that shows it.

    Args:
        a: The eager side.
        given: Its arguments.
        measured: Eager against compiled, as a whole.
        compiler: How it was compiled.
        notes: Is told what could not be done.
        backward: Whether gradients are compared.
        folder: Where the script is written; None writes none.
    """

    def compile_child(ours: Side, _theirs: Side, name: str) -> tuple[Side, Side] | None:
        if ours.module is None or " (" in name:
            return None
        child = ours.module.get_submodule(name)
        return Side.of(child, a.around), compiler.compile(child, a.around)

    b = compiler.compile(a.plain, a.around)
    found = descend(a, b, given, measured, backward=backward, child_of=compile_child)
    if found.place.reading.verdict != "wrong":
        return found.place, None
    return _shrink(found, compiler, notes, backward=backward, folder=folder)


def _shrink(
    found: DescentEnd, compiler: Compiler, notes: list[str], *, backward: bool, folder: str | Path | None
) -> tuple[EntryPlace, Path | None]:
    """The nodes that are wrong, and the script that shows it."""
    part = find_smallest(found.a.plain, found.given, compiler, backward=backward, around=found.a.around)
    if part is None:
        notes.append("No part of its graph is wrong by itself: only the whole is.")
        return found.place, None
    own = part.place(found.place.module, found.place.kind)
    place = replace(own, others=found.place.others)
    if folder is None:
        return place, None
    try:
        return place, write_reproducer(part, compiler, Path(folder))
    except ParityError as error:
        notes.append(str(error))
        return place, None
