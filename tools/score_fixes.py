"""Scores the changes of the source that `diagnose` offers, in docs/fixes.md: for tests/cases, or for tests/scripts.

    python tools/score_fixes.py [PREFIX ...] [--scripts] [--kept FILE] [--processes N]

For each case that fails for its precision or its loop: is a change offered; does the changed file train in 16 bits and
reach the case's target; and is FP32's result with the change what it was? Each case runs in processes of its own. With
a prefix, only the cases whose names begin so are scored, and no page is written. `--scripts` scores the planted scripts
instead, see script_fixes.py beside this file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "fixes.md"
BEGIN, END = "<!-- Scores: made by tools/score_fixes.py -->", "<!-- End of scores -->"
sys.path.insert(0, str(ROOT))

from tests.cases.harness import Case, all_cases  # noqa: E402

from floatline.base.texts import on_one_line  # noqa: E402
from floatline.causes import find_cause  # noqa: E402

# FP32 may differ by this share of its final metric between a case and its changed form: rounding, over all steps.
ROUNDING = 1e-2

RUN = """
import json, sys
sys.path.insert(0, {root!r})
from floatline.base.patched_sources import patch_sources
patch_sources(json.loads(sys.stdin.read()))
from pathlib import Path
from tests.cases.harness import Case
case = Case(Path({path!r}))
given = case.run("as given")
fp32 = case.run("same in fp32") if "same in fp32" in case.variants else given
print("\\n" + json.dumps([given.trains, given.text, fp32.text]))
"""


@dataclass(frozen=True)
class FixScore:
    """What came of the change for a case."""

    name: str
    cause: str
    code: str
    trains: bool | None
    same_in_fp32: bool | None
    said: str

    @property
    def row(self) -> str:
        """A line of the table."""
        words = {True: "yes", False: "**no**", None: ""}
        code = f"`{on_one_line(self.code)}`".replace("|", "\\|") if self.code else self.said
        return f"| {self.name} | {self.cause} | {code} | {words[self.trains]} | {words[self.same_in_fp32]} |"


def run_case(case: Case, sources: dict[str, str]) -> tuple[bool, str, str]:
    """Whether a case trains as given with changed texts, what it says of that, and of FP32."""
    code = RUN.format(root=str(ROOT), path=str(case.path))
    run = subprocess.run([sys.executable, "-c", code], input=json.dumps(sources), capture_output=True, text=True)
    if run.returncode:
        return False, run.stderr.strip().splitlines()[-1], ""
    trains, text, fp32 = json.loads(run.stdout.strip().splitlines()[-1])
    return trains, text, fp32


def metric(text: str) -> float:
    """The final metric that a case's outcome tells."""
    found = re.search(r"metric ([^ ]+)", text)
    return float(found[1]) if found else math.nan


def score(case: Case) -> FixScore:
    """Diagnose a case, apply what is offered, and run it by a loop that is not floatline's."""
    words = [sys.executable, "-m", "floatline", "diagnose", str(case.path), "--format", "json"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=case.path.parent)
    found: dict[str, Any] = json.loads(run.stdout) if run.stdout.strip() else {"findings": []}
    first = (
        found["findings"][0] if found["findings"] else {"cause": found.get("verdict", "error"), "patch": "", "fix": ""}
    )
    cause, said = first["cause"], first.get("tried") or ""
    if not first["patch"]:
        return FixScore(case.name, cause, "", None, None, said or "no change of the source is known")
    text = apply_patch(case.path.read_text(encoding="utf-8"), first["patch"])
    trains, _, fp32 = run_case(case, {str(case.path): text})
    before, after = (metric(one) for one in (run_case(case, {})[2], fp32))
    same = not case.module.FP32_TRAINS or abs(before - after) <= ROUNDING * max(abs(before), 1e-3)
    return FixScore(case.name, cause, first["fix"], trains, same, said)


def apply_patch(text: str, patch: str) -> str:
    """A text with a unified diff applied; every line of its context must be there."""
    old, result, at = text.split("\n"), [], 0
    for line in patch.splitlines():
        if line.startswith("@@"):
            start = int(re.match(r"@@ -(\d+)", line)[1]) - 1  # type: ignore[index]
            result += old[at:start]
            at = start
        elif line[:1] in (" ", "-") and not line.startswith("---"):
            assert old[at] == line[1:], (old[at], line)
            result += [line[1:]] if line[0] == " " else []
            at += 1
        elif line.startswith("+") and not line.startswith("+++"):
            result.append(line[1:])
    return "\n".join(result + old[at:])


def page(scores: list[FixScore]) -> str:
    """The part of the page."""
    offered = [one for one in scores if one.code]
    good = [one for one in offered if one.trains and one.same_in_fp32]
    lines = [
        BEGIN,
        f"Of {len(scores)} cases that fail for their precision or their loop, {len(offered)} get a change of their "
        f"source, and {len(good)} of these train in 16 bits to their target and keep FP32's result.",
        "",
        "| case | cause | change | trains | FP32 is the same |",
        "|---|---|---|---|---|",
        *(one.row for one in scores),
        END,
    ]
    return "\n".join(lines)


def main() -> None:
    """Score, print, and write the page if every case was scored."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX")
    parser.add_argument("--scripts", action="store_true", help="The planted scripts of tests/scripts.")
    parser.add_argument("--kept", type=Path, help="With --scripts: keeps scores here, and goes on with those it holds.")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.scripts:
        from script_fixes import score_scripts

        score_scripts(asked.prefixes, asked.processes, asked.kept)
        return
    cases = [case for case in all_cases() if not case.healthy and case.name.startswith(tuple(asked.prefixes) or ("",))]
    cases = [case for case in cases if find_cause(case.expect["cause"]).family != "not-precision"]
    with ThreadPoolExecutor(asked.processes) as pool:
        scores = []
        for one in pool.map(score, cases):
            print(one.row, flush=True)
            scores.append(one)
    print(page(scores).splitlines()[1])
    if not asked.prefixes:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[-1]
        PAGE.write_text(before + page(scores) + after, encoding="utf-8")
        print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
