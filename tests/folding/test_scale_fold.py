"""fold: what it scales, what it says stands in the way, and what it leaves alone."""

import math

import pytest
import torch
from safetensors.torch import load_model
from tests.folding.networks import Network, WrittenOutNorm, draw_tokens
from tests.slow import slow
from torch import nn
from torch.nn import functional

import floatline as fl
from floatline.errors import FoldError


class Gated(nn.Module):
    """A gated MLP whose product of gate and up is too large at one channel."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused = fused
        self.gate_up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(32, 16, bias=False)
        self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        with torch.no_grad():
            self.up.weight[3] *= 1e6
            self.gate_up.weight[35] *= 1e6
            self.down.weight[:, 3] *= 1e-6

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(functional.silu(gate) * up)


class PostNorm(nn.Module):
    """A stream that each norm writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.inner, self.second, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        with torch.no_grad():
            self.norm.weight[3] = 1e5
            self.inner.weight[:, 3] = self.head.weight[:, 3] = 0.0

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        return self.head(self.second(x + torch.tanh(self.inner(x))) if self.training else self.inner(x))


def test_a_model_that_fits_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 2))
    result = fl.fold(model, torch.randn(3, 8))
    assert (result.verdict, result.groups, bool(result.rewrite)) == ("as it is", (), False)
    assert result.proof.fp16_before == result.proof.fp16_after


def test_the_given_model_is_not_changed():
    model = Network(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fl.fold(model, draw_tokens()).verdict == "folded"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_up_is_scaled_and_down_undoes_it():
    result = fl.fold(Gated(), torch.randn(5, 16))
    assert result.rewrite.weights.keys() == {"up.weight", "down.weight"}
    assert result.rewrite.weights["up.weight"] == -result.rewrite.weights["down.weight"] < 0
    assert result.verdict == "folded"
    assert math.isfinite(result.proof.fp16_after)


def test_a_layer_that_is_used_twice_is_scaled_in_whole_powers():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.layer = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.first.weight.data *= 1e5
            self.layer.weight.data *= 1e-2

        def forward(self, x):
            return self.layer(functional.relu(self.layer(functional.relu(self.first(x)))))

    result = fl.fold(Twice(), torch.randn(4, 8))
    weights = result.rewrite.weights
    assert result.verdict == "folded"
    assert weights["first.weight"] == -2 * weights["layer.weight"] < 0


class Constant(nn.Module):
    """A norm whose epsilon is written into its code."""

    def __init__(self, norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.embedding, self.head = norm, nn.Embedding(20, 16), nn.Linear(16, 4)
        self.embedding.weight.data[1, 3] = 1e5

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (
            lambda x: functional.layer_norm(x, (16,), eps=1e-5),
            "native_layer_norm in the model itself has an epsilon of 1e-05 that no attribute of the module holds",
        ),
        (lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6), "add in the model itself adds 1e-06"),
    ],
)
def test_an_epsilon_that_is_written_into_the_code_stands_in_the_way(norm, why):
    result = fl.fold(Constant(norm).eval(), draw_tokens())
    assert {obstacle.why for obstacle in result.obstacles} == {why}


def test_queries_are_scaled_against_keys():
    model = Network(1)
    with torch.no_grad():
        model.embedding.weight[1, 2] = 1.0
        attention = model.layers[0].attention
        attention.query.weight *= 2.0**17
        attention.key.weight *= 2.0**-17
        for bias in (attention.query.bias, attention.key.bias):
            bias.zero_() if bias is not None else None
    result = fl.fold(model, draw_tokens())
    assert result.verdict == "folded"
    query, key = (result.rewrite.weights[f"layers.0.attention.{name}.weight"] for name in ("query", "key"))
    assert query == -key < 0
    assert result.proof.equal == result.proof.trials


def test_gate_and_up_in_one_matrix_are_scaled_apart():
    result = fl.fold(Gated(fused=True), torch.randn(5, 16))
    assert result.verdict == "folded"
    assert result.rewrite.parts
    assert result.proof.equal == result.proof.trials


def test_a_post_norm_stream_is_scaled_by_its_norms():
    result = fl.fold(PostNorm().eval(), draw_tokens())
    assert result.verdict == "folded"
    assert result.rewrite.weights["norm.weight"] == result.rewrite.weights["norm.bias"] < 0


