"""Scripts that compile: what they compute and compile is their own, what fails in them is named at its line."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.diagnosis.scripts.test_scripts import as_it_was, line_of, observe
from tests.slow import slow

START = [sys.executable, "-c", "from floatline.cli.main import main; main()", "diagnose"]
EAGERLY = "recorded steps ran eagerly"


@pytest.fixture(autouse=True)
def cold():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


HEAD = """
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

NUM_COMPILED = 0
def backend(graph, inputs, **kwargs):
    global NUM_COMPILED
    NUM_COMPILED += 1
    return aot_eager(graph, inputs, **kwargs)

torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 2)
    def forward(self, x):
        return self.down(nn.functional.gelu(self.norm(self.up(x))))
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
"""
TAIL = """
torch.save(([t.detach() for t in net.parameters()], NUM_COMPILED), TARGET)
"""
# A module that is compiled, and one that compiles itself.
MODULE = """
model = torch.compile(net, backend=backend)
for step in range(12):
    x = torch.randn(16, 6)
    opt.zero_grad()
    loss = (model(x) - x[:, :2]).square().mean()
    loss.backward()
    opt.step()
"""
ITSELF = MODULE.replace("model = torch.compile(net, backend=backend)", "net.compile(backend=backend)\nmodel = net")
WHOLE = MODULE.replace("backend=backend)", "backend=backend, fullgraph=True)")
FUNCTION = """
@torch.compile(backend=backend)
def compute(x):
    return (net(x) - x[:, :2]).square().mean()
for step in range(12):
    opt.zero_grad()
    compute(torch.randn(16, 6)).backward()
    opt.step()
"""
# The step begins inside of the compiled function, where no recorder may be left.
FORWARD_FIRST = """
@torch.compile(backend=backend)
def compute(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (net(x) - x[:, :2]).square().mean()
for step in range(12):
    loss = compute(torch.randn(16, 6))
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
SCALED = """
model = torch.compile(net, backend=backend)
for step in range(12):
    x = torch.randn(16, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).float() - x[:, :2]).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
"""
SUMMED = """
model = torch.compile(net, backend=backend)
for step in range(12):
    for part in range(3):
        x = torch.randn(16, 6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x).float() - x[:, :2]).square().mean() / 3
        loss.backward()
    opt.step()
    opt.zero_grad()
"""
BROKEN_GRAPH = """
class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), net
    def forward(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(h)
model = torch.compile(Breaks(), backend=backend)
for step in range(12):
    x = torch.randn(16, 6)
    opt.zero_grad()
    loss = (model(x) - x[:, :2]).square().mean()
    loss.backward()
    opt.step()
"""
EVALUATED = """
model = torch.compile(net, backend=backend)
for step in range(12):
    x = torch.randn(16, 6)
    opt.zero_grad()
    loss = (model(x) - x[:, :2]).square().mean()
    loss.backward()
    opt.step()
    if step % 4 == 3:
        net.eval()
        with torch.no_grad():
            model(x)
        net.train()
"""
OPTIMIZER = """
@torch.compile(backend=backend)
def update():
    opt.step()
for step in range(12):
    x = torch.randn(16, 6)
    opt.zero_grad()
    loss = (net(x) - x[:, :2]).square().mean()
    loss.backward()
    update()
"""
HEALTHY = [
    ("module", MODULE),
    ("itself", ITSELF),
    ("fullgraph", WHOLE),
    ("function", FUNCTION),
    ("forward_first", FORWARD_FIRST),
    ("scaled", SCALED),
    ("summed", SUMMED),
    ("graph_break", BROKEN_GRAPH),
    ("evaluated", EVALUATED),
    ("optimizer", OPTIMIZER),
]


def write(folder, body, name="train.py"):
    script = folder / name
    target = folder / f"{Path(name).stem}.pt"
    script.write_text(f"TARGET = {str(target)!r}\n" + HEAD + body + TAIL, encoding="utf-8")
    return script, target


@slow
@pytest.mark.parametrize(("name", "body"), HEALTHY, ids=[name for name, _ in HEALTHY])
def test_a_healthy_script_that_compiles_is_left_in_peace_and_as_it_is(tmp_path, recwarn, name, body):
    alone, alone_target = write(tmp_path, body, "alone.py")
    with as_it_was():
        runpy.run_path(str(alone), run_name="__main__")
    torch.compiler.reset()
    script, target = write(tmp_path, body)
    answer = observe(str(script))
    assert (answer["findings"], answer["unexplained"], answer["unseen"]) == ([], "", "")
    assert (answer["exit_code"], answer["num_steps"]) == (0, 12)
    assert any(EAGERLY in note for note in answer["notes"])
    assert "3 of 12 steps recorded (step " in answer["notes"][0]
    assert len(answer["notes"]) == 2, answer["notes"]  # none about a step that could not be recorded
    weights, num_compiled = torch.load(target)
    expected, num_expected = torch.load(alone_target)
    if name == "optimizer":  # compiled, its step rounds in another order than eagerly
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(weights, expected, strict=True))
    else:
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    assert num_compiled == num_expected > 0
    assert not any("global hooks" in str(one.message) for one in recwarn)


