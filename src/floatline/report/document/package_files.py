"""Files of this package that pages are made of, and the policy that lets a page run them and nothing else."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path

from floatline.base.files import write_whole


def read_text(name: str) -> str:
    """The text of one file of the room, such as 'templates/look.css'."""
    return resources.files(__name__.partition(".document.")[0]).joinpath(*name.split("/")).read_text(encoding="utf-8")


def security_policy(*, styles: str, script: str = "") -> str:
    """A Content-Security-Policy for a page with this one style element and at most this one script.

    Both are named by their hash, so that nothing a name or a note smuggles in is run or fetched.
    """
    allowed = f"; script-src {_hash(script)}" if script else ""
    return f"default-src 'none'{allowed}; style-src {_hash(styles)}; img-src data:; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def put_in_place(path: Path, text: str) -> None:
    """Write a file in one step: a reader never sees half of it.

    A link is replaced, not followed: the folder of a run may be anyone's. What UTF-8 cannot hold becomes '?'.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    write_whole(path, text.encode("utf-8", errors="replace").decode("utf-8"))
