"""The main job in a minute or two: a target that FP16 breaks is diagnosed, and a plan is proven against FP32.

`make demo` runs it. It writes demo/report.html, which opens in any browser.
"""

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent
FOLDER = EXAMPLES.parent / "demo"
STEPS = 80


def floatline(*words: str) -> int:
    """Run a command as a user types it, and give its exit code."""
    print(f"\n$ floatline {' '.join(words)}", flush=True)
    command = Path(sys.executable).with_name("floatline")
    return subprocess.run([command, *words], cwd=EXAMPLES.parent).returncode


def main() -> int:
    """Diagnose, then prove."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    if floatline("diagnose", "examples/broken_mask.py") != 1:
        print("The broken example was expected to be found broken.", file=sys.stderr)
        return 1
    proven = floatline(
        *("validate", "examples/small_gpt.py", "--plan", "fp16-mixed", "--steps", str(STEPS), "--folder", "demo")
    )
    print(f"\nThe report: {FOLDER / 'report.html'}")
    return proven


if __name__ == "__main__":
    sys.exit(main())
