"""Sign-off and rollback: which plan is current for a target, since when, and on what evidence."""

from __future__ import annotations

import getpass
import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from floatline.base.files import find_root, read_bounded
from floatline.errors import ApprovalError, ComparisonError, suggest
from floatline.plans.presets import resolve_plan
from floatline.validation.result import Validation
from floatline.validation.signoff.records import Record, append_issue, append_record, read_records
from floatline.validation.study.code_files import command_code, target_code
from floatline.validation.study.study import refuse_equal_seeds
from floatline.validation.verdict.comparison import Comparison
from floatline.validation.verdict.pairs import REFERENCE
from floatline.validation.verdict.verdict import decide

REPORTS = ("report.json", "validation.json", "rescue.json")
LARGEST_REPORT = 256 << 20


def approve(report: str | Path, *, by: str, note: str = "", override: str = "", candidate: str | None = None) -> Record:
    """Sign a report off: its plan is current for its target from now on.

    Only a PASS is signed as it is. A MARGINAL candidate is worse than was asked for, an INCONCLUSIVE one is not known
    to be good, and a REFUSED one was not measured: each needs a reason, as a FAIL does, which is kept for good.

    Args:
        report: report.json, validation.json, a rescue's rescue.json, the report.html beside one, or their folder.
        by: Who signs.
        note: What they have to say.
        override: Why it is signed although it is no PASS, or although the code has changed since.
        candidate: Which candidate of the report; None is the one that is ranked first.

    Raises:
        ApprovalError: There is no such report or candidate, or it must not be signed.
    """
    if not by.strip():
        raise ApprovalError("A sign-off needs a name. Give it with --by.")
    root, path = find_root(), _find_report(Path(report))
    data = path.read_bytes()
    fields = _read_fields(data, path)
    validation = _read_report(fields, path)
    chosen = _choose(validation, candidate, path)
    plan = validation.plans.get(chosen.candidate)
    if not plan:
        raise ApprovalError(f"'{path}' has no plan for '{chosen.candidate}', so that nothing can be signed off.")
    asked = _asked(path.parent / "study.json", fields)
    target = str(plan.get("command", validation.target))
    code = command_code(target, Path(asked["cwd"]), root) if "commands" in asked else target_code(target, root)
    problem = _problem(validation, chosen, path) or _changed_since(asked.get("code"), code, chosen.candidate)
    if problem and not override.strip():
        raise ApprovalError(f"{problem} Sign it all the same with --override REASON, which is kept.")
    record = Record(
        action="approve",
        target=name_target(target, root),
        when=_now(),
        by=by,
        plan=plan,
        plan_sha256=hash_plan(plan),
        note=note,
        verdict=chosen.verdict,
        override=override if problem else "",
        result=_result(chosen),
        report=_from_root(path, root),
        report_sha256=hashlib.sha256(data).hexdigest(),
        code=code,
        environment=validation.environment,
    )
    append_record(root, record)
    return record


def roll_back(target: str, *, reason: str, by: str | None = None) -> Record:
    """Make FP32 current again, and write down why.

    Args:
        target: As it was approved.
        reason: Why.
        by: Who; None is the user who is logged in.

    Raises:
        ApprovalError: No plan but FP32 is current, or no reason is given.
    """
    if not reason.strip():
        raise ApprovalError("A rollback needs a reason. Give it with --reason.")
    root = find_root()
    current = find_current(target, root)
    if current is None:
        raise ApprovalError(_nothing(target, root))
    if current.action == "rollback":
        raise ApprovalError(f"'{current.target}' was rolled back by {current.by} on {current.when}. FP32 is current.")
    plan = resolve_plan(REFERENCE).model_dump(mode="json")
    by = by or _user()
    record = Record("rollback", current.target, _now(), by, plan, hash_plan(plan), note=reason)
    append_record(root, record)
    facts = {
        "by": by,
        "reason": reason,
        "plan until then": f"{current.plan.get('name', '')}, {current.verdict}, sha256 {current.plan_sha256[:12]}",
        "approved": f"{current.when} by {current.by}" + (f", override: {current.override}" if current.override else ""),
        "its report": f"{current.report}, sha256 {current.report_sha256[:12]}",
        "current now": REFERENCE,
    }
    append_issue(root, f"{record.when}: {current.target} rolled back to FP32", facts)
    return record


def find_current(target: str, root: Path) -> Record | None:
    """The newest record of a target; None where there is none."""
    name = name_target(target, root)
    return next((record for record in reversed(read_records(root)) if record.target == name), None)


def name_target(target: str, root: Path) -> str:
    """A target by its path from the root, however it was written: './train.py:build' is 'train.py'."""
    place, _, name = target.rpartition(":")
    place, name = (place, name) if place and name.isidentifier() else (target, "")
    path = Path(place)
    if not path.is_file():
        return target.removesuffix(":build")
    text = _from_root(path, root)
    return text if name in ("", "build") else f"{text}:{name}"


