"""What each command does where the wheel alone is installed: in an environment without torch, nothing of it faked."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.report.run.runs import make_run
from tests.slow import mostly_slow

import floatline

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs links")

TORCH = "This needs torch, which is not installed here. Install the one for your machine (https://pytorch.org/"
THERE = "cannot import torch, which floatline needs there. Install it"
IN = ["-c", "from floatline.cli.main import main; main()"]


def find_distributions(name, found):
    """What pip installs with a distribution, itself left out."""
    for line in importlib.metadata.requires(name) or ():
        other, _, marker = line.partition(";")
        other = re.match(r"[\w.-]+", other)[0].lower().replace("_", "-")
        if "extra" in marker or other in found:
            continue
        try:
            found[other] = importlib.metadata.distribution(other)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another Python
        find_distributions(other, found)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The interpreter of an environment that has floatline and what its wheel brings."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "floatline").symlink_to(Path(floatline.__file__).parent)
    for one in find_distributions("floatline", {}).values():
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(one.locate_file(top))
    return place / "bin" / "python"


def ask(python, *words, cwd):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([python, *IN, *words], capture_output=True, text=True, timeout=250, cwd=cwd, env=env)


def fill(folder):
    (folder / "net.py").write_text("import torch\ndef build(seed=0): ...\n")
    (folder / "train.py").write_text("import torch\n")
    (folder / "ids.json").write_text("[1, 2, 3]")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")


REFUSED = {
    "diagnose -- python train.py": THERE,
    "diagnose --json -- train.py": THERE,
    "diagnose --compiled -- train.py": THERE,
    "diagnose net.py": TORCH,
    "diagnose --forward net.py": TORCH,
    "diagnose --forward --model model --tokens ids.json": TORCH,
    "diagnose --forward -- train.py": TORCH,
    "diagnose --would-fit fp16 net.py": TORCH,
    "validate net.py": TORCH,
    "validate --plan fp16-mixed -- train.py": TORCH,
    "rescue net.py": TORCH,
    "rescue -- train.py": TORCH,
    "train net.py": TORCH,
    "replay bundle": TORCH,
    "run --plan bf16-mixed -- train.py": THERE,
    "parity net.py net.py": TORCH,
    "fold model --tokens ids.json --out folded": TORCH,
    "fit model --tokens ids.json": TORCH,
    "manifest --json -- train.py": THERE,
    "manifest -- python train.py": THERE,
}


@pytest.mark.parametrize("words", mostly_slow(REFUSED, every=5))
def test_a_command_that_runs_torch_says_in_one_line_to_install_it(bare, words, tmp_path):
    fill(tmp_path)
    given = [str(bare) if word == "python" else word for word in words.split()]
    done = ask(bare, *given, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("floatline: ") and REFUSED[words] in done.stderr


WORKS = {
    "watch a": (0, "finished"),
    "report a": (0, "run.html"),
    "compare a b": (1, "INCONCLUSIVE"),  # pairs without any difference prove nothing
    "lint --half net.py": (1, "FL101"),
    "explain eps-underflow": (0, "eps-underflow"),
    "doctor": (0, "torch is not installed: pip install 'floatline[torch]'"),
    "status": (1, "nothing is approved"),
    "version": (0, floatline.__version__),
    "doctor --on t4": (0, "fp16-mixed"),
}


@pytest.mark.parametrize("words", mostly_slow(WORKS, every=9))
def test_what_reads_and_judges_works(bare, words, tmp_path):
    for name in ("a/0", "a/1", "a/2", "b/0", "b/1", "b/2"):
        make_run(tmp_path / name, steps=20)
    (tmp_path / "net.py").write_text("import torch\nloss = torch.log(torch.softmax(x, -1))\n")
    done = ask(bare, *words.split(), cwd=tmp_path)
    code, says = WORKS[words]
    assert done.returncode == code, done.stderr
    assert says in done.stdout and "Traceback" not in done.stderr, (done.stdout, done.stderr)


def test_what_cannot_be_approved_is_told_without_torch(bare, tmp_path):
    make_run(tmp_path / "a" / "0", steps=20)
    done = ask(bare, "approve", "a", "--by", "Ada", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "torch" not in done.stderr


def test_the_environment_has_no_torch_and_this_one_has(bare, tmp_path):
    code = ["-c", "import floatline, importlib.util as u; print(u.find_spec('torch') is None)"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    seen = [
        subprocess.run([python, *code], capture_output=True, text=True, cwd=tmp_path, env=env).stdout
        for python in (bare, sys.executable)
    ]
    assert seen == ["True\n", "False\n"]
