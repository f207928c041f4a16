"""Model fit: as it is, after folding, with an island, or not; each verdict from a run."""

from dataclasses import replace

import torch
from tests.folding.networks import Network, draw_tokens
from tests.folding.test_scale_fold import Gated
from tests.slow import slow
from torch import nn

from floatline.folding.choice import Obstacle
from floatline.folding.model_fit import find_island, fit_model


class Bent(nn.Module):
    """A channel that is too large between a product and a GELU, which no scale passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        with torch.no_grad():
            self.up.weight[3] *= 1e6
            self.down.weight[:, 3] *= 1e-6

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """A layer that a fold cannot help, between two that need nothing."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.first, self.mlp, self.last = nn.Linear(16, 16), mlp, nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.mlp(self.first(x)))


@slow
def test_a_network_that_needs_a_fold_says_by_how_much():
    found = fit_model(Network(1), draw_tokens())
    assert (found.verdict, found.exponent, found.island) == ("after folding", -3, ())
    assert found.fp16 < found.bf16


@slow
def test_a_network_that_needs_nothing_fits_as_it_is():
    model = Network(1)
    with torch.no_grad():
        model.embedding.weight[1, 2] = 1.0
    found = fit_model(model, draw_tokens())
    assert (found.verdict, found.exponent) == ("as it is", 0)


def test_what_no_fold_helps_computes_in_fp32_and_that_is_tried():
    found = fit_model(Stack(Bent()).eval(), torch.randn(5, 16))
    assert (found.verdict, found.island) == ("with an island", ("mlp",))
    assert found.fold.proof.fp16_after == float("inf")
    assert found.fp16 < found.bf16


def test_a_whole_model_is_no_island():
    assert fit_model(Bent().eval(), torch.randn(5, 16)).verdict == "does not fit"


def test_gate_and_up_in_one_matrix_are_folded_apart():
    found = fit_model(Stack(Gated(fused=True)).eval(), torch.randn(5, 16))
    assert (found.verdict, found.island) == ("after folding", ())


@slow
def test_fp16_that_is_farther_off_than_bf16_does_not_fit():
    found = fit_model(Network(1), draw_tokens())
    assert replace(found, fp16=2 * found.bf16).verdict == "does not fit"
    assert replace(found, fp16=float("nan")).verdict == "does not fit"


def test_an_island_holds_makers_and_readers_and_none_lies_in_another():
    def obstacle(*modules):
        return Obstacle("", 1e5, "", modules)

    assert find_island([obstacle("layers.3.mlp.act", "layers.3.mlp.up")]) == ("layers.3.mlp",)
    assert find_island([obstacle("a.b", "a.b.c"), obstacle("a.b.c.d"), obstacle("e")]) == ("a.b", "e")
    assert find_island([obstacle("a", "b"), obstacle("a.c")]) == ("",)
    assert find_island([]) == ()
