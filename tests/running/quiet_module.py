"""What the tests of quiet runs load: writes down where it runs, then ends as it is asked to."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main(report, how, words):
    left = subprocess.Popen(["sleep", "600"]).pid if how == "leaves a process" else 0
    seen = {
        "parent": os.getppid(), "process": os.getpid(), "left": left, "words": words, "stdin": sys.stdin.read(),
        "mark": os.environ.get("MARK"), "temporary": tempfile.gettempdir(),
    }  # fmt: skip
    Path(report).write_text(json.dumps(seen), encoding="utf-8")
    if how == "never ends":
        time.sleep(600)
    if how == "raises":
        raise ValueError(how)
    sys.stdout.write("nobody sees this")
    sys.stdout.flush()
    os._exit(0)
