"""The second launch of a kernel goes past Triton's own binding, with the same arguments."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton

from floatline.optim.kernels.launches import Launches, kind_of


class Kernel:
    """Stands for a kernel: notes how it was launched, and gives itself back compiled, or None as the interpreter."""

    def __init__(self, *, interpreted=False):
        self.seen = []
        self.interpreted = interpreted

    def __getitem__(self, grid):
        if len(grid) == 3:
            return lambda *args: self.seen.append(("compiled", grid, args))

        def launch(*args, **named):
            self.seen.append(("triton", grid, args, named))
            return None if self.interpreted else self

        return launch


def launch(launches, kernel, value, key="a"):
    launches(kernel, 5, (value,), {"BLOCK": 256, "MODE": "x"}, key=key, num_warps=2)


def test_the_first_launch_is_triton_s_and_later_ones_are_the_compiled_kernel_s(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    launches, kernel = Launches(), Kernel()
    for value in (1, 2, 3):
        launch(launches, kernel, value)
    assert kernel.seen == [
        ("triton", (5,), (1,), {"BLOCK": 256, "MODE": "x", "num_warps": 2}),
        ("compiled", (5, 1, 1), (2, 256, "x")),
        ("compiled", (5, 1, 1), (3, 256, "x")),
    ]
    launch(launches, kernel, 4, key="b")
    assert kernel.seen[-1][0] == "triton"


@pytest.mark.parametrize(("version", "interpreted"), [("3.2.0", False), ("3.6.0", True)])
def test_every_launch_is_triton_s_where_the_compiled_kernel_cannot_be_called(monkeypatch, version, interpreted):
    monkeypatch.setattr(triton, "__version__", version)
    launches, kernel = Launches(), Kernel(interpreted=interpreted)
    for value in (1, 2, 3):
        launch(launches, kernel, value)
    assert [seen[0] for seen in kernel.seen] == ["triton"] * 3


def test_tensors_that_triton_compiles_for_differently_are_of_another_kind():
    row = torch.zeros(8)
    assert kind_of(row) == kind_of(torch.ones(8))
    assert kind_of(row) != kind_of(row[1:])
    assert kind_of(row) != kind_of(row.double())
