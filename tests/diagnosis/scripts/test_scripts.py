"""Whole scripts: each failure is named at its line, look-alikes are left in peace, the script is not changed."""

import contextlib
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tests.slow import slow

from floatline.diagnosis.scripts.main import explain
from floatline.probe.scripts.run import ScriptWatch

SCRIPTS = Path(__file__).parents[1] / "loops"
# script, cause, and a piece of the line to blame; '' where the place is no line
FAILURES = [
    ("mask_constant", "scalar-out-of-range", "masked_fill(hidden, -1e9)"),
    ("half_under_scaler", "fp16-params-with-scaler", "body.half()"),
    ("late_exp", "exp-overflow", "torch.exp(heights)"),
    ("late_product", "product-overflow", ".square()"),
    ("always_skipped", "product-overflow", "(h * h)"),
    ("stops_on_nan", "reduction-overflow", ".abs().sum("),
    ("log_of_softmax", "rounded-onto-singularity", "torch.log(probabilities)"),
    ("steep_log", "gradient-overflow", "torch.log(chances * 1e-7)"),
    ("small_loss", "gradient-underflow", "distance.backward()"),
    ("adam_in_half", "optimizer-state-underflow", ""),
    ("bf16_small_rate", "update-lost-to-rounding", ""),
    ("ema_in_bf16", "accumulator-stagnation", ".add_(weight.bfloat16()"),
    ("clip_first", "clip-before-unscale", "clip_grad_norm_(tower"),
    ("step_past_scaler", "scaler-misuse", "opt.step()"),
    ("step_in_autocast", "autocast-region-misuse", "opt.step()"),
    ("forgotten_head", "params-not-trained", "tagger.head = nn.Linear(16, 5)"),
    ("large_rate", "optimization-divergence", "torch.optim.SGD("),
    ("large_rate_bf16", "optimization-divergence", "torch.optim.AdamW("),
    ("nan_batch", "bad-input-data", "guess = model(row)"),
]
HEALTHY = sorted(path.stem for path in SCRIPTS.glob("healthy_*.py"))


@contextlib.contextmanager
def as_it_was():
    """The arguments, the search path, the threads and the seed of this process, put back afterwards."""
    argv, path, threads, state = list(sys.argv), list(sys.path), torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def observe(*words: str):
    with as_it_was():
        watched = ScriptWatch(list(words))
        watched.run()
        return explain(watched.sum_up(), "")


def observe_script(name: str, *options: str):
    return observe(str(SCRIPTS / f"{name}.py"), *options)


def line_of(finding) -> str:
    return Path(finding["file"]).read_text(encoding="utf-8").splitlines()[finding["line"] - 1]


@pytest.mark.parametrize(("name", "cause", "code"), FAILURES, ids=[name for name, *_ in FAILURES])
def test_a_failure_is_named_at_its_line(name, cause, code):
    first = observe_script(name)["findings"][0]
    assert first["cause"] == cause, first
    if code:
        assert Path(first["file"]).name == f"{name}.py"
        assert code in line_of(first), first


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_is_left_in_peace(name):
    answer = observe_script(name)
    assert answer["findings"] == []
    assert answer["unexplained"] == ""
    assert "recorded (step" in answer["notes"][0]  # steps were looked into all the same


def test_a_bad_batch_is_blamed_though_the_next_steps_are_fine():
    first = observe_script("nan_batch")["findings"][0]
    assert "step 13" in first["seen"]


def test_the_exit_code_of_the_script_is_kept():
    assert observe_script("stops_on_nan")["exit_code"] == 3
    assert observe_script("mask_constant")["exit_code"] == 1
    assert observe_script("late_exp")["exit_code"] == 0


def test_a_failure_that_no_recorded_step_explains_is_said(tmp_path):
    script = tmp_path / "hidden.py"
    script.write_text(
        "import torch\n"
        "w = torch.nn.Linear(4, 1)\n"
        "o = torch.optim.SGD(w.parameters(), lr=0.1)\n"
        "for step in range(20):\n"
        "    o.zero_grad()\n"
        "    loss = w(torch.randn(3, 4)).square().mean() * (float('inf') if step == 13 else 1)\n"
        "    loss.backward()\n"
        "    o.step()\n",
        encoding="utf-8",
    )
    answer = observe(str(script))
    assert answer["findings"] == []
    assert "not finite from step 13 on" in answer["unexplained"]


