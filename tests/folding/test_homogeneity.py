"""Homogeneity: what can be scaled in a forward pass, and what asks for its argument as it is."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from floatline.folding.exponents import Exponents
from floatline.folding.homogeneity import relate
from floatline.folding.recorded_graph import find_largest, mark_sixteen, record_graph
from floatline.folding.rewriting import plan_rewrite, rewrite_model


class Function(nn.Module):
    """Applies a function between two matrices."""

    def __init__(self, function, **attributes) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.gain = nn.Parameter(torch.rand(6) + 0.5)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def powers(function, *, step=1, **attributes) -> dict[str, int]:
    """Exponents of weights and epsilons where the first matrix is multiplied by 2^step; nothing where it cannot be."""
    torch.manual_seed(0)
    model, x = Function(function, **attributes).eval(), torch.randn(4, 6)
    graph = record_graph(model, lambda one: one(x), (x,))
    exponents = Exponents(
        relate(graph),
        may_follow=lambda one: not isinstance(one, int) or graph.nodes[one].of_weights,
        size=lambda one: graph.nodes[one].largest if isinstance(one, int) else 0.0,
    )
    first = next(number for number, node in enumerate(graph.nodes) if node.name == "first.weight")
    for root, members in exponents.groups().items():
        if first in members:
            found = exponents.assign({root: step / members[first]})
            scaled = copy.deepcopy(model)
            rewrite_model(scaled, plan_rewrite(graph, {one: int(power) for one, power in found.items()}, {}))
            assert torch.allclose(scaled(x), model(x), rtol=1e-6, atol=0)
            names = {one: graph.nodes[one].name if isinstance(one, int) else str(one[-1]) for one in found}
            kinds = {one: isinstance(one, int) and graph.nodes[one].kind == "made" for one in found}
            return {names[one]: int(power) for one, power in found.items() if not kinds[one]}
    return {}


def divide_by_deviation(model, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.eps)


SCALED = {
    "relu": lambda _, x: functional.relu(x),
    "views": lambda _, x: torch.cat([x[:2], x[2:].flip(0)]).unflatten(-1, (2, 3)).transpose(-1, -2).reshape(4, 6),
    "sum of itself": lambda _, x: x + 0.5 * x.abs() - x.cumsum(0),
    "in place": lambda _, x: torch.zeros_like(x).index_add_(0, torch.arange(4), x).mul_(3.0),
    "where": lambda _, x: torch.where(x > 0, x, torch.zeros_like(x)).masked_fill(x < 0, 0.0),
    "norm times direction": lambda _, x: x * (x / x.norm(dim=-1, keepdim=True)),
    "a product with a constant": lambda _, x: (
        torch.addmm(torch.ones(6), x, torch.ones(6, 6).tril(), beta=0).sort(-1).values
    ),
    "pooling": lambda _, x: functional.max_pool2d(x[None, None], 3, 1, 1)[0, 0],
    "upsampling": lambda _, x: functional.interpolate(x[None], scale_factor=2.0)[0, :, ::2],
    "scattered zeros": lambda _, x: x.scatter(1, torch.zeros(4, 1, dtype=torch.int64), 0.0),
    "square root of a square": lambda _, x: x.square().sum(-1, keepdim=True).sqrt() * torch.ones(6),
}
KEPT = {
    "silu": lambda _, x: functional.silu(x),
    "softmax": lambda _, x: x.softmax(-1),
    "tanh": lambda _, x: torch.tanh(x / 30.0) * 30.0,
    "a constant added": lambda _, x: x + 1.0,
    "a tensor added": lambda _, x: x + torch.ones(6),
    "whole numbers added": lambda _, x: x + torch.arange(6),
    "a threshold": lambda _, x: torch.where(x > 0.5, x, -x),
    "a clamp": lambda _, x: x.clamp(-1.0, 1.0),
    "a number taken out": lambda _, x: x * x.mean().item(),
    "scattered ones": lambda _, x: x.scatter(1, torch.zeros(4, 1, dtype=torch.int64), 1.0),
    "a sign times a constant": lambda _, x: x * 0 + x.sign() * x.abs().clamp(min=0.1),
    "rounding": lambda _, x: x.round(),
    "an exponential": lambda _, x: x.exp(),
    "an unknown power": lambda _, x: x.abs().pow(0.3),
}


@pytest.mark.parametrize("name", SCALED)
def test_what_follows_the_scale_is_undone_by_the_next_matrix(name):
    assert powers(SCALED[name]) == {"first.weight": 1, "last.weight": -1}


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_follow_keeps_the_matrix_as_it_is(name):
    assert powers(KEPT[name]) == {}


def test_a_matrix_that_is_used_twice_takes_half():
    powers_of_four = powers(lambda model, x: functional.linear(x, model.last.weight), step=2)
    assert powers_of_four == {"first.weight": 2, "last.weight": -1}


def test_a_sign_hides_the_scale():
    assert powers(lambda _, x: x.sign()) == {"first.weight": 1}


def test_a_square_is_undone_twice():
    assert powers(lambda _, x: functional.relu(x).pow(2)) == {"first.weight": 1, "last.weight": -2}


def test_a_norm_hides_the_scale_and_its_epsilon_follows():
    assert powers(divide_by_deviation, eps=1e-5) == {"first.weight": 1, "eps": 2}


def test_an_epsilon_that_no_attribute_holds_keeps_the_matrix_as_it_is():
    assert powers(lambda _, x: x / (x.norm() + 1e-5)) == {}


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.RMSNorm(6), nn.RMSNorm(6, eps=1e-6), nn.GroupNorm(2, 6)])
def test_norms_of_torch_hide_the_scale(norm):
    assert powers(lambda model, x: model.norm(x), norm=norm)["first.weight"] == 1


def test_a_gain_that_is_added_to_one_is_known_as_such():
    found = powers(lambda model, x: x.relu() * (1.0 + model.gain))
    assert found == {"first.weight": 1, "1.0": -1}


def test_attention_divides_what_queries_lose_among_keys():
    def attend(_, x):
        return functional.scaled_dot_product_attention(x[None, None], x[None, None] * 2, torch.ones(1, 1, 4, 6))[0, 0]

    assert powers(attend) == {}  # one matrix is both here


def test_values_are_marked_by_the_format_that_they_have_where_the_model_is_in_16_bits():
    model, x = Function(lambda _, x: (x.float().pow(2) + 1).to(x.dtype)).eval(), torch.randn(4, 6)
    graph = record_graph(model, lambda one: one(x), (x,))
    narrow = Function(model.function).bfloat16().eval()
    mark_sixteen(graph, record_graph(narrow, lambda one: one(x.bfloat16()), (x,)))
    squared = next(call.results[0].node for call in graph.calls if call.name == "pow")
    product = next(call.results[0].node for call in graph.calls if call.name == "mm")
    assert graph.nodes[product].sixteen
    assert not graph.nodes[squared].sixteen


def test_what_fills_masks_is_no_value_of_the_network():
    assert find_largest(torch.tensor([3.0, -torch.inf, torch.finfo(torch.float32).min])) == 3.0
    assert find_largest(torch.tensor([-5.0, 4.0])) == 5.0
    assert find_largest(torch.tensor([])) == 0.0
