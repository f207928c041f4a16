"""Numbers that a script reads out of tensors are heard, by line."""

import json
import math

import pytest
import torch

from floatline.probe.watch.patches import Patches
from floatline.running.read_values import ReadValues


@pytest.fixture
def heard():
    """Runs a function; gives the numbers that it read, line by line."""

    def run(work):
        reads, patches = ReadValues(), Patches()
        reads.patch(patches)
        try:
            work()
        finally:
            patches.undo()
        assert all("test_read_values.py:" in line for line in reads.lines)
        return list(reads.lines.values())

    return run


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: float(t),
        lambda t: f"{t:.3f}",
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t.detach().cpu().numpy(),
    ],
)
def test_a_number_is_heard_once_however_it_is_read(heard, read):
    assert heard(lambda: read(torch.tensor(0.25))) in ([[0.25]], [])  # formatting reads inside torch
    assert heard(lambda: read(torch.tensor(0.25))) == heard(lambda: read(torch.tensor(0.25)))


def test_of_several_numbers_the_mean_is_kept(heard):
    assert heard(lambda: torch.tensor([1.0, 3.0]).tolist()) == [[2.0]]
    assert heard(lambda: torch.tensor([[1.0, 3.0]]).numpy()) == [[2.0]]


def test_truth_values_and_ids_are_not_kept(heard):
    assert heard(lambda: bool(torch.tensor(True).item())) == []
    assert heard(lambda: torch.tensor([3, 4]).tolist()) == []
    assert heard(lambda: torch.tensor(3).item()) == [[3.0]]


def test_what_torch_reads_for_itself_is_not_heard(heard):
    def step():
        w = torch.ones(3, requires_grad=True)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.Adam([w])
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.nn.utils.clip_grad_norm_([w], 1.0)

    assert heard(step) == []


def test_a_line_in_a_loop_is_kept_up_to_a_limit(heard):
    (numbers,) = heard(lambda: [torch.tensor(float(i)).item() for i in range(1000)])
    assert numbers == [float(i) for i in range(200)]


def test_what_is_not_finite_is_written_as_null(tmp_path):
    reads = ReadValues()
    reads.lines = {"a.py:1": [1.0, math.inf, math.nan], "a.py:2": []}
    reads.write(tmp_path / "reads.json")
    assert json.loads((tmp_path / "reads.json").read_text())["lines"] == {"a.py:1": [1.0, None, None]}


def test_two_numbers_of_one_line_are_two_rows(heard):
    def work():
        for step in range(3):
            loss, accuracy = torch.tensor(2.0 - step), torch.tensor(0.5)
            _ = f"{loss.item():.3f} {accuracy.item():.3f}"

    assert heard(work) == [[2.0, 1.0, 0.0], [0.5, 0.5, 0.5]]


def test_what_is_read_of_the_loss_scale_is_not_kept(heard):
    scaler = torch.amp.GradScaler("cpu")
    assert heard(lambda: int(torch.log2(torch.tensor(scaler.get_scale())))) == []
    scale = scaler.get_scale()
    assert heard(lambda: int(torch.log2(torch.tensor(scale)))) == [[16.0]]


@pytest.mark.parametrize("compiles", [True, False])
def test_what_compiled_code_reads_is_not_heard(heard, compiles):
    # Where it runs eagerly in some steps, the same line is another place: the numbers would be of other steps.
    def half(tensor):
        return tensor / 2 if tensor.mean().item() > 0 else tensor

    run = torch.compile(half, backend="eager") if compiles else half
    assert heard(lambda: run(torch.ones(3))) == ([] if compiles else [[1.0]])
