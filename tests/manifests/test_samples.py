"""Samples: spread evenly, without a pattern, and counted as the rounding of a format does it."""

import pytest
import torch
from tests.manifests import toys
from torch import nn

import floatline as fl
from floatline.manifests.decays import find_stuck_states
from floatline.manifests.samples import GradientSums, StepSamples

BF16 = torch.bfloat16


def test_every_update_below_half_a_spacing_is_lost():
    # BF16's spacing below 1 is 2**-8, above it 2**-7; halves of those are ties, which go back to 1.
    weight = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([2.0**-9, -(2.0**-7), 0.0, 2.0**-8], dtype=BF16)
    samples = StepSamples(optimizer, {})
    optimizer.step()
    (row,) = samples.compare()
    assert (row.num_updates, row.num_lost) == (3, 1)


def test_fp32_takes_the_same_updates():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([2.0**-9, -(2.0**-7), 0.0, 2.0**-8])
    samples = StepSamples(optimizer, {})
    optimizer.step()
    (row,) = samples.compare()
    assert (row.num_updates, row.num_lost) == (3, 0)


@pytest.mark.parametrize(("decay", "lost"), [(1e-3, 4), (0.1, 0)])
def test_decoupled_decay_is_lost_where_its_product_rounds_back(decay, lost):
    weight = nn.Parameter(torch.tensor([1.0, 1.25, -3.0, 0.1], dtype=BF16))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=decay, fused=False)
    weight.grad = torch.ones(4, dtype=BF16)
    samples = StepSamples(optimizer, {})
    optimizer.step()
    (row,) = samples.compare()
    assert (row.num_decays, row.num_decays_lost) == (4, lost)


def test_decay_in_the_gradient_is_lost_where_the_sum_is_the_gradient():
    weight = nn.Parameter(torch.tensor([1.0, 1.0], dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=1e-2)
    weight.grad = torch.tensor([64.0, 0.01], dtype=BF16)
    samples = StepSamples(optimizer, {})
    optimizer.step()
    assert samples.compare()[0].num_decays_lost == 1


@pytest.mark.parametrize(("dtype", "beta", "stuck"), [(BF16, 0.999, True), (BF16, 0.9, False), (None, 0.999, False)])
def test_a_state_in_bf16_cannot_hold_a_decay_of_less_than_half_a_spacing(dtype, beta, stuck):
    weight = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype or torch.float32))
    optimizer = torch.optim.Adam([weight], lr=1e-3, betas=(0.5, beta))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    rows = {row.name: (row.num, row.num_stuck) for row in find_stuck_states(optimizer)}
    assert rows == ({"exp_avg_sq": (64, 64)} if stuck else {})


def test_what_is_not_counted_does_move():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert (values * (1 - 2.0**-22) != values).all()
    assert (values.to(BF16) * (1 - 2.0**-6) != values.to(BF16)).all()
    assert (values.to(BF16) * (1 - 2.0**-10) == values.to(BF16)).any()


def test_states_that_are_rounded_at_random_are_not_stuck():
    weight = nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = fl.optim.AdamW([weight], lr=1e-3, states="bf16")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert find_stuck_states(optimizer) == []


def test_what_is_lost_of_a_sum_is_told_against_fp32():
    weight = nn.Parameter(torch.zeros(2, dtype=BF16))
    sums = GradientSums([weight])
    for gradient in (1.0, 2.0**-9, 2.0**-9):
        (weight * torch.tensor([gradient, gradient], dtype=BF16)).sum().backward()
    (row,) = sums.end()
    assert row.num_passes == 3
    assert row.total == pytest.approx(2 * (1 + 2.0**-8))
    assert row.lost == pytest.approx(2 * 2.0**-8)
    (weight * 2.0).sum().backward()
    assert sums.end()[0].num_passes == 3  # its hooks are gone


@pytest.mark.parametrize(("dtype", "passes"), [(torch.float32, 3), (BF16, 1)])
def test_fp32_and_single_passes_lose_nothing(dtype, passes):
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    sums = GradientSums([weight])
    for _ in range(passes):
        (weight * 3.0).sum().backward()
    assert sums.end() == []


