"""A script that does not come to its end, or too early, has no verdict: its own words come first."""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.diagnosis.scripts.test_scripts import observe
from tests.diagnosis.scripts.test_scripts_command import START, run
from tests.slow import slow

import floatline
from floatline.causes import find_cause
from floatline.diagnosis.scripts.script_report import ScriptDiagnosis, read_report
from floatline.findings import Finding

LOOP = """
import os, signal, sys
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
{before}
for step in range({steps}):
    opt.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    opt.step()
{after}
"""
TRUE_LINES = [
    ("import", {"before": "import no_such_package"}, "ModuleNotFoundError: No module named 'no_such_package'", 1),
    ("assertion", {"before": "assert len(sys.argv) == 2, 'one folder is needed'"}, "AssertionError: one folder", 1),
    ("text", {"before": "sys.exit('no data in ./data')"}, "no data in ./data", 1),
    (
        "argparse",
        {
            "before": "import argparse\np = argparse.ArgumentParser()\n"
            "p.add_argument('--lr', required=True)\np.parse_args()"
        },
        "error: the following arguments are required: --lr",
        2,
    ),
    ("late", {"steps": 30, "after": "raise KeyError('val_loss')"}, "KeyError: 'val_loss'", 1),
    ("silent", {"steps": 30, "after": "sys.exit(7)"}, "", 7),
]


def write(folder, **parts):
    script = folder / "train.py"
    script.write_text(LOOP.format(**{"before": "", "steps": 30, "after": ""} | parts), encoding="utf-8")
    return script


def check_no_verdict(done):
    """Neither a fault nor health is claimed, in the text or on stderr."""
    for said in (done.stdout, done.stderr):
        assert "a precision problem" not in said and "precision problem" not in said
        assert "healthy" not in said
        assert "let it run" not in said
    assert done.returncode == 2, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "parts", "said", "code"), TRUE_LINES, ids=[name for name, *_ in TRUE_LINES])
def test_a_script_that_fails_by_itself_has_no_verdict_and_its_own_words_come_first(tmp_path, name, parts, said, code):
    seen = observe(str(write(tmp_path, **parts)))
    answer = read_report("python train.py", seen, seen["exit_code"], 1.0).as_json()
    assert (answer["verdict"], answer["exit_code"], answer["findings"]) == ("no-verdict", code, [])
    text = answer["no_verdict"]
    assert said in text.split("the script ended")[0], text
    assert f"the script ended with exit code {code}" in text
    assert ("after 30 steps" if parts.get("steps") else "before its first step") in text


@slow
def test_the_text_has_the_scripts_own_last_line_first(tmp_path):
    write(tmp_path, before="import no_such_package")
    done = run("--", "train.py", cwd=tmp_path)
    check_no_verdict(done)
    assert done.stdout.splitlines()[0].startswith(
        "no verdict  ModuleNotFoundError: No module named 'no_such_package': the script ended with exit code 1"
    )


