"""`floatline manifest`: a script is measured without an edit, ended there, compared, and held against a belief."""

import json
import sys
import textwrap

import pytest
from tests.manifests import toys
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import slow

TRAIN = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    model.to({dtype})
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: {rate})
    try:
        for step in range(4):
            x = torch.randn(4, 16)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled={autocast}):
                loss = model(x.to(model[0].weight.dtype)).float().square().mean()
            loss.backward()
            opt.step()
            warm.step()
            opt.zero_grad()
            print("step", step)
    finally:
        open("saved.txt", "w").write("weights")
"""


@pytest.fixture
def train(tmp_path):
    def write(dtype="torch.float32", rate="1.0", autocast="False"):
        text = textwrap.dedent(TRAIN)
        for name, value in (("dtype", dtype), ("rate", rate), ("autocast", autocast)):
            text = text.replace("{" + name + "}", value)
        (tmp_path / "train.py").write_text(text, encoding="utf-8")

    return write


def run(where, *words):
    return run_preloaded(["-c", COMMAND, "manifest", *words], cwd=where)


def test_a_script_is_measured_in_its_first_step_and_ended_there(train, tmp_path):
    train(dtype="torch.bfloat16")
    found = run(tmp_path, "--format", "json", "--", sys.executable, "train.py")
    report = json.loads(found.stdout)
    assert found.returncode == 1
    assert report["findings"][0]["cause"] == "update-lost-to-rounding"
    assert "BF16 weights without a master copy" in report["findings"][0]["seen"]
    assert report["ranks"][0]["step"] == 1
    assert not (tmp_path / "saved.txt").exists()  # it has not trained: nothing of it is kept


@slow
def test_a_healthy_script_ends_with_0_and_says_what_it_is(train, tmp_path):
    train(autocast="True")
    found = run(tmp_path, "--expect", "bf16-mixed", "--", sys.executable, "train.py")
    assert found.returncode == 0, found.stderr
    assert "BF16 100 % of FLOPs" in found.stdout
    assert "expected bf16-mixed: as believed" in found.stdout


@slow
def test_a_belief_that_is_wrong_ends_with_1_and_the_difference(train, tmp_path):
    train()
    found = run(tmp_path, "--expect", "bf16-mixed", "--", sys.executable, "train.py")
    assert found.returncode == 1
    assert "compute: expected bf16 in 75 % of FLOPs, found fp32 100 %" in found.stdout


@slow
def test_a_step_with_a_learning_rate_of_0_is_passed_over(train, tmp_path):
    train(dtype="torch.bfloat16", rate="0.0 if step < 2 else 1.0")
    report = json.loads(run(tmp_path, "--format", "json", "--", sys.executable, "train.py").stdout)
    assert report["ranks"][0]["step"] == 3


@slow
def test_the_step_that_is_asked_for_is_measured(train, tmp_path):
    train()
    found = run(tmp_path, "--steps", "3", "--format", "json", "--", sys.executable, "train.py")
    assert json.loads(found.stdout)["ranks"][0]["step"] == 3
    assert found.stderr.count("step ") == 3  # what the script prints goes to stderr, after what is done
    assert "running the script until its step 3 is applied" in found.stderr


FUNCTIONS = """
import torch
weight = torch.full((8, 8), 1.0, dtype=torch.bfloat16, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=1e-6)
for step in range(4):
    optimizer.zero_grad()
    (torch.ones(4, 8, dtype=weight.dtype) @ weight).float().square().mean().backward()
    optimizer.step()
"""


def test_a_loop_of_functions_without_a_module_is_measured_in_its_second_step(tmp_path):
    (tmp_path / "train.py").write_text(FUNCTIONS, encoding="utf-8")
    found = run(tmp_path, "--format", "json", "--", sys.executable, "train.py")
    report = json.loads(found.stdout)
    assert report["ranks"][0]["step"] == 2
    assert "BF16 weights without a master copy: 100 % of updates round away" in report["findings"][0]["seen"]


@slow
def test_a_script_that_ends_before_says_so_in_one_line(train, tmp_path):
    train()
    found = run(tmp_path, "--steps", "9", "--", sys.executable, "train.py")
    assert found.returncode == 2
    assert "after 4 applied steps, before step 9 could be measured" in found.stderr
    (tmp_path / "empty.py").write_text("print('hello')", encoding="utf-8")
    found = run(tmp_path, "--", sys.executable, "empty.py")
    assert found.returncode == 2
    assert "before an optimizer of torch made a step" in found.stderr


def test_two_saved_manifests_are_compared(tmp_path):
    toys.measure(toys.make()).save(tmp_path / "a.json")
    toys.measure(toys.make(dtype=toys.torch.bfloat16)).save(tmp_path / "b.json")
    same = run(tmp_path, "a.json", "a.json")
    assert (same.returncode, same.stdout) == (0, "a.json and a.json compute in the same.\n")
    apart = run(tmp_path, "a.json", "b.json", "--format", "json")
    rows = {row["what"]: (row["a"], row["b"]) for row in json.loads(apart.stdout)["differences"]}
    assert apart.returncode == 1
    assert rows["weights of body"] == ("FP32", "BF16")
    assert rows["updates that round away"][0] == "0 %"


@slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.json", "b.json", "c.json"], "3 manifests are given"),
        (["--steps", "2", "a.json"], "--steps is for a script"),
        (["no-such.json"], "cannot be read"),
        (["--expect", "bf17", "a.json"], "'bf17' is not known"),
        (["--", "bash", "train.sh"], "is not Python"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path, words, said):
    found = run(tmp_path, *words)
    assert found.returncode == 2
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1


@slow
@pytest.mark.parametrize(
    ("name", "said", "code"), [("SIGINT", "interrupted", 130), ("SIGTERM", "ended by SIGTERM", 143)]
)
def test_a_script_that_is_ended_from_outside_leaves_a_word_on_how_to_go_on(name, said, code, train, tmp_path):
    train()
    script = tmp_path / "train.py"
    ends = f"import os, signal; os.kill(os.getpid(), signal.{name})"
    script.write_text(script.read_text("utf-8").replace('print("step", step)', ends), encoding="utf-8")
    found = run(tmp_path, "--steps", "3", "--", sys.executable, "train.py")
    assert found.returncode == code
    said = f"floatline: {said}. Nothing was measured: the same command begins again."
    assert found.stderr.splitlines()[-1] == said
