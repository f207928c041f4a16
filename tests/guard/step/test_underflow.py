"""The share of gradient elements lost to zero: estimate against truth."""

import functools
import math

import pytest
import torch
from torch import nn

from floatline.guard.policy import DEFAULT
from floatline.guard.step import layers
from floatline.guard.step.layers import SMALLEST_FP16, count_near_zero, lost_share, report
from floatline.numerics.half_on_cpu import HalfOnCPU

N = 1_000_000


@functools.lru_cache(maxsize=16)
def magnitudes(kind):
    generator = torch.Generator().manual_seed(1)

    def normal():
        return torch.randn(N, generator=generator, dtype=torch.float64)

    def uniform():
        return torch.rand(N, generator=generator, dtype=torch.float64).clamp_min(1e-300)

    name, _, number = kind.partition(" ")
    return {
        "normal": normal,
        "laplace": lambda: -uniform().log(),
        "student": lambda: normal() / (-uniform().log()).sqrt(),
        "product": lambda: math.prod((normal() for _ in range(int(number) - 1)), start=normal()),
        "lognormal": lambda: (normal() * float(number)).exp(),
        "loguniform": lambda: (-uniform() * float(number)).exp(),
    }[name]()


def sink(gradient, share):
    """The gradient as FP16 makes it, at the scale at which that share of its non-zero elements is lost."""
    live = gradient.abs()[gradient != 0].double()
    edge = live.kthvalue(max(1, round(share * live.numel()))).values
    return (gradient.double() / edge * (0.5 * SMALLEST_FP16)).float().half()


def estimate(half, *, other_zeros=0):
    """Estimated number of lost elements, with more zeros of another kind mixed in."""
    zeros, ones, low = count_near_zero([half])[0].tolist()
    size = half.numel() + other_zeros
    return lost_share([zeros + other_zeros], [ones], [low], [size])[0] * size


def error(kind, share, *, other_zeros):
    gradient = magnitudes(kind)
    half = sink(gradient, share)
    truth = int(((half == 0) & (gradient != 0)).sum())
    assert truth / N == pytest.approx(share, rel=0.02)
    return estimate(half, other_zeros=other_zeros) / truth


BOUNDS = {
    "normal": (0.65, 1.05),
    "laplace": (0.90, 1.15),
    "student": (0.85, 1.15),
    "product 2": (0.95, 1.15),
    "product 3": (0.95, 1.15),
    "lognormal 1": (2.5, 3.1),
    "lognormal 2": (1.4, 1.9),
    "lognormal 3": (1.25, 1.75),
    "lognormal 5": (1.1, 1.7),
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_the_estimate_is_as_near_the_truth_as_it_says(kind):
    low, high = BOUNDS[kind]
    for share in (0.003, 0.01, 0.03, 0.15):
        assert low <= error(kind, share, other_zeros=10 * N) <= high, share


def test_the_share_of_zeros_would_be_far_off():
    half = sink(magnitudes("normal"), 0.01)
    assert (int((half == 0).sum()) + 10 * N) / (0.01 * N) > 1000


@pytest.mark.parametrize("kind", [*BOUNDS, "loguniform 10", "loguniform 20"])
@pytest.mark.parametrize("share", [0.01, 0.6])
def test_without_other_zeros_it_never_says_too_much(kind, share):
    assert 0.65 <= error(kind, share, other_zeros=0) <= 1.0


def test_a_sharp_edge_below_is_its_worst_case():
    assert 100 < error("loguniform 10", 0.003, other_zeros=10 * N) < 500


def test_where_most_of_the_tensor_is_at_the_bottom_all_zeros_count():
    assert error("normal", 0.3, other_zeros=2 * N) == pytest.approx(2.3 / 0.3, rel=0.01)
    assert error("loguniform 20", 0.9, other_zeros=0) == 1.0


def test_zeros_without_neighbours_have_another_reason():
    assert lost_share([900], [0], [0], [1000]) == [0.0]
    dead = torch.zeros(1000).half()
    dead[:100] = 1.0
    assert estimate(dead) == 0.0


def test_one_small_element_does_not_make_a_million_zeros_lost():
    lost = lost_share([1_000_000], [1], [0], [1_002_000])[0] * 1_002_000
    assert lost < 10


def test_no_zeros_no_loss_and_an_empty_tensor_is_fine():
    assert lost_share([0, 0], [50, 0], [70, 0], [1000, 0]) == [0.0, 0.0]


def gradients(kind):
    torch.manual_seed(0)
    if kind == "mlp":
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        loss = nn.functional.cross_entropy(model(torch.randn(64, 64)), torch.randint(0, 10, (64,)))
    elif kind == "embedding":
        model = nn.Sequential(nn.Embedding(5000, 32), nn.Linear(32, 5000))
        tokens = (torch.rand(2048) ** 3 * 5000).long()
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
    else:
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Embedding(500, 64), layer, nn.Linear(64, 500))
        tokens = torch.randint(0, 200, (8, 64))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad.numel() >= 1000]


