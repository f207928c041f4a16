"""What has become of a sign-off: whether code, plan, report and environment are what was approved."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from floatline.base.files import find_root
from floatline.errors import ApprovalError, PlanError
from floatline.plans import Plan
from floatline.plans.presets import PLANS
from floatline.validation.running.environment import describe_environment
from floatline.validation.signoff.approval import find_current, hash_plan, name_target
from floatline.validation.signoff.records import Record, on_one_line, read_records
from floatline.validation.study.code_files import changed_file

# The commit changes with the sign-off itself, and the code has checksums of its own.
NOT_COMPARED = frozenset({"commit", "date", "kernel"})


@dataclass(frozen=True)
class Standing:
    """A target's newest record, held against what is there now.

    Args:
        target: By its path from the root.
        record: Its newest record; None where there is none.
        changed: What is not as approved, as sentences.
        unchecked: What could not be checked, as sentences.
    """

    target: str
    record: Record | None
    changed: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def approved(self) -> bool:
        """A plan is approved, and everything is as it was then."""
        return self.record is not None and self.record.action == "approve" and not self.changed

    @property
    def plan(self) -> str:
        """Name of the plan that is current: FP32 where none is approved."""
        return "fp32" if self.record is None else str(self.record.plan.get("name", "plan"))

    def as_json(self) -> dict[str, Any]:
        """Plain data for the command line."""
        record = self.record
        facts = None if record is None else {name: value for name, value in vars(record).items() if value}
        return {
            "target": self.target,
            "approved": self.approved,
            "plan": self.plan,
            "changed": list(self.changed),
            "unchecked": list(self.unchecked),
            "record": facts,
        }

    def __str__(self) -> str:
        """A few lines for people, with nothing in them that a terminal would obey."""
        return "\n".join(map(on_one_line, self._lines()))

    def _lines(self) -> list[str]:
        record = self.record
        if record is None:
            return [f"{self.target}: nothing is approved; floatline train takes its own precision"]
        if record.action == "rollback":
            return [f"{self.target}: fp32 is current", f"  rolled back {record.when} by {record.by}: {record.note}"]
        state = "as approved" if self.approved else "CHANGED since it was approved"
        lines = [f"{self.target}: {self.plan} is approved, {state}", f"  {record.verdict} {record.result}"]
        lines.append(f"  approved {record.when} by {record.by}" + (f": {record.note}" if record.note else ""))
        lines += [f"  override: {record.override}"] if record.override else []
        lines += [f"  changed: {what}" for what in self.changed]
        lines += [f"  not checked: {what}" for what in self.unchecked]
        return lines


def check_target(target: str) -> Standing:
    """Where a target stands."""
    root = find_root()
    record = find_current(target, root)
    return _check(name_target(target, root) if record is None else record.target, record, root, _Now())


def check_all() -> list[Standing]:
    """Where every target stands that was ever signed off, in the order of their first records."""
    root, newest, now = find_root(), dict[str, Record](), _Now()
    for record in read_records(root):
        newest[record.target] = record
    return [_check(target, record, root, now) for target, record in newest.items()]


def approved_plan(target: str) -> Plan:
    """The plan that is current for a target: the approved one, or FP32 after a rollback.

    Raises:
        ApprovalError: Nothing is approved, or something has changed since.
    """
    standing = check_target(target)
    if standing.record is None:
        raise ApprovalError(
            f"No plan is approved for '{target}'. Validate one, and sign it off: floatline approve REPORT --by NAME."
        )
    if standing.changed:
        raise ApprovalError(
            f"'{target}' is not as it was approved: {standing.changed[0]}. Validate and approve it again."
        )
    return _read_plan(standing.record, target, "Validate it as a target.")


@dataclass(frozen=True)
class CurrentPlan:
    """What the sign-off file says to train a target with.

    Args:
        plan: The approved plan, or FP32 after a rollback.
        text: Whose decision that is, and what has changed since, as one line.
    """

    plan: Plan
    text: str


def current_plan(target: str) -> CurrentPlan | None:
    """What to train a target with where nothing else is said; None where nothing was ever signed off.

    A plan stays current where code or environment have changed since: it is still what was last decided, and the line
    says what changed. `approved_plan` is the strict one.

    Raises:
        ApprovalError: The record was edited, or holds no plan.
    """
    standing = check_target(target)
    record = standing.record
    if record is None:
        return None
    if hash_plan(record.plan) != record.plan_sha256:
        raise ApprovalError(f"The plan that is approved for '{target}' was edited. Restore the file, or give --plan.")
    plan = _read_plan(record, target, "Give --plan.")
    if record.action == "rollback":
        return CurrentPlan(plan, on_one_line(f"plan {plan.name}: rolled back {record.when} by {record.by}"))
    text = f"plan {plan.name}: approved {record.when} by {record.by}"
    changed = list(standing.changed)
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        text += f"; CHANGED since: {changed[0]}{more} (--approved-only would stop)"
    return CurrentPlan(plan, on_one_line(text))


def _read_plan(record: Record, target: str, advice: str) -> Plan:
    try:
        return Plan(**record.plan)
    except (PlanError, TypeError) as error:
        raise ApprovalError(f"What is approved for '{target}' is not a plan: {error} {advice}") from None


@dataclass
class _Now:
    """The environment, looked at once and only where it is needed."""

    _facts: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def facts(self) -> dict[str, str]:
        if not self._facts:
            self._facts = describe_environment("")
        return self._facts


def _check(target: str, record: Record | None, root: Path, now: _Now) -> Standing:
    if record is None or record.action == "rollback":
        return Standing(target, record)
    changed, unchecked = list[str](), list[str]()
    changed += [code] if (code := changed_file(record.code, root)) else []
    unchecked += [] if record.code else ["the code: no file of the target was found when it was approved"]
    changed += _check_plan(record)
    report = root / record.report
    if not report.is_file():
        unchecked.append(f"the report: '{record.report}' is not here")
    elif hashlib.sha256(report.read_bytes()).hexdigest() != record.report_sha256:
        changed.append(f"the report '{record.report}' was changed")
    for name, value in record.environment.items():
        seen = now.facts.get(name, "")
        if name not in NOT_COMPARED and seen != value:
            changed.append(f"{name} is {seen or 'not there'}, and was {value}")
    unchecked += [] if record.environment else ["the environment: the report does not say what it was"]
    return Standing(target, record, tuple(changed), tuple(unchecked))


def _check_plan(record: Record) -> list[str]:
    if hash_plan(record.plan) != record.plan_sha256:
        return ["the plan in the sign-off file was edited"]
    own = PLANS.get(str(record.plan.get("name")))
    if own is None:
        return []
    try:
        approved = Plan(**record.plan)
    except PlanError as error:
        return [f"this floatline cannot read the approved plan: {error}"]
    # What a plan says of its reasons changes no training.
    if approved.model_copy(update={"reasons": own.reasons}) != own:
        return [f"plan '{own.name}' of this floatline is not the one that was approved"]
    return []
