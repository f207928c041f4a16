"""Builds wheel and sdist, installs the wheel into an empty environment, and tries it there. Standard library only.

    python tools/release.py

Everything is tried in a folder of its own, with nothing of the clone on the path.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import bootstrap

DIST = bootstrap.ROOT / "dist"
BROKEN, LOOP = "examples/broken_gpt.py", "examples/guard_loop.py"
FILES = (BROKEN, LOOP, "LICENSE")  # the text that it learns


def build_wheel() -> Path:
    """Build both, and give the wheel's path."""
    for old in DIST.glob("floatline-*"):
        old.unlink()
    subprocess.run([str(bootstrap.PYTHON), "-m", "build", "--no-isolation"], cwd=bootstrap.ROOT, check=True)
    (wheel,) = DIST.glob("floatline-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel, its torch, and nothing else; gives its Python."""
    venv.create(folder, with_pip=False)
    python = folder / bootstrap.PYTHON.relative_to(bootstrap.VENV)
    uv = [str(bootstrap.PYTHON), "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    what = [f"{wheel}[torch]", "-c", str(bootstrap.ROOT / "constraints.txt")]
    subprocess.run([*uv, *what], env=bootstrap.environment(), check=True)
    return python


def attempt(python: Path, folder: Path, *arguments: str, code: int = 0, says: str = "") -> None:
    """Run a command there; whatever is not as it should be ends the release."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ran = subprocess.run(
        [str(python.parent / arguments[0]), *arguments[1:]],
        cwd=folder, env=clean, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = ran.stdout + ran.stderr
    if ran.returncode != code or says not in said:
        sys.exit(f"release: {' '.join(arguments)} exits with {ran.returncode} and says:\n{said}")
    print(f"release: {' '.join(arguments)[:60]}: as it should be")


def main() -> None:
    """Build, install, try."""
    wheel = build_wheel()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = install(wheel, folder / "venv")
        (folder / "examples").mkdir()
        for file in FILES:
            shutil.copy(bootstrap.ROOT / file, folder / file)
        version = wheel.name.split("-")[1]
        attempt(python, folder, "python", "-c", "import floatline; print(floatline.__version__)", says=version)
        attempt(python, folder, "floatline", "--version", says=version)
        attempt(python, folder, "floatline", "doctor", says="Use")
        attempt(python, folder, "floatline", "explain", "reduction-overflow", says="FP32")
        attempt(python, folder, "python", LOOP, says="applied")
        attempt(python, folder, "floatline", "lint", BROKEN, code=1, says="FL1")
        attempt(python, folder, "floatline", "diagnose", BROKEN, code=1, says="broken_gpt.py:")
        attempt(python, folder, "floatline", "rescue", BROKEN, "--steps", "60", "--folder", "rescued", says="plan.yaml")
        attempt(python, folder, "floatline", "train", BROKEN, "--plan", "rescued/plan.yaml", "--steps", "20")
    print(f"release: dist/{wheel.name} is ready")


if __name__ == "__main__":
    main()
