"""What a guarded run says while it runs: single lines on stderr, from the first process alone."""

from __future__ import annotations

import sys
from pathlib import Path


def say(line: str) -> None:
    """Print one line, safe for a terminal whatever it holds."""
    words = "".join(letter if letter.isprintable() else " " for letter in f"floatline: {line}")
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def what_to_run() -> str:
    """The command that finds out why steps fail, for the script that runs here."""
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0].endswith(".py") else "train.py"
    return f"floatline diagnose -- python {script}"
