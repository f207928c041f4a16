"""Whether a step is finite: one bad element is seen, a sum that overflows is none, an ordinary step is noted once."""

import math

import pytest
import torch
from torch import nn

from floatline.probe.scripts.steps import StepCapture
from floatline.probe.watch.events import StepEvent
from floatline.probe.watch.gradient_scales import Held
from floatline.probe.watch.health import LateHealth, ScaledLoss, look
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.watch import watch


def ask(gradients: list[torch.Tensor], losses: tuple[float, ...] = (1.0,), held: Held | None = None):
    seen = Watch(light=True)
    seen.detailed = False
    seen.step_losses = list(losses)
    held = held or Held(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return look(seen, held, gradients)[1], held


def make(*sizes: int) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, size) for size in sizes]


@pytest.mark.parametrize(("sizes", "flagged"), [((5, 7, 1), True), ((20_000, 3), False)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_seen(sizes, flagged, bad):
    gradients = make(*sizes)
    health, held = ask(gradients)
    assert (health, held.kind, held.flags is not None) == (0.0, "near", flagged)
    gradients[1][0] = bad
    assert not math.isfinite(ask(gradients)[0])


def test_infinities_that_cancel_in_a_sum_are_seen():
    gradients = make(4, 4)
    gradients[0][0], gradients[1][0] = math.inf, -math.inf
    assert not math.isfinite(ask(gradients)[0])


@pytest.mark.parametrize("size", [8, 20_000])
def test_a_sum_that_overflows_is_no_failure(size):
    assert ask([torch.full((size,), 3e38)])[0] == 0.0


def test_gradients_keep_their_bits_and_autograd_sees_no_change():
    bits = [0x00000001, 0x807FFFFF, 0x80000000, 0x7F800000, 0xFFC00001, 0x7F7FFFFF, 0x3F800001]
    gradient = torch.tensor(bits, dtype=torch.uint32).view(torch.float32)
    assert ask([gradient])[1].flags is not None
    assert gradient.view(torch.uint32).tolist() == bits
    assert gradient._version == 0


def test_gradients_that_processes_share_are_not_written_to():
    assert ask([torch.ones(4).share_memory_()])[1].flags is None


def test_a_bad_step_is_no_shadow_on_the_next():
    bad, held = ask([torch.tensor([math.inf])])
    assert not math.isfinite(bad)
    assert ask([torch.ones(1)], held=held) == (0.0, held)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_bad_loss_is_seen_beside_healthy_gradients(loss):
    assert not math.isfinite(ask(make(4), (1.0, loss))[0])


def test_gradients_that_become_sparse_are_still_looked_at():
    held = ask(make(4, 4))[1]
    sparse = torch.tensor([0.0, math.inf]).to_sparse()
    assert held.kind == "near"
    assert not math.isfinite(ask([*make(4), sparse], held=held)[0])
    assert held.kind == "mixed"


def ask_late(gradients: list[torch.Tensor], held: Held) -> LateHealth:
    seen = Watch(light=True)
    seen.detailed, seen.listener = False, StepCapture(seen)
    seen.step_losses = [ScaledLoss(torch.ones((), device=gradients[0].device), 1.0)]
    health = look(seen, held, gradients)[1]
    assert isinstance(health, LateHealth)
    return health


def read(health: LateHealth) -> bool:
    return health.is_fine(torch.stack(health.numbers).tolist())


PLACES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ]),
]  # fmt: skip


@pytest.fixture(params=PLACES)
def far(request, monkeypatch):
    for module in ("health", "scaler_calls", "steps"):
        monkeypatch.setattr(f"floatline.probe.watch.{module}.is_far", lambda tensor: True)
    return request.param


@pytest.mark.parametrize(("size", "flagged"), [(40, True), (200_000, False)])
def test_what_is_known_late_tells_of_each_step_by_itself(far, size, flagged):
    held = Held(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    asked = []
    for number in range(150):  # more than flags are made at once
        gradients = [torch.linspace(-1, 1, size, device=far), torch.ones(3, device=far)]
        if number in (3, 64, 149):
            gradients[number % 2][1] = (math.inf, math.nan)[number % 2]
        asked.append(ask_late(gradients, held))
    assert {health.flagged for health in asked} == {flagged}
    assert [number for number, health in enumerate(asked) if not read(health)] == [3, 64, 149]


def test_gradients_of_a_step_that_is_known_late_keep_their_bits(far):
    bits = [0x00000001, 0x807FFFFF, 0x80000000, 0x7F800000, 0xFFC00001, 0x7F7FFFFF, 0x3F800001]
    gradient = torch.tensor(bits, dtype=torch.int64).to(torch.uint32).view(torch.float32).to(far)
    held = Held(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    assert not read(ask_late([gradient], held))
    assert gradient.cpu().view(torch.uint32).tolist() == bits
    assert gradient._version == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_formats_are_not_written_to(far, dtype):
    held = Held(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    health = ask_late([torch.ones(4, device=far, dtype=dtype)], held)
    assert not health.flagged
    assert read(health)


def test_only_the_step_that_failed_is_marked_among_those_that_are_alike():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(light=True) as seen:
        for number in range(60):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            if number == 40:
                model.bias.grad[0] = math.inf
            if number == 50:
                optimizer.param_groups[0]["lr"] = 0.25
            optimizer.step()
    steps = [event for event in seen.events if isinstance(event, StepEvent)]
    assert [e.step for e in steps if not all(map(math.isfinite, e.largest))] == [40]
    assert [e.rates for e in steps] == [[0.0]] * 50 + [[0.25]] * 10
    assert len({id(e.rates) for e in steps[24:32]}) < 8  # those that are alike share what is known