def test_a_script_that_compiles_nothing_has_no_such_note(tmp_path):
    script, _ = write(tmp_path, MODULE.replace("torch.compile(net, backend=backend)", "net"))
    answer = observe(str(script))
    assert answer["findings"] == []
    assert not any(EAGERLY in note for note in answer["notes"])


# Planted failures.
EXP = """
class Heights(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 1)
    def forward(self, x, lift):
        heights = self.body(x) + lift
        return torch.exp(heights)
model = COMPILE(Heights())
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(24):
    x = torch.randn(16, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x, torch.full((1,), 12.0 if step >= 14 else 0.0, dtype=torch.float16))
    loss = (out.float() * 1e-4).mean()
    loss.backward()
    opt.step()
"""
LOG = """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 1)
    def forward(self, x):
        chance = torch.sigmoid(self.body(x) - 20)
        return -torch.log(chance)
model = COMPILE(Gate())
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(16):
    x = torch.randn(16, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).mean()
    loss.backward()
    opt.step()
"""
LOSS = """
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
@COMPILE
def compute(x, lift):
    with torch.autocast("cpu", dtype=torch.float16):
        heights = model(x) + lift
        out = torch.exp(heights)
    return (out.float() * 1e-4).mean()
for step in range(24):
    opt.zero_grad()
    loss = compute(torch.randn(16, 6), torch.full((1,), 12.0 if step >= 14 else 0.0, dtype=torch.float16))
    loss.backward()
    opt.step()
"""
# Ways to compile: none, the way of a function, and of a module.
PLAIN = "def COMPILE(thing):\n    return thing\n"
BY_CALL = "def COMPILE(thing):\n    return torch.compile(thing, backend=backend)\n"
BY_METHOD = """def COMPILE(thing):
    if not isinstance(thing, nn.Module):
        return torch.compile(thing, backend=backend, fullgraph=True)
    thing.compile(backend=backend)
    return thing
"""
FAILURES = [
    ("exp", EXP, "exp-overflow", "torch.exp(heights)"),
    ("log", LOG, "rounded-onto-singularity", "torch.log(chance)"),
    ("loss", LOSS, "exp-overflow", "torch.exp(heights)"),
]


@pytest.mark.parametrize("how", [PLAIN, BY_CALL, BY_METHOD], ids=["plain", "call", "method"])
@pytest.mark.parametrize(("name", "body", "cause", "code"), FAILURES, ids=[name for name, *_ in FAILURES])
def test_a_failure_in_compiled_code_is_named_at_its_line(tmp_path, recwarn, how, name, body, cause, code):
    script, _ = write(tmp_path, how + body)
    answer = observe(str(script))
    assert answer["findings"], answer
    first = answer["findings"][0]
    assert first["cause"] == cause, first
    assert Path(first["file"]) == script and code in line_of(first), first
    assert "_orig_mod" not in str(answer)
    assert not any("global hooks" in str(one.message) for one in recwarn)


def test_modules_and_parameters_have_the_names_that_the_user_gave(tmp_path):
    body = """
net = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 2)).bfloat16()
model = torch.compile(net, backend=backend)
opt = torch.optim.SGD(net.parameters(), lr=1e-6)
for step in range(12):
    x = torch.randn(16, 6).bfloat16()
    opt.zero_grad()
    (model(x) - x[:, :2]).square().mean().backward()
    opt.step()
"""
    script, _ = write(tmp_path, body)
    answer = observe(str(script))
    assert answer["findings"][0]["cause"] == "update-lost-to-rounding"
    assert "_orig_mod" not in str(answer)


MISCOMPILED = """
NUM_CALLS = 0
def damages(graph, inputs):
    def run(*args):
        global NUM_CALLS
        NUM_CALLS += 1
        out = graph.forward(*args)
        return [o * FACTOR for o in out] if NUM_CALLS > 10 else out
    return run
model = torch.compile(net, backend=damages)
for step in range(20):
    x = torch.randn(16, 6)
    opt.zero_grad()
    loss = (model(x) - x[:, :2]).square().mean()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize("factor", ["nan", "1"])
def test_a_compiler_that_spoils_the_numbers_is_told_from_a_script_that_does(tmp_path, factor):
    script, _ = write(tmp_path, f"FACTOR = float({factor!r})\n" + MISCOMPILED)
    answer = observe(str(script))
    assert answer["findings"] == []
    if factor == "nan":
        assert "torch.compile" in answer["unexplained"] and "eagerly" in answer["unexplained"]
    else:
        assert answer["unexplained"] == ""


@pytest.mark.slow
def test_a_script_is_compiled_afresh_on_the_command_line(tmp_path):
    body = SCALED.replace("backend=backend", 'backend="inductor"')
    script, target = write(tmp_path, body)
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    done = subprocess.run(
        [*START, "--", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
        env=os.environ | caches,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("healthy")
    assert EAGERLY in done.stdout
    assert "global hooks" not in done.stderr
    assert any((tmp_path / "TORCHINDUCTOR_CACHE_DIR").rglob("*.so"))  # it was compiled
    assert target.exists()