WEIGHTS = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 2))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
for step in range(40):
    x = torch.randn(16, 6)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = (net(x).float() - x[:, :2]).square().mean()
    if BAD == step:
        loss = loss * float("nan")
    if SCALED:
        scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
    else:
        loss.backward(); opt.step()
digest = [t.detach().double().sum().item() for t in (*net.parameters(), *net.buffers())]
torch.save(digest, TARGET)
"""


@pytest.mark.parametrize(("bad", "scaled"), [(-1, False), (-1, True), (20, False)])
def test_the_weights_end_as_they_would_have(tmp_path, bad, scaled):
    digests = []
    for number in range(2):
        target = tmp_path / f"{number}.pt"
        script = tmp_path / f"run{number}.py"
        head = f"BAD, SCALED, TARGET = {bad}, {scaled}, {str(target)!r}\n"
        script.write_text(head + WEIGHTS, encoding="utf-8")
        with as_it_was():
            if number:
                observe(str(script))
            else:
                runpy.run_path(str(script), run_name="__main__")
        digests.append(torch.load(target))
    assert repr(digests[0]) == repr(digests[1])


def test_arguments_path_and_main_are_those_that_python_gives(tmp_path, capsys):
    (tmp_path / "beside.py").write_text("VALUE = 7\n", encoding="utf-8")
    script = tmp_path / "shows.py"
    script.write_text(
        "import sys, beside\n"
        "class Here: pass\n"
        "print(sys.argv[1:], beside.VALUE, __name__, Here.__module__, sys.modules['__main__'].Here is Here)\n",
        encoding="utf-8",
    )
    observe(str(script), "--lr", "1e-3")
    assert capsys.readouterr().out.split("\n")[0] == "['--lr', '1e-3'] 7 __main__ __main__ True"


def test_a_module_runs_as_with_m(tmp_path, capsys, monkeypatch):
    package = tmp_path / "trains"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "now.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    observe("-m", "trains.now", "--fast")
    assert capsys.readouterr().out.startswith("__main__ trains ['--fast']")


def test_a_traceback_begins_at_the_script(capsys):
    observe_script("half_under_scaler")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "half_under_scaler.py" in lines[1]


def test_events_of_a_long_run_are_bounded(monkeypatch):
    monkeypatch.setattr("floatline.probe.watch.loop._MOST_EVENTS", 40)
    with as_it_was():
        watched = ScriptWatch([str(SCRIPTS / "healthy_mixed.py"), "--steps", "200"])
        watched.run()
        run = watched.sum_up()
    assert len(run.record.events) <= 140
    assert run.record.num_steps >= 200
    assert explain(run, "")["findings"] == []


@slow
@pytest.mark.parametrize(
    ("name", "package", "cause", "code"),
    [
        ("hf_trainer", "transformers", "scalar-out-of-range", ".masked_fill(padding, self.limit)"),
        ("lightning_fit", "lightning", "rounded-onto-singularity", "chances.log()"),
    ],
)
def test_a_framework_that_runs_the_loop_is_seen_through(name, package, cause, code):
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert observe_script(name)["findings"] == []
    first = observe_script(name, "--broken")["findings"][0]
    assert first["cause"] == cause, first
    assert Path(first["file"]).name == f"{name}.py"
    assert code in line_of(first)


BEFORE_BACKWARD = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(6, 2)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(24):
    x = torch.randn(16, 6)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x) * ({size} if step >= 15 else 30)
        loss = (out * out).float().mean() * 1e-4
    close = (out.float() - 1).abs().clamp(max=1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(("size", "causes"), [(9000, ["product-overflow"]), (30, [])])
def test_a_metric_that_is_computed_before_the_backward_pass_is_not_taken_for_the_loss(tmp_path, size, causes):
    script = tmp_path / "train.py"
    script.write_text(BEFORE_BACKWARD.format(size=size), encoding="utf-8")
    assert [finding["cause"] for finding in observe(str(script))["findings"]] == causes
