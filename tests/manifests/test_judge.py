"""The verdict: each line from facts alone, and none from facts that are fine."""

from dataclasses import replace

import pytest
import torch
from tests.manifests import toys
from torch import nn
from torch.nn import functional

import floatline as fl
from floatline.causes import CAUSES
from floatline.manifests.manifest import Manifest
from floatline.manifests.rows import ExchangeRow, PeakRow, Switches, UpdateRow, WorkRow
from floatline.precision.holding import Holding

WEIGHTS = Holding("weights", "body", "", "fp32", 1, 100, "weight")
FINE = Manifest((WEIGHTS,), step=1, work=(WorkRow("backward", "off", "bf16", 100),))


def test_what_is_fine_has_no_line():
    assert FINE.lines == ()


@pytest.mark.parametrize(("matmul", "is_fp32"), [(None, True), ("highest", True), ("high", False), ("medium", False)])
def test_fp32_products_that_may_be_less_on_a_gpu_are_not_fp32_as_believed(matmul, is_fp32):
    found = replace(FINE, work=(WorkRow("backward", "off", "fp32", 100),), switches=Switches(matmul=matmul))
    assert found.summary.startswith("FP32 as believed: ") is is_fp32
    assert found.summary.endswith(f"TF32 or less (matmul '{matmul}')") is not is_fp32


@pytest.mark.parametrize(
    ("changed", "cause", "said"),
    [
        ({"updates": (UpdateRow("body", "bf16", 100, 61),)}, "update-lost-to-rounding", "61 % of updates round away"),
        ({"updates": (UpdateRow("body", "fp32", 100, 50),)}, "update-lost-to-rounding", "FP32 weights: 50 %"),
        (
            {"peaks": (PeakRow("fp16", 40000.0, 65504.0, "up"),)},
            "activation-overflow",
            "61.1 % of what the",
        ),
        ({"peaks": (PeakRow("fp16", float("nan"), 65504.0),)}, "activation-overflow", "in the model"),
        ({"work": (WorkRow("backward", "off", "fp16", 100),)}, "gradient-underflow", "the loss is not scaled"),
        (
            {"exchanges": (ExchangeRow("fsdp2", "", reduce="bf16"),), "num_ranks": 8},
            "accumulator-stagnation",
            "FSDP2 sums up gradients of 8 processes in BF16",
        ),
        (
            {"holdings": (WEIGHTS, Holding("buffers", "norms", "averages", "bf16", 1, 8, "norm.running_mean"))},
            "accumulator-stagnation",
            "an average is kept in it",
        ),
    ],
)
def test_a_fact_has_its_line(changed, cause, said):
    (line,) = replace(FINE, **changed).lines
    assert line.cause.id == cause
    assert said in line.text
    assert line.fix


@pytest.mark.parametrize(
    "changed",
    [
        {"updates": (UpdateRow("body", "fp32", 100, 5),)},
        {"peaks": (PeakRow("fp16", 400.0, 65504.0, "up"),)},
        {"work": (WorkRow("backward", "off", "fp16", 100),), "scaled": True},
        {"exchanges": (ExchangeRow("fsdp2", "", reduce="bf16"),)},  # one process has nothing to sum up
        {"exchanges": (ExchangeRow("fsdp2", "", reduce="fp32"),), "num_ranks": 8},
        {"holdings": (WEIGHTS, Holding("buffers", "norms", "", "bf16", 1, 8, "mask"))},
    ],
)
def test_its_twin_has_none(changed):
    assert replace(FINE, **changed).lines == ()


def test_every_line_is_in_the_catalogue():
    found = toys.measure(toys.make(dtype=torch.bfloat16), passes=2, wide_loss=False)
    assert len(found.lines) >= 4
    assert {line.cause.id for line in found.lines} <= set(CAUSES)


@pytest.mark.parametrize("off", [True, False])
def test_a_region_that_is_switched_off_inside_is_told_with_its_module(off):
    class Careful(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=not off):
                return super().forward(x.float() if off else x)

    model = nn.Sequential(nn.Linear(16, 16), Careful(16, 256), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.ones(8, 16))
        out.float().square().mean().backward()
        optimizer.step()

    found = fl.manifest(model, optimizer, step=step)
    assert ("because the region is switched off around them, most in 1" in toys.text(found)) == off


def test_a_loss_that_is_scaled_by_hand_is_scaled():
    model = nn.Linear(8, 8).to(torch.float16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)

    def step(scale):
        def make():
            model.zero_grad()
            loss = functional.mse_loss(model(torch.ones(4, 8, dtype=torch.float16)).float(), torch.ones(4, 8))
            (loss * scale).backward()
            for master, weight in zip(masters, model.parameters(), strict=True):
                master.grad = weight.grad.float() / scale
            optimizer.step()
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.data.copy_(master.data)

        return make

    assert "not scaled" not in toys.text(fl.manifest(model, optimizer, step=step(1024.0)))
    assert "not scaled" in toys.text(fl.manifest(model, optimizer, step=step(1.0)))


def test_two_optimizers_are_one_manifest():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([first, second])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]

    def step():
        for part, optimizer in zip(model, optimizers, strict=True):
            part(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    found = fl.manifest(model, optimizers[0], step=step)
    assert sum(row.num_updates for row in found.updates) == 40
    assert found.optimizers == ("SGD", "SGD")
    assert len({(row.phase, row.region, row.format) for row in found.work}) == len(found.work)


@pytest.mark.parametrize("adds", [True, False])
def test_a_buffer_that_is_added_to_is_an_average_whatever_its_name(adds):
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(8, dtype=torch.bfloat16))
            self.register_buffer("cluster_size", torch.zeros(8, dtype=torch.bfloat16))

        def forward(self, x):
            out = self.inner(x * self.mask.float())
            with torch.no_grad():
                if adds:
                    self.cluster_size.mul_(0.999).add_(out.mean(0).bfloat16(), alpha=0.001)
                else:
                    self.cluster_size.copy_(out[0])
            return out

    model = Codes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

    said = ["buffer cluster_size is BF16, and an average is kept in it"] if adds else []
    assert toys.text(fl.manifest(model, optimizer, step=step)).splitlines() == said


def test_every_kind_of_buffer_is_looked_at_and_not_the_first_alone():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            for name in ("mask", "inv_freq", "ema_norm"):
                self.register_buffer(name, torch.ones(4, dtype=torch.bfloat16))

    model = Buffers()
    found = fl.manifest(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [line.text.split(" is ")[0] for line in found.lines] == ["buffer inv_freq", "buffer ema_norm"]


@pytest.mark.parametrize("trained", [True, False])
def test_a_copy_that_is_not_trained_was_never_tied(trained):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16)
            self.teacher.load_state_dict(self.student.state_dict())

        def forward(self, x):
            with torch.set_grad_enabled(trained):
                goal = self.teacher(x.bfloat16()).float()
            return (self.student(x) - goal - 1).square().mean()

    torch.manual_seed(0)
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(4, 8)).backward()
        optimizer.step()

    assert bool(fl.manifest(model, optimizer, step=step).tied) == trained
