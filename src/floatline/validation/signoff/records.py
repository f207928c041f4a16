"""The sign-off file of a repository: a YAML list that is only added to, and the issue log beside it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from floatline.base.files import read_bounded
from floatline.base.plain_records import from_plain, to_plain
from floatline.errors import ApprovalError, ComparisonError
from floatline.ledger.folder_lock import lock_file
from floatline.plans.yaml_files import parse_yaml

APPROVALS = "floatline-approvals.yaml"
ISSUES = "floatline-issues.md"
LARGEST_FILE = 64 << 20
MOST_VALUES = 5_000_000
SECONDS_TO_WAIT = 30.0
_HEAD = {
    APPROVALS: "# Sign-offs and rollbacks, the newest last. Written by floatline approve and floatline rollback.\n",
    ISSUES: "# Precision issues\n",
}


@dataclass(frozen=True)
class Record:
    """One sign-off or rollback.

    Args:
        action: Which of the two.
        target: Whose plan it is, by its path from the root.
        when: UTC, to the second.
        by: Who.
        plan: The plan that is current from then on, in full.
        plan_sha256: Of that plan.
        note: What the one who signs has to say; the reason of a rollback.
        verdict: Of the candidate; '' for a rollback.
        override: Why a verdict other than PASS is signed all the same; '' where it is a PASS.
        result: The numbers of the verdict in one line.
        report: The report's path from the root.
        report_sha256: Of the report's file.
        code: SHA-256 of each file of the target, by its path from the root.
        environment: Where it was validated: versions and hardware.
    """

    action: Literal["approve", "rollback"]
    target: str
    when: str
    by: str
    plan: dict[str, Any]
    plan_sha256: str
    note: str = ""
    verdict: str = ""
    override: str = ""
    result: str = ""
    report: str = ""
    report_sha256: str = ""
    code: dict[str, str] = field(default_factory=dict[str, str])
    environment: dict[str, str] = field(default_factory=dict[str, str])


def read_records(root: Path) -> list[Record]:
    """Every record, in the order of writing; none where there is no file.

    Raises:
        ApprovalError: The file is no list of records.
    """
    path = root / APPROVALS
    try:
        data = parse_yaml(read_bounded(path, most=LARGEST_FILE).decode("utf-8"), most=MOST_VALUES)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ApprovalError(f"{path} cannot be read: {_one_line(error)}. Restore it from version control.") from None
    if data is None:
        return []
    if not isinstance(data, list):
        raise ApprovalError(f"{path} holds no list of records. Restore it from version control.")
    try:
        return [from_plain(Record, entry) for entry in cast("list[Any]", data)]
    except ComparisonError as error:
        raise ApprovalError(f"{path}: {error} Restore it from version control.") from None


def append_record(root: Path, record: Record) -> None:
    """Add a record at the end of the sign-off file; ApprovalError where what is there cannot be read."""
    read_records(root)
    plain = {entry.name: to_plain(getattr(record, entry.name)) for entry in fields(record)}
    shown = {name: value for name, value in plain.items() if value not in ("", {})}
    text = yaml.dump([shown], Dumper=_OneLine, sort_keys=False, allow_unicode=True, width=1 << 30)
    _append(root / APPROVALS, text)


def append_issue(root: Path, title: str, facts: dict[str, str]) -> None:
    """Add a section to the issue log; every text is kept as text, on one line."""
    lines = [f"\n## {escape(title)}\n", *(f"- {name}: {escape(fact)}" for name, fact in facts.items())]
    _append(root / ISSUES, "\n".join(lines) + "\n")


def escape(text: str) -> str:
    """A text as Markdown shows it: nothing in it is markup, and it has no line breaks."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", on_one_line(text))


def on_one_line(text: str) -> str:
    """A text that a terminal shows as it is: line breaks and other control characters are spelled out."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


class _OneLine(yaml.SafeDumper):
    """Writes text with control characters in quotes, with escapes, so that a record's lines are its fields."""


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_OneLine.add_representer(str, _write_text)


def _append(path: Path, text: str) -> None:
    """Add text to a file: whole or not at all, and nothing that another process adds meanwhile is lost."""
    try:
        with _held(path) as file:
            old = _read_whole(file)
            new = (old or _HEAD[path.name].encode()) + text.encode()
            if sys.platform == "win32":  # there an open file cannot be replaced
                os.lseek(file, 0, os.SEEK_SET)
                os.write(file, new)
                os.fsync(file)
                return
            draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                with draft.open("wb") as fresh:
                    fresh.write(new)
                    fresh.flush()
                    os.fsync(fresh.fileno())
                draft.chmod(os.fstat(file).st_mode & 0o777)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
    except OSError as error:
        raise ApprovalError(f"{path} cannot be written: {error.strerror}. Check its permissions.") from None


@contextlib.contextmanager
def _held(path: Path) -> Generator[int]:
    """The file, locked; made where it is missing. The lock is the operating system's, and ends with the process."""
    until = time.monotonic() + SECONDS_TO_WAIT
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            with contextlib.suppress(BlockingIOError):
                lock_file(file)
                # Whoever held it before may have put another file in its place.
                if os.path.samestat(os.fstat(file), path.stat()):
                    yield file
                    return
        finally:
            os.close(file)
        if time.monotonic() > until:
            raise ApprovalError(f"{path} has been held by another process for {SECONDS_TO_WAIT:g} s. Try again.")
        time.sleep(0.02)


def _read_whole(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    parts: list[bytes] = []
    while part := os.read(file, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
