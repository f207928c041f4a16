"""Fuzzing by coverage, for as long as is asked: inputs that reach new lines of the readers are kept and mutated on.

python tests/hostile/long_run.py --seconds 300 [--only ledger] [--seed 1]
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.hostile.artefacts import READERS, Parts, Reader, take
from tests.hostile.trying import change, complaint, lay_out


class Lines:
    """The lines of the readers' modules that were ever run, by `sys.monitoring` where Python has it."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = tuple(f"/floatline/{name}" for name in modules)
        self.reached: set[tuple[str, int]] = set()
        self._files: dict[str, bool] = {}

    def __enter__(self) -> "Lines":
        if hasattr(sys, "monitoring"):
            tool = sys.monitoring
            tool.use_tool_id(tool.COVERAGE_ID, "floatline")
            tool.register_callback(tool.COVERAGE_ID, tool.events.LINE, self._line)
            tool.set_events(tool.COVERAGE_ID, tool.events.LINE)
        else:
            sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(sys, "monitoring"):
            sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
        else:
            sys.settrace(None)

    def _wanted(self, file: str) -> bool:
        if file not in self._files:
            self._files[file] = any(name in file for name in self._modules)
        return self._files[file]

    def _line(self, code, line):
        if self._wanted(code.co_filename):
            self.reached.add((code.co_filename, line))
        return sys.monitoring.DISABLE  # once is enough

    def _call(self, frame, event, arg):
        return self._trace if self._wanted(frame.f_code.co_filename) else None

    def _trace(self, frame, event, arg):
        if event == "line":
            self.reached.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace


def run(reader: Reader, folder: Path, *, seconds: float, seed: int) -> tuple[int, int, int, dict[str, Parts]]:
    """Inputs tried, inputs kept, lines reached, and one input for each different fault."""
    random = Random(seed)
    (folder / "made").mkdir()
    kept = [reader.make(folder / "made")]
    faults: dict[str, Parts] = {}
    tried, until = 0, time.monotonic() + seconds
    lines = Lines(reader.modules)
    lay_out(reader, kept[0], folder / "try")
    with lines:
        reader.read(folder / "try")  # the valid one; what it raises ends the search
    while time.monotonic() < until:
        parts = change(random.choice(kept[-20:] if random.random() < 0.5 else kept), random, reader.tokens)
        lay_out(reader, parts, folder / "try", random)
        found = take(folder / "try")  # as it lies there; reading may change it
        before = len(lines.reached)
        with lines:
            said = complaint(reader, folder / "try")
        tried += 1
        if len(lines.reached) > before:
            kept.append(parts)
        if said and (key := said.partition(": ")[0]) not in faults:
            faults[key] = found
            sys.stdout.write(f"{reader.name}: {said}\n")
            sys.stdout.flush()
    return tried, len(kept), len(lines.reached), faults


def main() -> int:
    """Every reader for so many seconds; exit code 1 where there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="for each reader")
    parser.add_argument("--only", nargs="*", choices=sorted(READERS), default=sorted(READERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the inputs that are faults")
    asked = parser.parse_args()
    num_faults = 0
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            tried, kept, lines, faults = run(READERS[name], Path(folder), seconds=asked.seconds, seed=asked.seed)
            took = time.monotonic() - began
        sys.stdout.write(
            f"{name}: {tried:,} inputs in {took:.0f} s, {kept} kept, {lines} lines, {len(faults)} faults\n"
        )
        sys.stdout.flush()
        num_faults += len(faults)
        for number, parts in enumerate(faults.values()):
            for part, data in parts.items() if asked.keep else ():
                path = asked.keep / f"{name}-{number}" / part
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
