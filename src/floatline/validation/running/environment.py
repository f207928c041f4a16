"""The environment of a study: versions, hardware, commit; by name, for the report."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from floatline.hardware import detect_devices


def describe_environment(target: str) -> dict[str, str]:
    """What a reader must have to do it again.

    Args:
        target: As the user wrote it; the commit is that of the repository its file lies in, or of the current folder.
    """
    machine = detect_devices()
    place = Path(target.rpartition(":")[0] if ":" in target else target)
    folder = place.resolve().parent if target and place.is_file() else Path.cwd()
    facts = {
        "floatline": machine.floatline,
        "torch": machine.torch or "",
        "backend": machine.backend,
        "python": machine.python,
        "system": machine.system,
        "kernel": platform.release(),
        "driver": machine.driver,
        "devices": ", ".join(device.name for device in machine.devices),
        "commit": _commit(folder),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return {name: value for name, value in facts.items() if value}


def _commit(folder: Path) -> str:
    """The commit, marked where files differ from it; '' outside of a repository."""
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    return f"{head} with changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=20)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