def sum_up(dtype, num=16):
    """A step whose gradients a loop adds up in tensors of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = [torch.zeros_like(weight, dtype=dtype) for weight in model.parameters()]

    def step():
        for number in range(num):
            generator = torch.Generator().manual_seed(number)
            model.zero_grad()
            model(torch.randn(8, 32, generator=generator)).square().mean().backward()
            if number % 2:
                torch._foreach_add_(own, [weight.grad.to(dtype) for weight in model.parameters()])
            else:
                for place, weight in zip(own, model.parameters(), strict=True):
                    place.add_(weight.grad.to(dtype))
        for place, weight in zip(own, model.parameters(), strict=True):
            weight.grad = place.float() / num
        optimizer.step()

    return fl.manifest(model, optimizer, step=step)


def test_sums_that_a_loop_keeps_itself_are_measured():
    (row,) = sum_up(torch.bfloat16).sums
    assert (row.format, row.num_passes) == ("bf16", 16)
    assert 1e-3 < row.share < 0.1
    assert "gradients of 16 backward passes are added up in BF16" in toys.text(sum_up(torch.bfloat16))


def test_sums_in_fp32_and_single_ones_are_none():
    assert sum_up(torch.float32).sums == ()
    assert sum_up(torch.bfloat16, num=1).sums == ()


class OwnAdam(torch.optim.Optimizer):
    """Keeps what it keeps under names of its own, and updates it in one of several ways."""

    def __init__(self, weights, way, dtype=BF16):
        super().__init__(weights, {"lr": 1e-3})
        self.way, self.dtype = way, dtype

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            own = self.state[weight]
            if not own:
                own["m"], own["v"] = (torch.zeros_like(weight, dtype=self.dtype) for _ in range(2))
            gradient = weight.grad.to(self.dtype)
            own["m"].lerp_(gradient, 0.1)
            if self.way == "in place":
                own["v"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            elif self.way == "out of place":
                own["v"] = 0.999 * own["v"] + 0.001 * gradient**2
            elif self.way == "lerp":
                own["v"].lerp_(gradient**2, 0.001)
            else:
                wide = own["v"].float().mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
                if self.way == "rounded at random":
                    bits = wide.view(torch.int32)
                    bits += torch.randint_like(bits, 0, 2**16)
                    wide = (bits & -(2**16)).view(torch.float32)
                own["v"].copy_(wide)
            weight -= 1e-3 * own["m"] / (own["v"].sqrt() + 1e-8)


@pytest.mark.parametrize("way", ["in place", "out of place", "lerp", "widened"])
def test_a_state_of_any_name_that_cannot_decay_is_told(way):
    model = toys.make()
    found = toys.measure(model, OwnAdam(model.parameters(), way))
    assert [(row.name, row.format, row.decay) for row in found.states] == [("v", "bf16", pytest.approx(0.999))]
    assert toys.text(found).startswith("v in BF16 cannot hold its decay of 0.999: 100 % of its values stay as they are")


@pytest.mark.parametrize(("way", "dtype"), [("in place", torch.float32), ("rounded at random", BF16)])
def test_states_whose_mean_decays_are_not_told(way, dtype):
    model = toys.make()
    assert toys.measure(model, OwnAdam(model.parameters(), way, dtype)).lines == ()


def test_a_gradient_that_is_taken_away_after_each_pass_begins_again():
    weight = nn.Parameter(torch.zeros(2, dtype=BF16))
    sums = GradientSums([weight])
    for _ in range(3):
        (weight * 3.0).sum().backward()
        weight.grad = None
    assert sums.end() == []


@pytest.mark.parametrize(("dtype", "told"), [(BF16, True), (torch.float32, False)])
def test_a_sum_that_is_made_out_of_place_is_told(dtype, told):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        own = [torch.zeros_like(weight, dtype=dtype) for weight in model.parameters()]
        for _ in range(6):
            loss = model(torch.randn(16, 32)).square().mean()
            for number, gradient in enumerate(torch.autograd.grad(loss, list(model.parameters()))):
                own[number] = own[number] + gradient.to(dtype)
        for weight, gradient in zip(model.parameters(), own, strict=True):
            weight.grad = gradient.float()
        optimizer.step()

    found = fl.manifest(model, optimizer, step=step)
    assert ("gradients of 6 backward passes are added up in BF16" in toys.text(found)) is told


def test_what_is_computed_of_one_gradient_is_no_sum_of_several():
    model = nn.Linear(32, 8).to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.randn(16, 32, dtype=BF16)).float().square().mean().backward()
        for weight in model.parameters():
            noisy = weight.grad + 0.01 * weight.grad.detach()
            weight.grad = noisy + 0.01 * torch.randn_like(noisy)
        optimizer.step()

    assert fl.manifest(model, optimizer, step=step).sums == ()
