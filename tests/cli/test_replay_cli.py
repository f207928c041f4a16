"""`floatline replay`: what it prints, its JSON, and its exit codes."""

import json
import sys

import pytest
from tests.preloaded import COMMAND, run_preloaded
from typer.testing import CliRunner

from floatline.causes import find_cause
from floatline.cli.main import app, main
from floatline.findings import Finding
from floatline.probe.bundles.bundle import write_bundle
from floatline.probe.trace.trace import Trace
from floatline.workload import load_target

TARGET = """
import torch
from torch import nn

print("the target talks")


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.factor = factor

    def forward(self, x):
        return self.head(self.body(x) * self.factor)


def build(seed=0, factor=1e6):
    x = torch.ones(4, 8)
    make = lambda model: torch.optim.SGD(model.parameters(), lr=1e-4)
    return Net(factor), [((x,), (x[:, :1],))], lambda y, t: (y.float() - t).square().mean(), "fp16-mixed", make


def raises(seed=0):
    model, batches, _, precision, make = build(seed, 1.0)

    def loss(y, t):
        raise RuntimeError("[bold]no loss[/bold]")

    return model, batches, loss, precision, make
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    file = tmp_path_factory.mktemp("cli") / "net.py"
    file.write_text(TARGET)
    return str(file)


@pytest.fixture(scope="module")
def bundle(target, tmp_path_factory):
    finding = Finding(find_cause("product-overflow"), "seen", "fix", "head")
    folder = tmp_path_factory.mktemp("bundles") / "one"
    return str(write_bundle(load_target(target), folder, step=0, findings=[finding]))


def invoke(*args):
    return CliRunner().invoke(app, ["replay", *args], env={"COLUMNS": "120"})


def run(*args):
    return run_preloaded(["-c", COMMAND, "replay", *args])


def call_main(monkeypatch, *args):
    """The command's own entry point, in this process."""
    monkeypatch.setattr(sys, "argv", ["floatline", "replay", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_a_step_that_fails_exits_with_1_and_shows_both(bundle):
    result = invoke(bundle)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert "net.py, step 0, seed 0 in fp16-mixed" in lines[0]
    assert lines[1] == "found: product-overflow in head"
    was, wide = (next(line for line in lines if line.startswith(word)) for word in ("as it was", "fp32"))
    assert " no " in was and "not finite in " in was
    assert " yes " in wide
    assert "note: the bundle holds no data" in lines[-1]
    assert "the target talks" not in result.stdout


def test_what_fixes_it_exits_with_0(bundle):
    for options in (["--precision", "fp32"], ["--precision", "bf16"]):
        assert invoke(bundle, *options).exit_code == 0, options
    both = invoke(bundle, "--fp32-module", "body", "--fp32-module", "", "--scale", "1")
    assert both.exit_code == 0, both.output
    assert "body,  in FP32" in both.stdout
    assert invoke(bundle, "--scale", "1").exit_code == 1


def test_json_is_one_object(bundle):
    result = invoke(bundle, "--precision", "bf16", "--format", "json")
    found = json.loads(result.stdout)
    assert found["finite"] is True
    assert [row["what"] for row in found["replays"]] == ["as it was", "bf16", "fp32"]
    was, bf16, wide = found["replays"]
    assert was["loss"] in ("NaN", "Infinity")
    assert bf16["against_fp32"]["cosine"] > 0.99
    assert wide["against_fp32"] is None
    assert found["findings"][0]["cause"] == "product-overflow"


def test_the_trace_of_the_replay_that_is_asked_for_is_kept(bundle, tmp_path):
    assert invoke(bundle, "--precision", "bf16", "--trace", str(tmp_path / "t.npz")).exit_code == 0
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.meta["precision"] == "bf16"
    assert "bfloat16" in {out.dtype for op in trace.ops for out in op.outputs}


def test_code_that_raises_is_shown_as_it_is(target, tmp_path):
    folder = write_bundle(load_target(f"{target}:raises"), tmp_path / "b", step=0)
    result = invoke(str(folder))
    assert result.exit_code == 1
    assert "RuntimeError: [bold]no loss[/bold]" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["no-such-folder"], "no-such-folder' is no replay bundle"),
        (["BUNDLE", "--precision", "fp8"], "fp8"),
        (["BUNDLE", "--scale", "-1"], "Give a number above 0"),
        (["BUNDLE", "--fp32-module", "boddy"], "Did you mean 'body'"),
        (["BUNDLE", "--target", "no_such.py"], "no_such.py' does not exist"),
        (["BUNDLE", "--trace", "no/such/folder.npz"], "there is no folder"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(bundle, options, words, monkeypatch, capsys):
    assert call_main(monkeypatch, *[bundle if word == "BUNDLE" else word for word in options]) == 2
    printed = capsys.readouterr()
    assert words in printed.err.splitlines()[-1]
    assert printed.out == ""


def test_the_command_itself_says_what_is_wrong():
    result = run("no-such-folder")
    assert result.returncode == 2
    assert result.stderr.startswith("floatline: 'no-such-folder' is no replay bundle")
    assert len(result.stderr.splitlines()) == 1
