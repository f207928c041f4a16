"""Captured steps, targets and scripts compiled by backends that are right and wrong: what is said, and where."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.agreement.compiled import plants
from tests.agreement.compiled.step_cases import CASES, HEALTHY, SICK
from tests.slow import mostly_slow, slow
from torch import nn

import floatline as fl
from floatline.agreement import compare_compiled_step
from floatline.agreement.compiled.reproducer import MOST_LINES
from floatline.agreement.compiled.runs import compare_compiled_script, compare_compiled_target
from floatline.agreement.compiled.script_graphs import ScriptGraphs
from floatline.agreement.compiled.steps import compare_graphs
from floatline.probe import capture_step

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("step_cases.py"))


def capture(name: str):
    case = CASES[name]
    model, batch = case.build()
    return capture_step(model, None, lambda batch: case.loss(model, batch), batch, plan="fp32")


@pytest.fixture
def cold_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")


def test_the_smallest_wrong_step_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    step = capture_step(model, None, lambda x: model(x).sum(), torch.randn(3, 4), plan="fp32")
    found = compare_compiled_step(step, backend=plants.drops_a_relu)
    assert (found.verdict, found.entry.kind, found.entry.op.op[-4:]) == ("wrong", "ReLU", "relu")


@pytest.mark.parametrize("name", mostly_slow(SICK, every=100, rare=3))
def test_a_planted_bug_is_named_by_its_module_and_shown_by_a_script(name, tmp_path, importable):
    case = CASES[name]
    found = compare_compiled_step(capture(name), backend=getattr(plants, case.plant), folder=tmp_path)
    assert (found.verdict, found.status, found.entry.kind) == ("wrong", 1, case.wrong)
    assert Path(found.entry.op.file) == Path(SCRIPT)
    assert len(found.reproducer.read_text().splitlines()) <= MOST_LINES
    run = subprocess.run([sys.executable, str(found.reproducer)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr


@pytest.mark.parametrize("name", mostly_slow(HEALTHY, every=7))
def test_a_step_that_is_compiled_well_is_within_rounding(name, tmp_path):
    found = compare_compiled_step(capture(name), backend="aot_eager", folder=tmp_path / "none")
    assert (found.verdict, found.status, found.entry, found.reproducer) == ("agree", 0, None, None)
    assert not (tmp_path / "none").exists()
    losses = [one for one in found.readings if one.reading.name == "loss"]
    assert [one.nearness for one in losses] == ["as near"]
    gradients = {one.reading.name for one in found.readings if one.reading.phase == "backward"}
    assert {"first.weight", "last.weight"} <= gradients or "breaks" in name


@pytest.mark.parametrize("name", mostly_slow(HEALTHY, every=100, rare=4))
def test_inductor_compiles_healthy_steps_within_rounding(name, cold_cache):
    found = compare_compiled_step(capture(name))
    assert (found.verdict, found.entry) == ("agree", None)
    if name in ("attention", "autocast"):  # with 16 bits inside there are casts to emulate
        assert any(one.emulated is not None for one in found.readings)


@slow
def test_buffers_that_a_step_writes_are_compared():
    found = compare_compiled_step(capture("batchnorm"), backend="aot_eager")
    names = [one.reading.name for one in found.readings]
    assert "middle.0.running_mean, afterwards" in names or "1.running_mean, afterwards" in names


def test_a_step_that_cannot_be_compiled_says_why_and_raises_nothing():
    step = capture("tied")
    with fl.HalfOnCPU():
        found = compare_compiled_step(step, backend="aot_eager")
    assert (found.verdict, found.status) == ("no-verdict", 2)
    assert "left all of it to eager code" in str(found)

    def refuses(graph, examples):
        raise ValueError("no such operation")

    found = compare_compiled_step(step, backend=refuses)
    assert found.verdict == "no-verdict"
    assert "no such operation" in found.problem


def test_a_loop_that_compiles_by_a_decorator_is_seen_with_its_backend_and_its_run_is_not_changed():
    def train(compiler):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(8, 4), torch.randn(8, 1)

        @compiler
        def compute():
            return (model(x) - y).square().mean()

        for _ in range(2):
            optimizer.zero_grad()
            compute().backward()
            optimizer.step()
        return model.weight.detach().clone()

    seen = ScriptGraphs(steps=None)
    with seen.seeing():
        weights = train(lambda function: torch.compile(backend="aot_eager")(function))
    assert torch.equal(weights, train(lambda function: function))
    assert [graph.compiler.name for graph in seen.graphs] == ["aot_eager"]
    found = compare_graphs(seen.graphs)
    assert (found.verdict, found.readings[0].reading.name) == ("agree", "loss")


def test_a_loop_that_compiles_nothing_has_its_model_compiled():
    seen = ScriptGraphs(steps=None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with seen.seeing():
        model(torch.randn(2, 4)).sum().backward()
        with torch.no_grad():
            model(torch.randn(2, 4))
    assert len(seen.graphs) == 1
    assert set(seen.graphs[0].cotangents) == {"output[0]"}
    assert seen.graphs[0].cotangents["output[0]"].eq(1).all()
    assert compare_graphs(seen.graphs, backend="aot_eager").verdict == "agree"


@pytest.mark.parametrize("way", mostly_slow(["module", "function", "in place"], every=100, rare=3))
def test_a_script_is_compared_with_the_backend_that_it_compiles_with(way, importable, tmp_path):
    words = [sys.executable, SCRIPT, "axis", "sums_another_axis", way]
    found = compare_compiled_script(words, folder=tmp_path)
    assert (found.status, found.fields["backend"]) == (1, "sums_another_axis")
    assert (found.fields["entry"]["kind"], found.fields["entry"]["op"]) == ("Mix", "softmax")
    assert Path(found.fields["reproducer"]).parent == tmp_path
    healthy = compare_compiled_script([sys.executable, SCRIPT, "axis", "aot_eager", way])
    assert healthy.status == 0


@slow
def test_a_script_that_compiles_nothing_and_one_that_fails(importable, tmp_path):
    found = compare_compiled_script([sys.executable, SCRIPT, "breaks", "", "eager"], backend="aot_eager")
    assert (found.status, found.fields["backend"]) == (0, "aot_eager")
    script = tmp_path / "fails.py"
    script.write_text("import torch\nraise ValueError('no data')\n")
    found = compare_compiled_script([sys.executable, str(script)])
    assert found.status == 2
    assert "ended with ValueError after 0 steps" in found.text
    script.write_text("import torch\ntorch.ones(2).sum()\n")
    assert "nothing that trains was compiled" in compare_compiled_script([sys.executable, str(script)]).text


TARGET = """
import torch
import torch.nn.functional as F
from torch import nn


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    batches = [((torch.randn(6, 4),), (torch.tensor([0, 1, 0, 1, 0, 1]),))]
    return model, batches, F.cross_entropy, "bf16-mixed", lambda model: torch.optim.SGD(model.parameters(), lr=0.01)


def train(steps=5, seed=0):
    model, [((x,), (y,))], loss, _, make = build(seed)
    optimizer = make(model)
    for _ in range(steps):
        loss(model(x), y).backward()
        optimizer.step()


def fails(steps=5):
    raise ValueError("no data")
"""


@slow
def test_targets_are_compared_and_one_that_fails_says_so(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(TARGET)
    built = compare_compiled_target(str(file), backend="aot_eager")
    assert (built.status, built.fields["outputs"][0]["name"]) == (0, "loss")
    assert compare_compiled_target(f"{file}:train", backend="aot_eager").status == 0
    failed = compare_compiled_target(f"{file}:fails", backend="aot_eager")
    assert (failed.status, failed.fields["verdict"]) == (2, "no-verdict")
    assert "ended with ValueError" in failed.text
