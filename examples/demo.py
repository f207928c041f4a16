"""The main job in about a minute: a GPT that FP16 breaks in silence gets a plan, and the plan is verified against FP32.

`make demo` runs it. It writes demo/report.html, which opens in any browser, with plan.yaml and fix.patch beside it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "demo"
STEPS = 60


def floatline(*words: str) -> int:
    """Run a command as a user types it, and give its exit code."""
    print(f"$ floatline {' '.join(words)}", flush=True)
    command = Path(sys.executable).with_name("floatline")
    return subprocess.run([command, *words], cwd=ROOT).returncode


def main() -> int:
    """Rescue the broken example, and say where the report is."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    code = floatline("rescue", "examples/broken_gpt.py", "--steps", str(STEPS), "--folder", "demo")
    if code == 130:
        return code
    print(f"\nThe report: {FOLDER / 'report.html'}")
    if code:
        print("The broken example was expected to be rescued.", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
