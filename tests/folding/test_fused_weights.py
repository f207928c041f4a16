"""Fused weights: gate and up, or queries, keys and values, in one matrix are scaled apart where they are read apart."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import floatline as fl
from floatline.folding.fused_weights import split_fused
from floatline.folding.recorded_graph import record_graph
from floatline.folding.rewriting import WeightRewrite, rewrite_model

WIDTH, INNER, LARGE = 16, 24, 2.0**17


class FusedGate(nn.Module):
    """One matrix for gate and up: by halves, by turns, or read as a whole."""

    def __init__(self, way: str, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.way = nn.RMSNorm(WIDTH, eps=1e-6), way
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=bias), nn.Linear(INNER, WIDTH, bias=False)

    def up_rows(self) -> list[int]:
        return list(range(1, 2 * INNER, 2)) if self.way == "turns" else list(range(INNER, 2 * INNER))

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(self.norm(x))
        if self.way == "whole":
            both = torch.tanh(both)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.way == "turns" else both.chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def planted(way: str, bias: bool = False) -> FusedGate:
    """A large product of gate and up, which the next matrix makes small again."""
    torch.manual_seed(0)
    model = FusedGate(way, bias).eval()
    with torch.no_grad():
        model.gate_up.weight[model.up_rows()] *= LARGE
        if bias:
            model.gate_up.bias[model.up_rows()] *= LARGE
        model.down.weight.mul_(1 / LARGE)
    return model


def inputs() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("way", ["halves", "turns"])
def test_up_is_scaled_and_gate_in_the_same_matrix_is_not(way, bias):
    model = planted(way, bias)
    fold = fl.fold(model, inputs())
    assert fold.verdict == "folded"
    assert fold.proof.fp16_before == float("inf")
    assert fold.proof.fp16_after < 0.005
    assert fold.proof.equal == fold.proof.trials
    (part,) = fold.rewrite.parts["gate_up.weight"]
    assert list(part.places) == model.up_rows()
    assert part.exponent < 0
    gate = [row for row in range(2 * INNER) if row not in model.up_rows()]
    assert torch.equal(fold.model.gate_up.weight[gate], model.gate_up.weight[gate])
    assert ("gate_up.bias" in fold.rewrite.parts) == bias


def test_what_is_read_as_a_whole_has_one_scale():
    fold = fl.fold(planted("whole"), inputs())
    assert not fold.rewrite.parts
    assert fold.verdict == "in the way"


class FusedAttention(nn.Module):
    """Queries, keys and values in one matrix: one after the other, or head by head."""

    def __init__(self, heads: int, by_head: bool) -> None:
        super().__init__()
        self.heads, self.by_head = heads, by_head
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(self.norm(x))
        if self.by_head:
            q, k, v = made.unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in made.chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("by_head", [False, True])
def test_values_in_a_fused_matrix_are_scaled_apart(by_head):
    torch.manual_seed(0)
    model = FusedAttention(2, by_head).eval()
    rows = torch.arange(3 * WIDTH)
    own = rows % (3 * WIDTH // 2) >= WIDTH if by_head else rows >= 2 * WIDTH
    with torch.no_grad():
        model.qkv.weight[own] *= LARGE
        model.qkv.bias[own] *= LARGE
        model.out.weight.mul_(1 / LARGE)
    fold = fl.fold(model, inputs())
    assert fold.verdict == "folded"
    assert fold.proof.equal == fold.proof.trials
    (part,) = fold.rewrite.parts["qkv.weight"]
    assert list(part.places) == rows[own].tolist()
    assert fold.proof.fp16_after < 0.005 < fold.proof.fp16_before


def test_a_matrix_that_is_used_twice_is_parted_only_as_both_uses_allow():
    class Twice(FusedGate):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.tanh(self.gate_up(x)).sum(-1, keepdim=True)

    torch.manual_seed(0)
    model = Twice("halves").eval()
    graph = record_graph(model, lambda one: one(inputs()), inputs())
    split = split_fused(graph, model)
    parts = [node.part for node in split.nodes if node.part is not None]
    assert len(parts) == 2
    with torch.no_grad():
        model.gate_up.weight[model.up_rows()] *= LARGE
        model.down.weight.mul_(1 / LARGE)
    assert fl.fold(model, inputs()).verdict == "in the way"  # tanh asks for both as they are


def test_a_part_that_is_forgotten_is_not_proven():
    model = planted("halves")
    fold = fl.fold(model, inputs())
    wrong = planted("halves")
    rewrite_model(wrong, WeightRewrite(fold.rewrite.weights, {}, fold.rewrite.eps, {}))
    assert not torch.equal(wrong(inputs()), model(inputs()))
    assert torch.equal(fold.model(inputs()), model(inputs()))
