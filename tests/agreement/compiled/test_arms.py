"""Eager and compiled code: a wrong backend is named down to its operation, with a script that shows it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.agreement.models import faithful, make_decoder, make_ids, wrong_gelu
from tests.slow import exhaustive, slow
from torch import nn

from floatline.agreement import compare_compiled
from floatline.agreement.compiled.backends import Compiler, find_compiler
from floatline.agreement.compiled.reproducer import MOST_LINES
from floatline.agreement.reading import Reading
from floatline.agreement.result import Parity
from floatline.errors import ParityError

ROOT = Path(__file__).parents[3]


def run_script(path: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(path)], cwd=ROOT, capture_output=True, text=True, env=_environment())


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Tanh())


@slow
def test_a_wrong_backend_is_named_by_module_and_operation_and_shown_by_a_script(tmp_path):
    found = compare_compiled(make_net(), torch.randn(6, 8), backend=wrong_gelu, folder=tmp_path)
    assert (found.verdict, found.parity.side, found.parity.entry.module) == ("wrong", "B", "1")
    assert found.parity.entry.op.op == "gelu"
    assert len(found.reproducer.read_text().splitlines()) <= MOST_LINES
    run = run_script(found.reproducer)
    assert run.returncode == 1, run.stderr
    assert "compiled to FP64" in run.stdout
    script = found.reproducer.read_text()
    found.reproducer.write_text(script.replace("wrong_gelu", "faithful"))
    assert run_script(found.reproducer).returncode == 0  # the script tells right from wrong


def make_reading(name: str, *, a: float, b: float) -> Reading:
    return Reading(name, "backward", max(a, b), a, b, 1e-7, 1e-8, a / 3e-4, b / 3e-4, max(a, b) / 3e-4)


def test_compiled_code_that_is_nearer_than_eager_agrees():
    nearer, farther = make_reading("weight", a=1e-3, b=2e-4), make_reading("bias", a=2e-4, b=8e-4)
    beside = Parity("eager", "compiled", (nearer,), asks_of_b=True)
    assert (beside.verdict, beside.side, beside.summary[:5]) == ("agree", "", "eager")
    assert (Parity("A", "B", (nearer,)).verdict, Parity("A", "B", (nearer,)).side) == ("farther", "A")
    # and the heavier reading that is no fault hides none that is
    both = Parity("eager", "compiled", (nearer, farther), asks_of_b=True)
    assert nearer.weight > farther.weight
    assert (both.verdict, both.side, both.worst.name) == ("farther", "B", "bias")


def test_of_numbers_that_are_rounding_alone_none_is_farther():
    """The gradient of a bias before a norm is 0 but for rounding: in relative distances both are far off."""
    noise = Reading("bias", "backward", 9e8, 3.3e8, 7.8e8, 3e8, None, 1.0, 2.5, 2.5)
    assert noise.verdict == "agree"
    assert replace(noise, a=3.3e-8, b=7.8e-8, floor=3e-8, apart=9e-8).verdict == "farther"
    assert replace(noise, b=3.3e14, excess_b=1e6, excess_apart=1e6).verdict == "wrong"


def test_a_backend_that_changes_nothing_agrees(tmp_path):
    found = compare_compiled(make_net(), torch.randn(6, 8), backend=faithful, folder=tmp_path / "none")
    assert (found.verdict, found.parity.entry, found.reproducer, found.emulated) == ("agree", None, None, ())
    assert not (tmp_path / "none").exists()


@slow
def test_in_a_transformer_the_block_is_named_that_calls_the_function():
    found = compare_compiled(make_decoder(dtype=torch.float32), make_ids(), backend=wrong_gelu)
    assert found.parity.entry.module in ("blocks.0.feed", "blocks.1.feed")
    assert found.parity.entry.op.op == "gelu"


@slow
def test_inductor_on_a_cpu_agrees_with_eager_code_and_has_eagers_casts_as_a_third_arm():
    found = compare_compiled(make_net(), torch.randn(6, 8))
    assert found.verdict == "agree"
    assert len(found.emulated) == len(found.parity.readings)


@exhaustive
def test_a_bug_in_inductors_own_kernels_is_found(tmp_path):
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    options = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}  # torch's own, for its minifier's tests
    found = compare_compiled(net, torch.randn(6, 8), options=options, folder=tmp_path)
    assert (found.verdict, found.parity.entry.module, found.parity.entry.op.op) == ("wrong", "3", "relu")
    assert run_script(found.reproducer).returncode == 1


@slow
def test_the_backend_of_a_compiled_module_is_found():
    assert find_compiler(torch.compile(make_net(), backend=wrong_gelu)).backend is wrong_gelu
    options = {"epilogue_fusion": False}
    assert find_compiler(torch.compile(make_net(), options=options)) == Compiler("inductor", options)
    found = compare_compiled(torch.compile(make_net(), backend=wrong_gelu), torch.randn(6, 8), backward=False)
    assert found.verdict == "wrong"


def test_an_option_that_inductor_does_not_know_gets_one_line():
    with pytest.raises(ParityError, match="torch.compile refuses this: Unexpected optimization option no_such_option"):
        compare_compiled(make_net(), torch.randn(6, 8), options={"no_such_option": 1})
