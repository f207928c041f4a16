"""Buffers that cannot be copied into like others: sparse, nested, quantized, expanded, or of another shape later."""

import math

import pytest
import torch
from torch import nn

import floatline as fl
from floatline.guard.step.buffer_blocks import ClonedBufferBlock, TorchBufferBlock, is_plain, make_blocks


def in_inference_mode():
    with torch.inference_mode():
        return torch.ones(4)


def quantized(value):
    return torch.quantize_per_tensor(torch.full((4,), value), 0.1, 0, torch.qint8)


MAKERS = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: quantized(1.0),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "expanded": lambda: torch.ones(1).expand(4),
    "conjugated": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
    "on meta": lambda: torch.ones(4, device="meta"),
}
OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}
MOVES = {
    "coo": lambda buffer: buffer._values().mul_(2),
    "csr": lambda buffer: buffer.values().mul_(2),
    "quantized": lambda buffer: buffer.copy_(quantized(float(buffer.dequantize()[0]) + 1)),
    "nested": lambda buffer: buffer.mul_(2),
    "jagged": lambda buffer: buffer.mul_(2),
    "expanded": lambda buffer: buffer[:1].mul_(2),
    "resized": lambda buffer: buffer.resize_(len(buffer) + 1).fill_(7),
    "given less": lambda buffer: setattr(buffer, "data", torch.zeros(len(buffer) - 1)),
    "given another dtype": lambda buffer: setattr(buffer, "data", (buffer.data * 2).to(OTHER[buffer.dtype])),
}


class Holder(nn.Module):
    """A buffer beside a norm's, moved in each step."""

    def __init__(self, make, move=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("own", make())
        self.move = move

    def forward(self, x):
        if self.move is not None:
            self.move(self.own)
        return self.body(x)


def values_of(model):
    own = model.own
    if own.layout == torch.sparse_coo:
        own = own.coalesce()
        own = torch.cat([own.indices().flatten(), own.values()])
    elif own.layout == torch.sparse_csr:
        own = own.to_dense()
    elif own.is_nested:
        own = torch.cat([part.flatten() for part in own.unbind()])
    elif own.is_quantized:
        own = own.int_repr()
    shown = [own.dtype, tuple(own.shape), None if own.is_meta else own.resolve_conj().resolve_neg().tolist()]
    rest = [t.tolist() for t in model.body.state_dict().values()]
    return repr([shown, rest])


def make(kind, move=None, **options):
    torch.manual_seed(0)
    model = Holder(kind, move)
    return model, fl.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), plan="fp32", **options)


def take(guard, model, number, *, bad=False):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)) * (math.nan if bad else 1.0)
    return guard.step(lambda x: model(x).square().mean(), x)


def check_skips(kind, move, bad):
    model, guard = make(kind, move)
    for number in range(6):
        before = values_of(model)
        assert take(guard, model, number, bad=number == bad).applied is (number != bad)
        assert (values_of(model) == before) is (number == bad)


@pytest.mark.parametrize("bad", [0, 1, 4])
@pytest.mark.parametrize("kind", [*MAKERS, "of inference mode"])
def test_a_buffer_of_any_kind_stays_in_healthy_and_in_skipped_steps(kind, bad):
    maker = {**MAKERS, "of inference mode": in_inference_mode}[kind]
    check_skips(maker, None, bad)


@pytest.mark.parametrize("bad", [0, 1, 4])
@pytest.mark.parametrize("kind", MOVES)
def test_a_buffer_of_any_kind_that_moves_goes_back(kind, bad):
    check_skips(MAKERS.get(kind, lambda: torch.ones(16)), MOVES[kind], bad)


@pytest.mark.parametrize("kind", MOVES)
def test_without_a_look_for_misfits_it_would_not(kind, monkeypatch):
    for block in (ClonedBufferBlock, TorchBufferBlock):
        monkeypatch.setattr(block, "misfits", lambda self: [])
    with pytest.raises((AssertionError, RuntimeError)):
        check_skips(MAKERS.get(kind, lambda: torch.ones(16)), MOVES[kind], 4)


def test_only_what_is_not_plain_is_cloned():
    plain = [torch.ones(4), torch.ones(4, 4).T, torch.ones(4)[::2], torch.ones(1).expand(1, 1), torch.ones(0)]
    assert all(map(is_plain, plain))
    assert not any(is_plain(maker()) for maker in MAKERS.values())
    blocks = make_blocks([*plain, MAKERS["coo"]()], fused_for=lambda device: None)
    assert [type(block) for block in blocks] == [TorchBufferBlock, ClonedBufferBlock]


@pytest.mark.parametrize("kind", ["coo", "csr", "expanded"])
def test_a_checkpoint_and_a_snapshot_hold_it(kind, tmp_path):
    model, guard = make(MAKERS[kind], policy="safe")
    for number in range(25):  # snapshots among them
        take(guard, model, number)
    guard.save(tmp_path)
    before = values_of(model)
    MOVES[kind](model.own)
    assert values_of(model) != before
    guard.load(tmp_path)
    assert values_of(model) == before


def test_a_checkpoint_leaves_out_a_buffer_that_has_no_values(tmp_path):
    model, guard = make(MAKERS["on meta"], policy="safe")
    for number in range(25):
        take(guard, model, number)
    guard.save(tmp_path)
    guard.load(tmp_path)
