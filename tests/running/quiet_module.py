"""What the tests of quiet runs load: writes down where it runs, then ends as it is asked to."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from floatline.running.quiet_runs import fork_off


def main(report, how, words):
    fork_off(words)
    left = subprocess.Popen(["sleep", "600"]).pid if how == "leaves a process" else 0
    seen = {
        "parent": os.getppid(), "process": os.getpid(), "left": left, "words": words, "stdin": sys.stdin.read(),
        "mark": os.environ.get("MARK"), "temporary": tempfile.gettempdir(), "has_child": _has_child(),
        "pipes": os.environ.get("FLOATLINE_PIPES"),
    }  # fmt: skip
    Path(report).write_text(json.dumps(seen), encoding="utf-8")
    if how == "never ends":
        time.sleep(600)
    if how == "raises":
        raise ValueError(how)
    sys.stdout.write("nobody sees this")
    sys.stdout.flush()
    os._exit(0)


def _has_child():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True
