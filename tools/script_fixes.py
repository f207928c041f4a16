"""Scores the changes that `diagnose` offers for the planted scripts of tests/scripts; see score_fixes.py.

For each script that fails for its precision or its loop: is a change offered; does the changed file parse; is it
diagnosed as healthy in a run of its own, and are the losses of its steps finite and beside FP32's; and does FP32 end
with the loss that it had without the change? Runs are as long as the script, 120 steps at most. Where the losses are
not beside FP32's, they are looked at with three seeds, and so is the script without the failure: what befalls that as
often says nothing about the change.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from score_fixes import PAGE, apply_patch
from tests.scripts.planted import FOLDER, PLANTED, Planted, make_script

from floatline.base.texts import on_one_line
from floatline.diagnosis.fix_trials import FP32Run
from floatline.errors import FloatlineError
from floatline.plans.presets import resolve_plan
from floatline.rescuing.short_run import Trial, find_shortfall
from floatline.validation.study.script_arms import ScriptArm, run_script

BEGIN, END = "<!-- Script scores: made by tools/score_fixes.py -->", "<!-- End of script scores -->"
STEPS = 120
# FP32 may differ by this share between a script and its changed form: rounding, over all steps. Losses below the second
# share of the first one count as 0.
LAST, ROUNDING, CONVERGED = 8, 0.02, 0.05
SEEDS = range(3)
UNREAD = "losses were not read: no optimizer of torch makes a step"


@dataclass(frozen=True)
class ScriptFix:
    """What came of the change for a script.

    Args:
        name: Of script and failure.
        cause: That was found first.
        code: The change; '' where none is offered.
        wrong: What is wrong with it; '' where nothing is.
        unknown: Why its losses say nothing about it; '' where they do.
        said: What the diagnosis says of changes.
    """

    name: str
    cause: str
    code: str
    wrong: str
    unknown: str
    said: str

    @property
    def harmful(self) -> bool:
        """Whether a change is offered that does not hold."""
        return bool(self.code and self.wrong)

    @property
    def row(self) -> str:
        """A line of the table."""
        code = f"`{on_one_line(self.code)}`" if self.code else self.said
        holds = f"**{self.wrong}**" if self.wrong else (f"healthy; {self.unknown}" if self.unknown else "yes")
        cells = (self.name, self.cause, code, holds if self.code else "")
        shown = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
        return f"| {' | '.join(shown)} |"


def diagnose(words: list[str], folder: Path, *options: str) -> dict[str, Any]:
    """What `floatline diagnose` says of a script."""
    start = [sys.executable, "-m", "floatline", "diagnose", "--as", "cuda", "--format", "json", *options, "--"]
    run = subprocess.run([*start, *words], capture_output=True, text=True, cwd=folder)
    return json.loads(run.stdout) if run.stdout.strip() else {"findings": [], "verdict": "error"}


def train(words: list[str], plan: str | None, folder: Path, *, seed: int = 0) -> Trial:
    """The losses of a script as it is, or in FP32, its own seeds raised; watched by nothing but its log."""
    under = None if plan is None else resolve_plan(plan)
    arm = ScriptArm(plan or "given", tuple(words), under, folder, steps=STEPS, device="cuda", shifts=True)
    try:
        made = run_script(arm.job(seed))
    except FloatlineError as error:
        return Trial((), (), str(error), 0.0)
    return Trial(made.losses, made.skipped, made.error, made.seconds, made.scale)


def look_at_losses(given: Trial, fp32: Trial) -> str:
    """What 16 bits lack against FP32; '' where nothing. What a scaler skips may be infinite."""
    applied = [loss for step, loss in enumerate(given.losses) if step not in given.skipped]
    if not all(map(math.isfinite, applied)):
        return "the loss of a step in 16 bits is not finite"
    return find_shortfall(given, fp32)


def find_wrong(script: Path, changed: Path, words: list[str], *, healthy: Path) -> tuple[str, str]:
    """What is wrong with a changed script, '' where nothing is; and why its losses say nothing, '' where they do."""
    try:
        compile(changed.read_text(encoding="utf-8"), changed.name, "exec")
    except SyntaxError as error:
        return f"does not parse: {error.msg}", ""
    again = diagnose([sys.executable, str(changed), *words], changed.parent, "--no-try")
    if again["verdict"] != "healthy":
        causes = [one["cause"] for one in again["findings"]] or [again["verdict"]]
        return f"not healthy: {causes[0]}", ""

    def run(path: Path, plan: str | None, seed: int = 0) -> Trial:
        return train([sys.executable, str(path), *words], plan, changed.parent / "runs" / path.parent.name, seed=seed)

    given, after, before = run(changed, None), run(changed, "fp32"), run(script, "fp32")
    if given.error or after.error:
        return f"raises: {given.error or after.error}", ""
    if not given.losses and not before.losses:
        return "", UNREAD
    # A failure that FP32 has as well: with the change it must be what it is without the failure.
    reference = run(healthy, "fp32") if before.error or FP32Run(before.losses).unsound else before
    if not reference.error and all(map(math.isfinite, reference.losses)):
        ends = [statistics.fmean(one.losses[-LAST:]) for one in (reference, after)]
        if not abs(ends[1] - ends[0]) <= ROUNDING * max(abs(ends[0]), abs(reference.losses[0]) * CONVERGED):
            return f"FP32 ends at {ends[1]:.4g} instead of {ends[0]:.4g}", ""
    wrong = look_at_losses(given, after)
    if not wrong:
        return "", ""
    with_change, without = (
        sum(bool(look_at_losses(run(path, None, seed), run(path, "fp32", seed))) for seed in SEEDS)
        for path in (changed, healthy)
    )
    text = f"not beside FP32 with {with_change} of {len(SEEDS)} seeds, without the failure with {without}: {wrong}"
    return (text, "") if with_change > without else ("", text)


def score(planted: Planted) -> ScriptFix:
    """Diagnose a script, apply what is offered, and run the result without floatline's hand in it."""
    name, words = f"{planted.script}/{planted.name}", list(planted.arguments)
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "before"), Path(folder, "after")
        first.mkdir(), second.mkdir()
        script = make_script(planted, first)
        found = diagnose([sys.executable, script.name, *words], first)
        entry = found["findings"][0] if found["findings"] else {"cause": found["verdict"], "patch": "", "fix": ""}
        said = entry.get("tried") or "no change of the source is known"
        if not entry["patch"]:
            return ScriptFix(name, entry["cause"], "", "", "", said)
        changed = second / script.name
        try:
            text = apply_patch(script.read_text(encoding="utf-8"), entry["patch"])
        except AssertionError:
            return ScriptFix(name, entry["cause"], entry["fix"], "the patch does not apply", "", said)
        changed.write_text(text, encoding="utf-8")
        wrong, unknown = find_wrong(script, changed, words, healthy=FOLDER / script.name)
        return ScriptFix(name, entry["cause"], entry["fix"], wrong, unknown, said)


