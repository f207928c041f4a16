"""Where a Python number that FP16 cannot hold may stand: what raises the team's error, what does not, and its name."""

import math
from pathlib import Path

import pytest
import torch
from tests.slow import mostly_slow, slow

from floatline.diagnosis.target_diagnosis import diagnose
from floatline.lint.paths import lint_paths
from floatline.probe.runs.runs import run_target
from floatline.systems.conditioned import team_loop
from floatline.workload import load_target

TOO_LARGE = "without overflow"
RAISE = {
    "masked_fill": "h = h.masked_fill(h < 0, -1e9)",
    "full": "h = torch.where(h < 0, torch.full(h.shape, -1e9, dtype=h.dtype), h)",
    "full_like": "h = torch.where(h < 0, torch.full_like(h, -1e9), h)",
    "new_full": "h = torch.where(h < 0, h.new_full(h.shape, -1e9), h)",
    "fill_": "h = torch.where(h < 0, torch.empty_like(h).fill_(-1e9), h)",
    "clamp": "h = h.clamp(-1e9, 1e9)",
    "pad": "h = F.pad(h, (0, 1), value=-1e9)[:, :8]",
}
TARGET = """import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.body(x)
        LINE
        return self.head(h.softmax(-1))


def build(seed=0):
    torch.manual_seed(seed)
    batches = [((torch.randn(6, 4),), (torch.randint(3, (6,)),)) for _ in range(3)]
    adam = lambda model: torch.optim.AdamW(model.parameters(), 0.01)
    return Net(), batches, F.cross_entropy, "fp16-mixed", adam
"""
WHERE = TARGET.splitlines().index("        LINE") + 1


@pytest.fixture
def target(tmp_path, request):
    path = tmp_path / "net.py"
    path.write_text(TARGET.replace("LINE", request.param), encoding="utf-8")
    return path


def by_name(lines, **options):
    return pytest.mark.parametrize("target", mostly_slow(lines.values(), ids=lines, **options), indirect=True)


@slow
@by_name(RAISE, every=2)
def test_the_constant_raises_and_diagnose_names_its_line(target):
    found = diagnose(str(target), steps=2).primary
    assert (found.cause.id, Path(found.file), found.line) == ("scalar-out-of-range", target, WHERE)
    assert TOO_LARGE in found.seen


@by_name(RAISE, every=1)
def test_lint_names_the_line_before_anything_runs(target):
    found = lint_paths([target]).findings
    assert [(one.rule.code, one.line) for one in found] == [("FL105", WHERE)]


@slow
@by_name({"comparison": "h = h * (h < 1e9)"}, every=1)
def test_a_comparison_with_such_a_number_raises_nothing_and_is_left_in_peace(target):
    assert diagnose(str(target), steps=2).verdict == "healthy"
    assert lint_paths([target]).findings == ()


@pytest.mark.parametrize("number", [1e9, -1e9])
def test_comparisons_and_arithmetic_take_it_as_infinite_without_an_error(number):
    half = torch.tensor([1.0, -2.0]).half()
    assert (half < number).tolist() == [number > 0] * 2 and not (half == number).any()
    assert (half + number).tolist() == [math.copysign(math.inf, number)] * 2
    assert torch.where(half > 0, half, number).tolist() == [1.0, math.copysign(math.inf, number)]


# Their loop


@slow
def test_their_loop_raises_at_the_first_overflow_and_the_update_is_blamed():
    found = diagnose("floatline.systems.conditioned.team_loop:train", steps=24)
    assert (found.verdict, found.primary.cause.id) == ("precision", "scaler-misuse")
    assert "No inf checks were recorded prior to update." in found.primary.seen
    assert "scaler.step" in found.primary.fix and "continue" in found.primary.fix
    line = Path(found.primary.file).read_text(encoding="utf-8").splitlines()[found.primary.line - 1]
    assert Path(found.primary.file).name == "team_loop.py" and line.strip() == "scaler.update()"


def test_without_their_check_the_scaler_leaves_the_same_steps_out_by_itself():
    run = run_target(load_target("floatline.systems.conditioned.team_loop:train_fixed"), steps=24)
    assert run.exception is None
    assert 1 <= len(run.skipped) <= 12 and math.isfinite(run.losses[-1])


@pytest.mark.parametrize(("unscaled", "scale"), [(True, 32768.0), (False, None)])
def test_unscale_before_their_check_gives_update_what_it_reads(unscaled, scale):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((weight * math.inf).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
    else:
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.update()


def test_lint_names_the_update_of_a_batch_that_was_left_out():
    found = lint_paths([Path(team_loop.__file__)]).findings
    assert [one.rule.code for one in found] == ["FL203"]
    assert "No inf checks were recorded" in found[0].seen
