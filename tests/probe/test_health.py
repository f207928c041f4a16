"""Whether a step is finite: one bad element is seen, a sum that overflows is none, an ordinary step is noted once."""

import math

import pytest
import torch
from torch import nn

from floatline.probe.events import Watch
from floatline.probe.gradient_scales import Held
from floatline.probe.health import look
from floatline.probe.watch import watch


def ask(gradients: list[torch.Tensor], losses: tuple[float, ...] = (1.0,), held: Held | None = None):
    seen = Watch(light=True)
    seen.detailed = False
    seen.step_losses = list(losses)
    held = held or Held(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return look(seen, held, gradients)[1], held


def make(*sizes: int) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, size) for size in sizes]


@pytest.mark.parametrize(("sizes", "kind"), [((5, 7, 1), "small"), ((20_000, 3), "near")])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_seen(sizes, kind, bad):
    gradients = make(*sizes)
    health, held = ask(gradients)
    assert (health, held.kind) == (0.0, kind)
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
    assert ask([gradient])[1].kind == "small"
    assert gradient.view(torch.uint32).tolist() == bits
    assert gradient._version == 0


def test_gradients_that_processes_share_are_not_written_to():
    assert ask([torch.ones(4).share_memory_()])[1].kind == "near"


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
    assert held.kind == "small"
    assert not math.isfinite(ask([*make(4), sparse], held=held)[0])
    assert held.kind == "mixed"


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
    steps = [event for event in seen.events if event.kind == "step"]
    assert [e.step for e in steps if not all(map(math.isfinite, e.data["largest"]))] == [40]
    assert [e.data["rates"] for e in steps] == [[0.0]] * 50 + [[0.25]] * 10
    assert len({id(e.data) for e in steps[24:32]}) < 8  # those that are alike share what is known
