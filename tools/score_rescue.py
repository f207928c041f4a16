"""Gives cases of tests/cases that are range or rounding to rescue, and trains each under the plan that comes back.

python tools/score_rescue.py [PREFIX ...]: whether each reaches its TARGET with its code as it is, or why not.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.cases.harness import Case, all_cases, on_path  # noqa: E402

from floatline.causes import CAUSES  # noqa: E402


def is_asked(case: Case) -> bool:
    """Whether a plan may be expected: a build() case of range or rounding."""
    return case.kind == "build" and not case.healthy and CAUSES[case.expect["cause"]].family in ("range", "rounding")


def score(case: Case) -> tuple[str, str]:
    """'trains', 'code change' or 'FAILS', and why."""
    from floatline.rescuing.rescue import find_plan

    steps = getattr(case.module, "STEPS", 40)
    rescue = find_plan(str(case.path), steps=steps)
    if rescue.plan is None:
        what = "code change" if rescue.outcome == "code-change" else "FAILS"
        tried = "; ".join(f"{t.does}: {t.shortfall}" for t in rescue.tried)
        return what, f"{rescue.words} {tried}"
    trains, text = reaches_target(case, rescue.plan, steps)
    before = next((t.shortfall for t in rescue.tried), "") or "keeps up, too"
    return "trains" if trains else "FAILS", f"{rescue.does}: {text} (nothing changed: {before[:70]})"


def reaches_target(case: Case, plan: object, steps: int) -> tuple[bool, str]:
    """Train under a plan as `floatline train` does, with the CPU's autocast lists, and judge as the cases do."""
    from floatline.numerics.half_on_cpu import HalfOnCPU
    from floatline.training.trainer import Trainer
    from floatline.workload import load_target

    outcomes = []
    workload = load_target(str(case.path)).build(0)
    trainer = Trainer(workload, plan=plan, folder=None, steps=steps, on_step=outcomes.append)
    with contextlib.closing(trainer.guard), HalfOnCPU():
        for _ in range(steps):
            trainer.step()
        trainer.guard.drain()
    last = [outcome.loss for outcome in outcomes][-len(workload.batches) :]
    measure = getattr(case.module, "metric", None)
    metric = measure(workload.model.float()) if measure else math.fsum(last) / len(last)
    finite = all(bool(p.isfinite().all()) for p in workload.model.parameters())
    return finite and math.isfinite(metric) and metric < case.module.TARGET, f"{metric:.4g} < {case.module.TARGET}"


def main() -> None:
    """Score the cases whose names begin with one of the prefixes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="*", default=[""])
    asked = tuple(parser.parse_args().prefixes)
    counts: dict[str, int] = {}
    for case in all_cases():
        if not case.name.startswith(asked) or not is_asked(case):
            continue
        began = time.monotonic()
        with warnings.catch_warnings(), on_path(), Path(os.devnull).open("w") as nowhere:
            warnings.simplefilter("ignore")
            try:
                with contextlib.redirect_stdout(nowhere):
                    what, why = score(case)
            except Exception as error:  # one case must not end the scoring
                what, why = "FAILS", f"{type(error).__name__}: {error}"
        counts[what] = counts.get(what, 0) + 1
        print(f"{case.name:<34} {what:<12} {time.monotonic() - began:5.1f} s  {why}", flush=True)
    print(", ".join(f"{what}: {number}" for what, number in sorted(counts.items())))


if __name__ == "__main__":
    main()