def page(scores: list[ScriptFix]) -> str:
    """This part of the page: what is offered and does not hold first, then what gets no change."""
    offered = [one for one in scores if one.code]
    harmful = [one for one in offered if one.harmful]
    unknown = [one for one in offered if one.unknown]
    rest = [one for one in scores if not one.code]
    good = [one for one in offered if not one.harmful]
    share = f"{100 * len(good) / max(1, len(scores)):.0f} %"
    lines = [
        BEGIN,
        f"All {len(scores)} have their cure in the source. The bar is a change that holds for 90 % of them, and none "
        f"that does not hold: **{len(good)} of {len(scores)}, {share}, and {len(harmful)}**.",
        "",
        "| planted scripts that fail for their precision or their loop | " + f"{len(scores)} |",
        "|---|---|",
        f"| are offered a change that does not hold | {len(harmful)} |",
        f"| get a change | {len(offered)} |",
        f"| ... that parses, is healthy in 16 bits beside FP32, and keeps FP32's result | {len(good) - len(unknown)} |",
        f"| ... that parses and is healthy, and whose losses say nothing | {len(unknown)} |",
        f"| get none | {len(rest)} |",
        "",
        "| script | cause that was found | change, or why there is none | holds |",
        "|---|---|---|---|",
        *(one.row for one in (*harmful, *rest, *good)),
        END,
    ]
    return "\n".join(lines)


def score_scripts(prefixes: list[str], processes: int, kept: Path | None) -> None:
    """Score, print, and write this part of the page if every script was scored."""
    os.environ["OMP_NUM_THREADS"] = "1"
    lines = kept.read_text(encoding="utf-8").splitlines() if kept is not None and kept.exists() else []
    known = {one.name: one for one in (ScriptFix(**json.loads(line)) for line in lines)}

    def score_once(planted: Planted) -> ScriptFix:
        return known.get(f"{planted.script}/{planted.name}") or score(planted)

    wanted = [one for one in PLANTED if f"{one.script}/{one.name}".startswith(tuple(prefixes) or ("",))]
    scores: list[ScriptFix] = []
    with ThreadPoolExecutor(processes) as pool:
        for one in pool.map(score_once, [one for one in wanted if one.verdict == "precision"]):
            print(one.row, flush=True)
            scores.append(one)
            if kept is not None and one.name not in known:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    print("\n".join(page(scores).splitlines()[1:10]))
    if not prefixes:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[-1]
        PAGE.write_text(before + page(scores) + after, encoding="utf-8")
        print(f"wrote {PAGE.name}")