def test_a_stream_that_a_function_writes_says_which():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[2] *= 1e6
    result = fl.fold(model, torch.randn(3, 8))
    assert result.verdict == "in the way"
    assert {obstacle.why for obstacle in result.obstacles} == {"gelu in 1"}
    assert {"0", "1", "2"} == {module for obstacle in result.obstacles for module in obstacle.modules}


def test_weights_that_are_added_to_one_are_rounded_once_and_kept_in_fp32_where_fp16_would_spoil_them():
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.first = nn.Embedding(20, 16), nn.Linear(16, 16, bias=False)
            self.post, self.norm, self.head = WrittenOutNorm(16, 1.0), WrittenOutNorm(16, 1.0), nn.Linear(16, 4)
            with torch.no_grad():
                self.post.weight.copy_(0.1 * torch.randn(16))
                self.embedding.weight[1, 3] = 4e6

        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.head(self.norm(x + self.post(self.first(x))))

    result = fl.fold(Written().eval(), draw_tokens())
    assert (result.verdict, result.fp32) == ("folded", ("post.weight",))
    assert result.rewrite.shifted == {"post.weight": (1.0, -8)}
    assert 0 < result.proof.difference <= result.proof.tolerance
    assert result.proof.fp16_after < result.proof.bf16


@slow
def test_the_exponent_leaves_the_margin():
    powers = {
        margin: fl.fold(Network(1), draw_tokens(), margin=margin).groups[0].exponent for margin in (1.0, 4.0, 64.0)
    }
    assert powers == {1.0: -1, 4.0: -3, 64.0: -7}


@slow
def test_a_head_that_is_the_embedding_is_undone_by_the_last_norm():
    seed = next(seed for seed in range(20) if Network(seed).tied and not hasattr(Network(seed).norm, "added"))
    weights = fl.fold(Network(seed), draw_tokens()).rewrite.weights
    assert weights["norm.weight"] == -weights["embedding.weight"] == 3


class Tied(nn.Module):
    """A head that is the embedding, behind a norm without a gain that could undo the scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16, elementwise_affine=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.embedding.weight[:, 3] = 1e5

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        return self.head(x - x[..., 3:4] * functional.one_hot(torch.tensor(3), 16))


def test_a_head_that_is_the_embedding_behind_a_norm_without_a_gain_stands_in_the_way():
    result = fl.fold(Tied().eval(), draw_tokens())
    assert result.verdict == "in the way"
    (obstacle,) = [one for one in result.obstacles if one.place == "embedding.weight"]
    assert obstacle.why == (
        "mm in head must give what it gave; it is used in several places, and untying gives each its own"
    )
    untied = fl.fold(Tied().eval(), draw_tokens(), untie=True)
    assert untied.rewrite.weights == {"embedding.weight": -3}
    assert {one.place for one in untied.obstacles} == {"head.weight"}  # a copy is as large, and now alone


def test_saved_weights_give_the_folded_model_back(tmp_path):
    model = Network(1)
    result = fl.fold(model, draw_tokens())
    result.save(tmp_path / "folded.safetensors")
    again = Network(1)
    load_model(again, tmp_path / "folded.safetensors")
    for (module, name), power in result.rewrite.eps.items():
        owner = again.get_submodule(module)
        setattr(owner, name, (getattr(owner, name) or 2.0**-23) * 2.0**power)
    assert torch.equal(again(draw_tokens()), model(draw_tokens()))


def test_wrong_use_gets_one_line():
    with pytest.raises(FoldError, match=r"margin is 0.5: .* Give 1 or more."):
        fl.fold(nn.Linear(2, 2), torch.ones(1, 2), margin=0.5)
    with pytest.raises(FoldError, match="does not run in FP32 on these inputs: RuntimeError"):
        fl.fold(nn.Linear(2, 2), torch.ones(1, 3))
    with pytest.raises(FoldError, match="gives no tensor of real numbers"):
        fl.fold(nn.Identity(), torch.ones(3, dtype=torch.int64))


def test_a_model_is_folded_where_new_tensors_lie_on_another_device():
    model, inputs = Gated(), torch.randn(4, 16)
    with torch.device("meta"):
        assert fl.fold(model, inputs).verdict == "folded"
