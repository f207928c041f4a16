"""A process that has torch and floatline loaded and forks for every script: loading them takes seconds, a fork none.

What runs in the fork is what `python SCRIPT ARGUMENTS` would run. The process computes nothing itself, so that a fork
finds no pool of threads that is not there.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMAND = "from floatline.cli.main import main; main()"
_SERVER = r"""
import importlib, json, os, runpy, signal, sys

import torch, floatline, floatline.cli.main
import floatline.diagnosis, floatline.training.trainer, floatline.guard.guard

# As in conftest.py: nothing is left out on a busy machine.
importlib.import_module("floatline.diagnosis.target_diagnosis").ENOUGH = 600.0


def run(ask):
    os.setpgid(0, 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(ask[name], os.O_WRONLY), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)
    os.chdir(ask["cwd"])
    os.environ.clear()
    os.environ.update(ask["env"])
    script, *arguments = ask["words"]
    try:
        if script == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path[0] = ""
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        elif script == "-m":
            sys.argv = arguments
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [script, *arguments]
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    ask = json.loads(line)
    child = os.fork()
    if child == 0:
        run(ask)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen:
    started = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(started.kill)
    return started


def run_preloaded(
    words: Sequence[str],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> subprocess.CompletedProcess:
    """As `subprocess.run([sys.executable, *words], capture_output=True, text=True)`.

    Args:
        words: A script, -c and code, or -m and a module; and its arguments.
        cwd: The folder it runs in; None is this one.
        env: Its environment; None is this one.
        timeout: Seconds; what takes longer is killed, with its own processes.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        ask = {
            "words": list(words), "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env),
            "out": str(out), "err": str(err),
        }  # fmt: skip
        server.stdin.write(json.dumps(ask) + "\n")
        server.stdin.flush()
        child = int(server.stdout.readline())
        killer = threading.Timer(timeout, os.killpg, (child, signal.SIGKILL))
        killer.start()
        try:
            code = int(server.stdout.readline())
        finally:
            killer.cancel()
        return subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())