def hash_plan(plan: dict[str, Any]) -> str:
    """SHA-256 of a plan's data, whatever the order of its keys."""
    text = json.dumps(plan, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _problem(validation: Validation, chosen: Comparison, path: Path) -> str:
    """Why it must not be signed as it is; '' where it may."""
    if chosen.verdict != "PASS":
        return f"The verdict on '{chosen.candidate}' is {chosen.verdict}: {chosen.reason}."
    seen = _verdict_of_runs(validation, chosen)
    if seen != chosen.verdict:
        return f"'{path}' says {chosen.verdict} of '{chosen.candidate}', and its own runs say {seen}."
    return ""


def _verdict_of_runs(validation: Validation, chosen: Comparison) -> str:
    """The verdict that the report's runs give, so that nobody can write another one into it."""
    try:
        again = decide(validation.runs, candidate=chosen.candidate, terms=chosen.terms, reference=chosen.reference)
        return refuse_equal_seeds(again, validation.runs).verdict
    except ComparisonError as error:
        return f"nothing ({error})"


def _asked(study: Path, report: Any) -> dict[str, Any]:
    """What a report itself, or the study beside it, was begun with; empty where neither says it."""
    asked: object = cast("dict[str, Any]", report).get("asked") if isinstance(report, dict) else None
    try:
        asked = asked or json.loads(read_bounded(study))["asked"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return cast("dict[str, Any]", asked) if isinstance(asked, dict) else {}


def _changed_since(then: Any, now: dict[str, str], candidate: str) -> str:
    """What was changed after the study began; '' where nothing was, or nothing is known of it."""
    changed = ""
    if isinstance(then, str) and then and now and then not in now.values():
        changed = "The target's file"
    if isinstance(then, dict):
        known = cast("dict[str, Any]", then).get(candidate, {})
        changed = next((f"'{name}'" for name, digest in now.items() if known.get(name) != digest), "")
    return f"{changed} was changed after the study began, so that it is not what was validated." if changed else ""


def _find_report(report: Path) -> Path:
    if report.is_dir():
        found = next((report / name for name in REPORTS if (report / name).is_file()), None)
        if found is None:
            raise ApprovalError(f"'{report}' has neither {' nor '.join(REPORTS)}. Finish the study first.")
        return found
    if not report.is_file():
        raise ApprovalError(f"Report '{report}' is not there. Give report.json, or the folder of the study.")
    if report.suffix in (".html", ".md"):
        return _find_report(report.parent)
    if report.suffix != ".json":
        raise ApprovalError(f"Report '{report}' is not JSON. Give the report.json beside it.")
    if report.stat().st_size > LARGEST_REPORT:
        raise ApprovalError(f"Report '{report}' is larger than {LARGEST_REPORT >> 20} MiB. Give the study's own.")
    return report


def _read_fields(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApprovalError(
            f"'{path}' is not the report of a validation: {str(error)[:200]}. Give the study's own."
        ) from None


def _read_report(fields: Any, path: Path) -> Validation:
    if isinstance(fields, dict) and "validation" in fields:
        outcome = cast("dict[str, Any]", fields).get("outcome")
        fields = cast("dict[str, Any]", fields)["validation"]
        if fields is None:
            raise ApprovalError(f"'{path}' has no validation, so nothing can be signed: the rescue ended '{outcome}'.")
    try:
        validation = Validation.from_json(fields)
    except (ComparisonError, ValueError, RecursionError) as error:
        raise ApprovalError(
            f"'{path}' is not the report of a validation: {str(error)[:200]} Give the study's own."
        ) from None
    if not validation.comparisons:
        raise ApprovalError(f"'{path}' compares nothing. Give the report of a study that came to its end.")
    return validation


def _choose(validation: Validation, candidate: str | None, path: Path) -> Comparison:
    if candidate is None:
        return validation.best
    found = next((c for c in validation.comparisons if c.candidate == candidate), None)
    if found is None:
        names = [c.candidate for c in validation.comparisons]
        raise ApprovalError(f"'{path}' has no candidate '{candidate}'. {suggest(candidate, names)}")
    return found


def _result(comparison: Comparison) -> str:
    terms = comparison.terms
    first, second = (terms.size(margin) for margin in terms.margins)
    text = f"{terms.metric}: {comparison.reason}"
    pairing = "paired seeds" if comparison.paired else "unpaired runs"
    flags = "".join(f"; {flag}" for flag in comparison.flags)
    return f"{text}; margins {first} and {second}, {len(comparison.seeds)} {pairing}{flags}"


def _nothing(target: str, root: Path) -> str:
    known = sorted({record.target for record in read_records(root)})
    near = f" {suggest(name_target(target, root), known)}" if known else ""
    return f"Nothing is approved for '{target}', so that FP32 is current.{near}"


def _from_root(path: Path, root: Path) -> str:
    full = path.resolve()
    return full.relative_to(root).as_posix() if full.is_relative_to(root) else str(full)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have a user without a name
        return "unknown"
