"""`floatline run`: streams, exit codes, tracebacks, signals and refusals of a script that runs under a plan."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.slow import slow

import floatline

START = [sys.executable, "-c", "from floatline.cli.main import main; main()", "run"]

TRAIN = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    opt = torch.optim.{optimizer}(model.parameters(), lr=0.1)

    def train():
        for step in range(4):
            opt.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            opt.step()
            print(step, loss.item())

    if __name__ == "__main__":
        train()
        print(sys.argv, __file__, __name__)
"""


@pytest.fixture
def folder(tmp_path):
    def write(name, text, **words):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        text = textwrap.dedent(text)
        for key, value in words.items():
            text = text.replace("{" + key + "}", value)
        path.write_text(text, encoding="utf-8")

    write("train.py", TRAIN, optimizer="SGD")
    return write, tmp_path


def run(where, *words):
    return subprocess.run(words, capture_output=True, text=True, cwd=where, timeout=600)


def under(where, plan, *words):
    return run(where, *START, "--plan", plan, "--", *words)


@slow
def test_a_healthy_script_writes_what_it_writes_without_a_plan(folder):
    _, where = folder
    words = [sys.executable, "train.py", "a b", "--plan", "x", "--", "-c"]
    bare, found = run(where, *words), under(where, "fp32", *words)
    assert found.returncode == bare.returncode == 0
    assert found.stdout == bare.stdout
    assert "'a b', '--plan', 'x', '--', '-c'" in found.stdout
    assert found.stderr == "floatline: 4 steps under plan 'fp32'.\n"


SCALED = """
    import torch

    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(2):
        scaler.scale(1e-4 * model(torch.ones(3, 4)).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("plan", "end"),
    [
        ("fp16-mixed", 2048),
        ("{weights: fp32, compute: fp16, scaling: {init_scale: 65536}}", 131072),
    ],
)
@pytest.mark.slow
def test_the_scale_begins_where_the_scripts_own_scaler_does_unless_the_plan_says_where(folder, plan, end):
    write, where = folder
    write("train.py", SCALED)
    if plan.startswith("{"):
        (where / "plan.yaml").write_text(plan)
        plan = "plan.yaml"
    found = under(where, plan, sys.executable, "train.py")
    assert found.returncode == 0, found.stderr
    assert found.stderr.endswith(f"0 of them left out; the loss scale ended at {end:g}.\n")


@slow
def test_an_error_has_the_scripts_own_traceback(folder):
    write, where = folder
    write("train.py", TRAIN + "        model(torch.randn(3, 5))\n", optimizer="SGD")
    words = [sys.executable, "train.py"]
    bare, found = run(where, *words), under(where, "fp32", *words)
    assert found.returncode == bare.returncode == 1

    def frames(text):
        return [line for line in text.splitlines() if line.startswith("  File") and "/torch/" not in line]

    assert frames(found.stderr) == frames(bare.stderr)
    assert len(frames(found.stderr)) == 1
    assert "shapes cannot be multiplied" in found.stderr


@slow
@pytest.mark.parametrize("plan", ["fp16-mixed", "bf16-true"])
def test_no_frame_of_floatlines_is_in_a_traceback(folder, plan):
    write, where = folder
    write("train.py", TRAIN + "        model(torch.randn(3, 5)).sum().backward()\n", optimizer="SGD")
    found = under(where, plan, sys.executable, "train.py")
    assert found.returncode == 1
    assert "Traceback" in found.stderr
    assert f"{Path(floatline.__file__).parent}/" not in found.stderr
    assert found.stdout.count("\n") == 5


@slow
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("sys.exit()", 0, ""),
        ("import os; os._exit(9)", 9, ""),
        ("x = (", 1, "SyntaxError"),
        ("raise KeyboardInterrupt", 130, ""),
        ("import atexit; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)
def test_a_script_ends_as_it_would(folder, end, code, said):
    write, where = folder
    write("train.py", f"import sys\n{end}\n")
    found = under(where, "fp16-mixed", sys.executable, "train.py")
    assert found.returncode == code
    assert said in found.stderr
    assert "floatline/" not in found.stderr


@slow
@pytest.mark.parametrize(
    ("plan", "script", "said"),
    [
        pytest.param("safe", "train.py", "Plan 'safe' sums up 2 batches a step", marks=pytest.mark.slow),
        ("fp17", "train.py", "Plan 'fp17' is not known"),
        ("fp32", "none.py", "There is no script 'none.py'"),
        ("bf16-true", "rms.py", "RMSprop has no counterpart"),
        pytest.param("wrong.yaml", "train.py", "no such module", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_put_into_force_is_told_in_one_line(folder, plan, script, said):
    write, where = folder
    write("rms.py", TRAIN, optimizer="RMSprop")
    write("wrong.yaml", "weights: fp32\ncompute: bf16\nfp32_modules:\n  - pattern: none\n")
    found = under(where, plan, sys.executable, script)
    assert found.returncode == 2
    assert said in found.stderr
    assert found.stderr.startswith("floatline: ")
    assert found.stderr.count("\n") == 1
    assert found.stdout == ""


@slow
def test_a_missing_command_is_told_in_one_line(folder):
    _, where = folder
    for words in (["--plan", "fp32"], ["--plan", "fp32", "train.py"], ["--plan", "fp32", "--"]):
        found = run(where, *START, *words)
        assert found.returncode == 2
        assert found.stderr.startswith("floatline: ")
        assert found.stderr.count("\n") == 1


@slow
def test_a_module_runs_as_one(folder):
    write, where = folder
    write("package/__init__.py", "")
    write("package/own.py", "VALUE = 3\n")
    write("package/go.py", "from .own import VALUE\nimport sys\nprint(VALUE, sys.argv[1:], __name__, __package__)\n")
    words = [sys.executable, "-m", "package.go", "a b"]
    bare, found = run(where, *words), under(where, "fp16-mixed", *words)
    assert found.stdout == bare.stdout == "3 ['a b'] __main__ package\n"
    assert found.stderr == "floatline: no optimizer made a step under plan 'fp16-mixed'.\n"


WAITING = """
    import signal, sys, time
    def stop(number, frame):
        print("stopped", number, flush=True)
        sys.exit(5)
    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    try:
        time.sleep(120)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(6)
"""


@slow
@pytest.mark.parametrize(
    ("number", "said", "code"), [(signal.SIGTERM, "stopped 15", 5), (signal.SIGINT, "interrupted", 6)]
)
def test_signals_reach_the_script(folder, number, said, code):
    write, where = folder
    write("train.py", WAITING)
    words = [*START, "--plan", "fp16-mixed", "--", sys.executable, "train.py"]
    process = subprocess.Popen(
        words, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert out == f"{said}\n"
    assert process.returncode == code
