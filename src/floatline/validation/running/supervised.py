"""A command that ends with whoever started it, however that dies. It is run as a script, and imports no floatline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

GRACE = 10.0
"""Seconds that a command has to end when it is asked to, before it is killed."""


def run_supervised(
    words: list[str], *, cwd: Path, out: BinaryIO, err: BinaryIO, env: dict[str, str] | None = None
) -> int:
    """Run a command to its end; its exit code, or minus the signal that ended it.

    Ctrl-C, an error here, and the end of this process by whatever means end the command and what it started: a
    supervisor between the two waits for the pipe to close that this process holds.

    Args:
        words: The program's full path, and its arguments.
        cwd: Where it runs.
        out: Takes its output.
        err: Takes its errors.
        env: Its environment; None is this process's.
    """
    # A session of its own: Ctrl-C is for this process, which then closes the pipe.
    process = subprocess.Popen(
        [sys.executable, "-I", __file__, *words],
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=err,
        start_new_session=True,
        env=env,
    )
    try:
        return process.wait()
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


def main(words: list[str]) -> None:
    """Start the command, and end it where the pipe closes first."""
    # Not SIG_IGN, which the command would inherit. The supervisor must outlive the signals that it sends to its group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _go_on)
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.exit(f"{words[0]} cannot be run: {error.strerror}")
    done = threading.Event()
    threading.Thread(target=_watch, args=(process, done), daemon=True).start()
    code = process.wait()
    done.set()
    if code < 0:  # whoever waits is told the signal
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _watch(process: subprocess.Popen[bytes], done: threading.Event) -> None:
    sys.stdin.buffer.read()
    if done.is_set():
        return
    if sys.platform == "win32":
        process.kill()
        return
    os.killpg(0, signal.SIGTERM)
    done.wait(GRACE)
    os.killpg(0, signal.SIGKILL)


def _go_on(_number: int, _frame: object) -> None:
    pass


if __name__ == "__main__":
    main(sys.argv[1:])