@slow
@pytest.mark.skipif(os.name == "nt", reason="needs signals")
@pytest.mark.parametrize(
    ("number", "steps"), [(signal.SIGSEGV, 30), pytest.param(signal.SIGABRT, 0, marks=pytest.mark.slow)]
)
def test_a_crash_has_no_verdict_and_is_named(tmp_path, number, steps):
    write(tmp_path, steps=steps, after=f"os.kill(os.getpid(), {int(number)})")
    done = run("--format", "json", "--", "train.py", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert (answer["verdict"], answer["exit_code"]) == ("no-verdict", 128 + number)
    assert number.name in answer["no_verdict"]
    check_no_verdict(done)


@slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_script_that_is_terminated_has_no_verdict(tmp_path):
    write(tmp_path, after='print("under way", flush=True)\nimport time\nwhile True: time.sleep(1)')
    command = [*START, "--format", "json", "--", "train.py"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("floatline: train.py runs as it is")
    assert process.stderr.readline() == "under way\n"  # JSON has stdout for itself
    process.send_signal(signal.SIGTERM)
    try:
        out = process.communicate(timeout=600)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    answer = json.loads(out)
    assert (answer["verdict"], answer["exit_code"], process.returncode) == ("no-verdict", 143, 2)
    assert answer["no_verdict"] == "the script was ended by SIGTERM after 30 steps"


@pytest.mark.parametrize(("steps", "verdict"), [(1, "no-verdict"), (2, "no-verdict"), (3, "healthy")])
def test_a_script_that_is_too_short_has_no_verdict(tmp_path, steps, verdict):
    seen = observe(str(write(tmp_path, steps=steps)))
    diagnosis = read_report("python train.py", seen, seen["exit_code"], 1.0)
    assert (diagnosis.verdict, diagnosis.exit_code) == (verdict, 0)
    assert diagnosis.status == (0 if verdict == "healthy" else 2)
    assert ("too few to tell" in str(diagnosis)) == (verdict == "no-verdict")


@slow
def test_one_step_is_no_verdict_on_the_command_line(tmp_path):
    write(tmp_path, steps=1)
    check_no_verdict(run("--", "train.py", cwd=tmp_path))


@slow
def test_a_healthy_script_exits_with_0_on_the_command_line(tmp_path):
    write(tmp_path)
    done = run("--format", "json", "--", "train.py", cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert (answer["verdict"], answer["exit_code"], done.returncode) == ("healthy", 0, 0)
    assert "no_verdict" not in answer


# What the process of a script wrote down, and what is made of it.
SEEN = {
    "precision": "fp16-mixed",
    "findings": [],
    "notes": [],
    "unexplained": "",
    "unseen": "",
    "fails_in_fp32": None,
    "exception": "",
    "last_line": "",
    "num_backward": 30,
    "num_steps": 30,
    "exit_code": 0,
}
FOUND = {"cause": "exp-overflow", "seen": "s", "fix": "f", "module": "", "file": "a.py", "line": 3, "op": "exp"}


@pytest.mark.parametrize(
    ("seen", "code", "verdict", "status"),
    [
        ({}, 0, "healthy", 0),
        ({}, 1, "no-verdict", 2),
        ({}, 143, "no-verdict", 2),
        ({"unseen": "none of the 1 steps was looked into"}, 0, "no-verdict", 2),
        ({"unexplained": "nan", "fails_in_fp32": None}, 0, "no-verdict", 2),
        ({"unexplained": "nan", "fails_in_fp32": None}, 3, "no-verdict", 2),
        ({"unexplained": "nan", "fails_in_fp32": False}, 0, "precision", 1),
        ({"unexplained": "nan", "fails_in_fp32": False}, 3, "precision", 3),
        ({"unexplained": "nan", "fails_in_fp32": True}, 0, "not-precision", 1),
        ({"unexplained": "nan", "precision": "fp32"}, 0, "not-precision", 1),
        ({"findings": [FOUND]}, 0, "precision", 1),
        ({"findings": [FOUND]}, 3, "precision", 3),
        ({"findings": [FOUND], "num_backward": 0}, 1, "precision", 1),
        ({"num_backward": 0, "num_steps": 0}, 1, "no-verdict", 2),
    ],
)
def test_a_report_gives_one_verdict_and_one_exit_code(seen, code, verdict, status):
    diagnosis = read_report("python train.py", SEEN | seen, code, 1.0)
    assert (diagnosis.verdict, diagnosis.status, diagnosis.exit_code) == (verdict, status, code)
    assert diagnosis.as_json()["verdict"] == verdict
    assert ("healthy" in str(diagnosis)) == (verdict == "healthy")


def test_a_script_without_a_backward_pass_has_no_verdict():
    diagnosis = read_report("python train.py", SEEN | {"num_backward": 0}, 0, 1.0)
    assert (diagnosis.verdict, diagnosis.status) == ("no-verdict", 2)
    assert diagnosis.no_verdict.startswith("no backward pass was seen")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (139, "the script was ended by SIGSEGV before floatline could sum it up"),
        (5, "the script ended with exit code 5 before floatline could sum it up"),
    ],
)
def test_a_process_that_left_no_report_has_no_verdict(code, said):
    diagnosis = read_report("python train.py", {}, code, 1.0)
    assert (diagnosis.verdict, diagnosis.status, diagnosis.no_verdict) == ("no-verdict", 2, said)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"exception": "KeyError: 'x'\nmore", "last_line": "KeyError: 'x'"}, "KeyError: 'x': the script ended"),
        ({"last_line": "train.py: error: no --lr"}, "train.py: error: no --lr: the script ended"),
        ({}, "the script ended with exit code 1 after 30 steps"),
        ({"num_steps": 1}, "the script ended with exit code 1 after 1 step"),
        ({"num_steps": 0}, "the script ended with exit code 1 before its first step"),
    ],
)
def test_the_words_of_the_script_come_before_ours(seen, said):
    assert read_report("python train.py", SEEN | seen, 1, 1.0).no_verdict.startswith(said)


