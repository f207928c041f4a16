"""Makes .venv ready for this clone; returns at once when nothing changed. Standard library only."""

import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "ready"
INPUTS = ("pyproject.toml", "constraints.txt", "tools/bootstrap.py")


def fingerprint() -> str:
    """Everything the contents of .venv depend on."""
    digest = hashlib.sha256(f"{sys.version} {ROOT}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """Caches stay inside the clone, and uv looks for wheels where pip does."""
    env = dict(os.environ)
    env.setdefault("UV_CACHE_DIR", str(VENV / "cache" / "uv"))
    env.setdefault("PIP_CACHE_DIR", str(VENV / "cache" / "pip"))
    env.setdefault("UV_COMPILE_BYTECODE", "1")  # uncompiled, the first imports cost seconds
    env.setdefault("UV_HTTP_TIMEOUT", "300")
    if "PIP_FIND_LINKS" in env:
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    if "PIP_CERT" in env:
        env.setdefault("SSL_CERT_FILE", env["PIP_CERT"])
    return env


def install(env: dict[str, str]) -> None:
    """Install the project and its development tools with uv, or with pip where uv cannot be had."""
    what = ["-e", ".[dev]", "-c", "constraints.txt"]
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, "uv"], cwd=ROOT, env=env, check=False).returncode == 0:
        uv = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON), *what]
        if subprocess.run(uv, cwd=ROOT, env=env, check=False).returncode == 0:
            return
        print("bootstrap: uv did not manage, trying pip", file=sys.stderr)
    subprocess.run([*pip, *what], cwd=ROOT, env=env, check=True)


def main() -> int:
    """Create or refresh .venv; 0 when it is ready."""
    if sys.version_info < (3, 10):  # noqa: UP036 whoever calls this may be older than the project allows
        print(
            f"bootstrap: Python {sys.version.split()[0]} is too old, floatline needs 3.10 or newer: "
            "make PYTHON=/path/to/python3.12 …",
            file=sys.stderr,
        )
        return 2
    want = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == want:
        return 0
    start = time.monotonic()
    print("bootstrap: setting up .venv (a minute or two, once)", file=sys.stderr)
    venv.create(VENV, with_pip=True, clear=not PYTHON.exists())
    try:
        install(environment())
    except subprocess.CalledProcessError as failure:
        print(f"bootstrap: the installation failed (exit {failure.returncode}), see above", file=sys.stderr)
        return 1
    partial = STAMP.with_suffix(".partial")
    partial.write_text(want)
    partial.replace(STAMP)
    print(f"bootstrap: .venv is ready, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
