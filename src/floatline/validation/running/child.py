"""The child process: calls functions with plain data, one after the other, and writes what they give."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from floatline.errors import FloatlineError


def main() -> None:
    """Take calls from stdin, a file name a line, until it closes: whoever would read the answers is then gone."""
    calls: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(calls,), daemon=True).start()
    # What the target prints is no answer, and stdin is not the target's to read.
    with contextlib.redirect_stdout(sys.stderr):
        while True:
            answer_call(Path(calls.get()))
            _tidy()


def answer_call(file: Path) -> None:
    """Make one call, and write its value or its error.

    Args:
        file: JSON with 'call' ('module:function') and 'settings', what the function is called with. Beside it comes
            'answer' with {"value": …}, or {"error": …} where it raised: there whole or not at all.
    """
    asked: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    module, _, name = asked["call"].partition(":")
    try:
        answer = {"value": getattr(importlib.import_module(module), name)(asked["settings"])}
        text = json.dumps(answer, allow_nan=False)
    except Exception as error:
        traceback.print_exc()
        first_line = next(iter(str(error).splitlines()), "")
        # floatline's own messages say what to do, and need no name before them.
        own = isinstance(error, FloatlineError)
        text = json.dumps({"error": first_line if own else f"{type(error).__name__}: {first_line}"})
    draft = file.with_name("answer.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file.with_name("answer"))


def _listen(calls: queue.Queue[str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in sys.stdin:
            calls.put(line.rstrip("\n"))
    os._exit(0)  # also in the middle of a call


def _tidy() -> None:
    """Leave nothing of one call to the next."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
