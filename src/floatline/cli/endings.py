"""Ctrl-C and SIGTERM: a command that is ended says in one line what is kept, and how to go on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator

import typer


@contextlib.contextmanager
def saying_how_to_go_on(words: str) -> Generator[None]:
    """Ctrl-C ends what is inside with these words and exit code 130, SIGTERM with 143.

    Args:
        words: What is kept, and what to type next.
    """
    ended_by = signal.SIGINT
    process = os.getpid()

    def end(*_: object) -> None:
        nonlocal ended_by
        if os.getpid() != process:  # a fork has nothing to say
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        ended_by = signal.SIGTERM
        raise KeyboardInterrupt

    # Python lets only the main thread have handlers.
    mine = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if mine else None
    try:
        yield
    except KeyboardInterrupt:
        say_ended(128 + ended_by, words)
        raise typer.Exit(128 + ended_by) from None  # as shells have it: a script must not go on as after 0
    finally:
        if mine:
            signal.signal(signal.SIGTERM, before)


def say_ended(code: int, words: str) -> None:
    """Say what is kept, and what to type next, where an exit code is that of Ctrl-C or SIGTERM.

    Args:
        code: As shells have it.
        words: What is kept, and what to type next.
    """
    how = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "ended by SIGTERM"}.get(code)
    if how is not None:
        typer.echo(f"floatline: {how}. {words}", err=True)
