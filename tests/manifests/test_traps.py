"""The traps of docs/manifest.md: each is named in one line, and its healthy twin has none of it."""

import sys
from pathlib import Path

import pytest
from tests.preloaded import COMMAND, run_preloaded
from tests.slow import mostly_slow

from floatline.manifests.measured_step import MeasuredStep
from floatline.probe.watch.watch import watch

TRAPS = Path(__file__).parent / "traps"
# What the run is believed to be, where only that tells, and the line.
LINES = {
    "loaded_in_bf16": ("", "BF16 weights without a master copy: "),
    "states_in_bf16": ("", "exp_avg_sq in BF16 cannot hold its decay of 0.999: 100 % of its values stay as they are"),
    "upcast_that_does_nothing": ("bf16-mixed", "weights: expected fp32, found bf16 in 100 %"),
    "policy_without_effect": ("bf16-mixed", "compute: expected bf16 in 75 % of FLOPs, found fp32 100 %"),
    "region_too_small": ("", "autocast is on but 100 % of FLOPs run in FP32 because they are outside of the region"),
    "accumulated_in_bf16": ("", "gradients of 8 backward passes are added up in BF16: "),
    "adapters_in_bf16": ("", "BF16 adapters without a master copy: "),
    "rotary_buffer_in_bf16": ("", "buffer rotary.inv_freq is BF16, and positions are computed from it"),
    "tied_weights_cast_apart": ("", "embed.weight is BF16 and head.weight is FP32, with the same numbers"),
    "fp32_that_is_tf32": ("fp32", "tf32: expected off, found matmul 'high'"),
    "loss_in_bf16": ("", "the loss is computed in BF16 (nll_loss_forward)"),
}


class Measured(BaseException):
    """The step is over."""


@pytest.fixture
def manifest_of(monkeypatch):
    """Runs a script until its first step is measured."""
    import torch

    before = torch.get_float32_matmul_precision()

    def run(name, *words):
        path = TRAPS / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *words])

        def end(_):
            raise Measured

        with watch(light=True) as seen:
            measured = MeasuredStep(seen, on_done=end)
            seen.listener = measured
            with pytest.raises(Measured):
                exec(compile(path.read_text("utf-8"), str(path), "exec"), {"__name__": "__main__"})
        return measured.manifest

    yield run
    torch.set_float32_matmul_precision(before)


def told(manifest, believed):
    return [line.text for line in manifest.lines] + list(manifest.differences(believed) if believed else ())


def test_every_script_has_its_line():
    assert {path.stem for path in TRAPS.glob("*.py")} == set(LINES)


@pytest.mark.parametrize("name", sorted(LINES))
def test_the_trap_is_named_and_its_healthy_twin_is_not(name, manifest_of):
    believed, line = LINES[name]
    assert any(text.startswith(line) for text in told(manifest_of(name), believed))
    healthy = told(manifest_of(name, "healthy"), believed)
    assert not any(text.startswith(line) for text in healthy)
    assert healthy == []


@pytest.mark.parametrize("name", mostly_slow(sorted(LINES), every=len(LINES), rare=3))
def test_one_command_names_it_without_an_edit(name, tmp_path):
    believed, line = LINES[name]
    words = ["--expect", believed] if believed else []
    path = str(TRAPS / f"{name}.py")
    found = run_preloaded(["-c", COMMAND, "manifest", *words, "--", sys.executable, path], cwd=tmp_path)
    assert found.returncode == 1, found.stderr
    assert line in found.stdout


def test_every_trap_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text("utf-8")
    assert [name for name in LINES if f"traps/{name}.py" not in page] == []
