"""Judges the kept studies of the five systems again, from their runs, by the rules of this version.

    python tools/judge_again.py [docs/workloads/NAME_validation.json ...]

Each file is rewritten with its page and its text beside it; nothing is trained. What changed is printed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from floatline.report.validation.report import write_report
from floatline.validation.result import Validation
from floatline.validation.verdict.comparison import rank
from floatline.validation.verdict.verdict import decide

ROOT = Path(__file__).parent.parent


def judge_again(validation: Validation) -> Validation:
    """The same runs and terms, judged again; unpaired comparisons stay as they are."""
    judged = [
        decide(validation.runs, candidate=c.candidate, terms=c.terms, reference=c.reference, plan=c.plan)
        if c.paired
        else c
        for c in validation.comparisons
    ]
    return replace(validation, comparisons=rank(judged))


def main(paths: list[Path]) -> None:
    """Judge each study again."""
    for path in paths or sorted((ROOT / "docs/workloads").glob("*_validation*.json")):
        before = Validation.from_json(json.loads(path.read_text(encoding="utf-8"))["validation"])
        after = judge_again(before)
        print(f"{path.name}: {before.verdict} -> {after.verdict}, {after.best.reason}")
        with tempfile.TemporaryDirectory() as folder:
            page = write_report(after, Path(folder))
            for ending in (".json", ".md", ".html"):
                text = page.with_suffix(ending).read_text(encoding="utf-8")
                # The command is for a GPU or takes long: the tests of pages are not to run it.
                path.with_suffix(ending).write_text(text.replace("```console", "```text"), encoding="utf-8")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
