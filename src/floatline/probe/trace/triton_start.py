"""Triton's start: before its first kernel of a process it hashes its own sources for half a second, here meanwhile."""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import Any


@cache
def begin_triton() -> threading.Thread | None:
    """Let Triton hash its sources on a thread; once a process, and None where Triton is not loaded.

    What it finds Triton keeps. A kernel is launched after `await_triton`, so that nothing depends on who is faster.
    """
    module: Any = sys.modules.get("triton.runtime.cache")
    hash_sources = getattr(module, "triton_key", None)  # other versions have it elsewhere, and take the time themselves
    if hash_sources is None:
        return None
    thread = threading.Thread(target=hash_sources, name="floatline-triton", daemon=True)
    thread.start()
    return thread


def await_triton() -> None:
    """Wait for that thread, if there is one."""
    thread = begin_triton()
    if thread is not None:
        thread.join()
