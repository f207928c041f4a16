"""Makes .venv/oldest with the oldest frameworks that are supported, and runs tests there. Standard library only."""

import hashlib
import os
import subprocess
import sys
import time
import venv

import bootstrap

VENV = bootstrap.VENV / "oldest"
PYTHON = VENV / bootstrap.PYTHON.relative_to(bootstrap.VENV)
STAMP = VENV / "ready"
INPUTS = ("constraints-oldest.txt", "tools/oldest.py")

# Each framework's own path through floatline, and what its versions differ in; not all that can be tested in them.
TESTS = (
    "test_lightning.py::test_a_skipped_step_changes_nothing_and_is_told",
    "test_lightning.py::test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped",
    "test_lightning.py::test_the_same_works_by_the_name_of_pytorch_lightning",
    "test_lightning_fabric.py::test_a_skipped_step_is_known_and_the_schedule_waits",
    "test_transformers.py::test_a_bad_batch_is_skipped_logged_as_nan_once_and_the_schedule_waits",
    "test_transformers.py::test_overflows_search_the_scale_and_are_counted_in_the_log",
    "test_transformers.py::test_in_fp32_a_guarded_run_is_the_trainers_own",
    "test_transformers.py::test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped",
    "test_transformers_peft.py",
    "test_accelerate.py::test_a_skip_is_told_whatever_the_optimizer_and_the_schedule_stands_still",
    "test_accelerate.py::test_micro_batches_are_one_step_in_the_ledger",
    "test_accelerate.py::test_saved_state_goes_on_with_the_same_bits",
    "test_torchrun.py::test_an_accelerate_loop_skips_on_all_processes",
    "test_torchrun.py::test_the_trainer_skips_on_all_processes_and_one_writes_the_ledger",
)


def fingerprint() -> str:
    """Everything the contents of .venv/oldest depend on."""
    digest = hashlib.sha256(bootstrap.fingerprint().encode())
    for name in INPUTS:
        digest.update((bootstrap.ROOT / name).read_bytes())
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """That of .venv, but for compiling ahead: most of what is installed is not imported by the tests."""
    return {**bootstrap.environment(), "UV_COMPILE_BYTECODE": "0"}


def install() -> None:
    """Install with the uv of .venv, which has torch in its cache, or with pip where uv cannot be had."""
    what = ["-e", ".[hf,lightning]", "pytest", "pytest-timeout", "trl", "-c", "constraints-oldest.txt"]
    uv = [str(bootstrap.PYTHON), "-m", "uv", "pip", "install", "--quiet", "--python", str(PYTHON), *what]
    env = environment()
    if subprocess.run(uv, cwd=bootstrap.ROOT, env=env, check=False).returncode == 0:
        return
    print("oldest: uv did not manage, trying pip", file=sys.stderr)
    subprocess.run([str(PYTHON), "-m", "ensurepip"], env=env, check=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    subprocess.run(pip, cwd=bootstrap.ROOT, env=env, check=True)


def prepare() -> int:
    """Create or refresh .venv/oldest; 0 when it is ready."""
    want = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == want:
        return 0
    start = time.monotonic()
    print("oldest: setting up .venv/oldest (once)", file=sys.stderr)
    venv.create(VENV, with_pip=False, clear=True)
    try:
        install()
    except subprocess.CalledProcessError as failure:
        print(f"oldest: the installation failed (exit {failure.returncode}), see above", file=sys.stderr)
        return 1
    partial = STAMP.with_suffix(".partial")
    partial.write_text(want)
    partial.replace(STAMP)
    print(f"oldest: .venv/oldest is ready, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


def main() -> int:
    """Run the tests with the oldest frameworks; arguments are pytest's, in place of the usual list."""
    failed = bootstrap.main() or prepare()
    if failed:
        return failed
    chosen = sys.argv[1:] or [f"tests/integrations/{name}" for name in TESTS]
    run = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(run, cwd=bootstrap.ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