def test_a_finding_outweighs_how_the_script_ended():
    finding = Finding(find_cause("exp-overflow"), seen="s", fix="f", module="", file="a.py", line=3, op="exp")
    diagnosis = ScriptDiagnosis("x", "fp16-mixed", (finding,), 1.0, exit_code=1, no_verdict="KeyError")
    assert (diagnosis.verdict, diagnosis.status) == ("precision", 1)


def test_nobody_is_told_to_let_a_script_run_for_20_steps():
    sources = list(Path(floatline.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    told = [path.name for path in sources if "let it run for" in path.read_text(encoding="utf-8").lower()]
    assert told == []


DECAYING = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(6, 2).to(torch.bfloat16)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=DECAY)
for step in range(40):
    x = torch.randn(16, 6)
    loss = (net(x.bfloat16()).float() - x[:, :2]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(("decay", "is_told"), [(1.9, True), (0.5, False), (100.0, False)])
def test_a_decay_that_takes_nothing_from_weights_is_told_where_fp32s_takes_much(tmp_path, decay, is_told):
    """0.5 takes 2 % in 40 steps; 100 is more than half a spacing of BF16 and is not lost."""
    script = tmp_path / "train.py"
    script.write_text(DECAYING.replace("DECAY", str(decay)), encoding="utf-8")
    answer = observe(str(script))
    assert answer["findings"] == []
    lost = answer["lost_decay"]
    assert (lost is not None) == is_told, answer
    assert lost is None or "in FP32 it takes 7 %" in lost["finding"]["seen"]


OWN_DECAY = """
import torch
from torch import nn


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            DECAY
            p.copy_((p.float() - 0.01 * p.grad.float().sign() * torch.rand(p.shape).lt(0.5)).to(p.dtype))


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2)).to(torch.bfloat16)
opt = Own(net.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(16, 6)
    loss = (net(x.bfloat16()).float() - x[:, :2]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@slow
@pytest.mark.parametrize(
    ("line", "verdict"),
    [("p.mul_(1 - 1.9e-3)", "precision"), ("p.copy_(p.float() * 0.99)", "healthy"), ("p.mul_(1 - 1e-5)", "healthy")],
)
def test_a_decay_of_ones_own_optimizer_is_a_finding_at_its_line_where_weights_are_larger_than_fp32s(
    tmp_path, line, verdict
):
    script = tmp_path / "train.py"
    script.write_text(OWN_DECAY.replace("DECAY", line), encoding="utf-8")
    found = json.loads(run("--format", "json", "--no-try", "--", "train.py", cwd=tmp_path).stdout)
    assert found["verdict"] == verdict, found
    if verdict == "precision":
        (first,) = found["findings"]
        assert (first["cause"], first["line"]) == (
            "decay-lost-to-rounding",
            1 + OWN_DECAY[: OWN_DECAY.index("DECAY")].count("\n"),
        )
        assert re.search(r"after 60 steps they are \d+ % larger than FP32's$", first["seen"]), first
    assert not [note for note in found["notes"] if "a decay to" in note]