@pytest.mark.parametrize("kind", ["mlp", "embedding", "attention"])
def test_it_holds_for_gradients_of_models(kind):
    for gradient in gradients(kind):
        for share in (0.03, 0.1):
            half = sink(gradient, share)
            truth = int(((half == 0) & (gradient != 0)).sum())
            assert 0.5 <= estimate(half) / truth <= 1.9


def test_rows_of_an_embedding_that_were_not_used_are_not_lost():
    table = gradients("embedding")[0]
    half = sink(table, 0.01)
    assert float((half == 0).float().mean()) > 0.7
    assert estimate(half) / half.numel() < 0.005


def fp16_backward(scale):
    """Gradients of one pass in FP16, which of them are lost, and their report."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    params = dict(model.named_parameters())
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    true = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(params.values()))
    with HalfOnCPU():
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y) * scale
        found = torch.autograd.grad(loss, list(params.values()))
    sizes = [grad.numel() for grad in found]
    lost = sum(int(((f == 0) & (t != 0)).sum()) for f, t in zip(found, true, strict=True))
    return lost / sum(sizes), report(list(params), count_near_zero(found), sizes, policy=DEFAULT)


@pytest.mark.parametrize(("scale", "level"), [(2.0**-9, "fine"), (2.0**-12, "warn"), (2.0**-14, "act")])
def test_it_holds_for_a_backward_pass_in_fp16(scale, level):
    truth, found = fp16_backward(scale)
    assert 0.75 <= found.share / truth <= 1.05
    assert found.level == level
    assert not found.silent


def test_layers_that_got_no_gradient_at_all_are_named_because_the_share_cannot_see_them():
    truth, found = fp16_backward(2.0**-16)
    assert truth > 0.8
    assert found.share < 0.01
    assert found.silent == ("0.weight", "0.bias")
    assert found.level == "warn"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_every_neighbour_of_zero_is_counted_in_its_place(dtype):
    units = torch.tensor([0.0, -0.0, 1, -1, 1, 2, -3, 4, 5, 1000, math.inf, math.nan])
    assert count_near_zero([(units * SMALLEST_FP16).to(dtype)]).tolist() == [[2, 3, 2]]


def test_averaged_gradients_are_counted_in_smaller_units():
    units = torch.tensor([0.0, 1, 2, 3, 4]) / 8
    assert count_near_zero([units * SMALLEST_FP16], smallest=SMALLEST_FP16 / 8).tolist() == [[1, 1, 2]]
    assert count_near_zero([units * SMALLEST_FP16]).tolist() == [[1, 0, 0]]


def test_gradients_made_in_fp32_have_lost_nothing(monkeypatch):
    torch.manual_seed(0)
    made_in_fp32 = torch.randn(5000) * 20 * SMALLEST_FP16
    made_in_fp32[:2500] = 0  # rows that were not used
    sizes = [5000, 5000]
    counts = count_near_zero([made_in_fp32, made_in_fp32.half()])
    assert counts[0].tolist() == [2500, 0, 0]
    shares = lost_share(*counts.T.tolist(), sizes)
    assert shares[0] == 0
    assert shares[1] > 0.005
    monkeypatch.setattr(layers, "_CHUNK", 1000)
    assert torch.equal(count_near_zero([made_in_fp32, made_in_fp32.half()]), counts)


def test_sums_of_fp16_gradients_still_count_as_made_by_fp16():
    torch.manual_seed(0)
    parts = [(torch.randn(5000) * 30 * SMALLEST_FP16).half().float() for _ in range(4)]
    assert count_near_zero([sum(parts)])[0, 1] > 0


def test_many_tensors_are_counted_in_pieces(monkeypatch):
    monkeypatch.setattr(layers, "_CHUNK", 100)
    torch.manual_seed(0)
    sizes = [(7,), (250,), (0,), (30, 9), (1,), (60,), (100,), (3,)]
    dtypes = [torch.float16, torch.float32, torch.float16, torch.float16, torch.bfloat16, *[torch.float16] * 3]
    grads = [(torch.randint(-5, 6, s) * SMALLEST_FP16).to(d) for s, d in zip(sizes, dtypes, strict=True)]
    grads[3] = grads[3].t()
    assert all(sum(p.numel() for _, p in part) <= 100 for part in layers._cut(grads))
    units = [(grad.float() / SMALLEST_FP16).abs() for grad in grads]
    expected = [[int((x == 0).sum()), int((x == 1).sum()), int(((x == 2) | (x == 3)).sum())] for x in units]
    counts = count_near_zero(grads)
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected


def test_no_gradients_are_no_rows():
    assert count_near_zero([]).shape == (0, 3)
    assert report([], count_near_zero([]), [], policy=DEFAULT).share == 0.0


def test_the_report_names_the_worst_layers_first_and_the_silent_ones():
    counts = torch.tensor([[10, 20, 40], [300, 100, 100], [500, 0, 0], [0, 0, 0]])
    lost = report(["a", "b", "c", "d"], counts, [1000, 1000, 500, 1000], policy=DEFAULT)
    assert [name for name, _ in lost.layers] == ["b"]
    assert lost.silent == ("c",)
    assert lost.share == pytest.approx(sum(lost_share([10, 300], [20, 100], [40, 100], [1000, 1000])) / 3.5)
