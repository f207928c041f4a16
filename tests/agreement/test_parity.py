"""parity: equal computations are within rounding; planted differences are named, at their place and on their side."""

import pytest
import torch
import torch.nn.functional as F
from tests.agreement.models import make_decoder, make_ids
from tests.slow import mostly_slow, slow
from torch import nn

import floatline as fl
from floatline.errors import ParityError


def compare(*args, **kwargs):
    with fl.HalfOnCPU():
        return fl.parity(*args, **kwargs)


OUT = {"kind": "written out"}
# What B has in its second block, what A has there, the module that must be named, and the verdict.
PLANTED = {
    "wrong mask row": ({"kind": "wrong row"}, OUT, "blocks.1.attention", "other-function"),
    "wrong mask row, against a kernel": ({"kind": "wrong row"}, {}, "blocks.1.attention", "other-function"),
    "missing causal element": ({"kind": "missing element"}, {}, "blocks.1.attention", "other-function"),
    "another eps": ({"eps": 1e-6}, {}, "blocks.1.norm1", "other-function"),
    "stale scale": ({"factor": 0.55}, {}, "blocks.1.feed.scale", "other-function"),
    "truncated accumulation": ({"truncated": True}, {}, "blocks.1.feed", "farther"),
}


@slow
@pytest.mark.parametrize("name", mostly_slow(PLANTED, every=3))
def test_a_planted_difference_is_named_at_its_module_and_is_bs(name):
    theirs, ours, module, verdict = PLANTED[name]
    found = compare(make_decoder({}, ours), make_decoder({}, theirs), make_ids())
    assert (found.verdict, found.side, found.entry.module) == (verdict, "B", module), found


@slow
@pytest.mark.parametrize("name", ["truncated accumulation"])
def test_the_side_is_as_given(name):
    theirs, ours, module, verdict = PLANTED[name]
    found = compare(make_decoder({}, theirs), make_decoder({}, ours), make_ids())
    assert (found.verdict, found.side, found.entry.module) == (verdict, "A", module), found


EQUAL = {
    "the same": (make_decoder(), make_decoder()),
    "a kernel and attention written out": (make_decoder(), make_decoder(OUT, OUT)),
    "FP32 and BF16": (make_decoder(dtype=torch.float32), make_decoder()),
    "FP32 and FP16": (make_decoder(dtype=torch.float32), make_decoder(dtype=torch.float16)),
    "FP32, written in two ways": (make_decoder(dtype=torch.float32), make_decoder(OUT, OUT, dtype=torch.float32)),
}


@slow
@pytest.mark.parametrize("name", mostly_slow(EQUAL, every=4))
def test_equal_computations_are_within_rounding(name):
    found = compare(*EQUAL[name], make_ids())
    assert (found.verdict, found.side, found.entry) == ("agree", "", None), found
    assert "both within rounding; nothing is wrong" in found.summary


def test_the_operation_is_named_with_its_line_and_its_numbers():
    def right(x):
        return F.layer_norm(x, (16,), eps=1e-5).tanh()

    def wrong(x):
        y = F.layer_norm(x, (16,), eps=1e-3)
        return y.tanh()

    found = fl.parity(right, wrong, torch.randn(4, 16))
    assert found.entry.op.op == "aten.native_layer_norm"
    assert found.entry.op.line == wrong.__code__.co_firstlineno + 1
    assert "1e-05 in A and 0.001 in B" in found.entry.op.seen


@slow
def test_a_sum_in_bf16_is_named_by_its_line_and_by_how_much_farther_it_is():
    def once(x, w):
        return x @ w

    def in_parts(x, w):
        total = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
        for start in range(0, x.shape[1], 4):
            total = total + x[:, start : start + 4] @ w[start : start + 4]
        return total

    torch.manual_seed(0)
    batch = torch.randn(8, 256).bfloat16(), torch.randn(256, 16).bfloat16()
    found = compare(once, in_parts, batch)
    assert (found.verdict, found.side) == ("farther", "B")
    assert found.worst.b > 4 * found.worst.a
    assert found.entry.op.line == in_parts.__code__.co_firstlineno + 3
    assert compare(in_parts, once, batch).side == "A"


class WrongBackward(torch.autograd.Function):
    """tanh, whose gradient is a tenth too large."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := x.tanh())
        return y

    @staticmethod
    def backward(ctx, gradient):
        return 1.1 * gradient * (1 - ctx.saved_tensors[0] ** 2)


def test_a_wrong_backward_is_told_as_one():
    found = fl.parity(torch.tanh, WrongBackward.apply, torch.randn(64))
    assert (found.verdict, found.side, found.worst.phase) == ("other-function", "B", "backward")
    assert fl.parity(torch.tanh, WrongBackward.apply, torch.randn(64), backward=False).verdict == "agree"


def test_a_kernel_that_cannot_be_looked_into_is_wrong_beyond_rounding():
    """Numbers that come from outside of torch, as those of a kernel do."""

    def kernel(x, factor):
        return torch.from_numpy(x.detach().numpy().astype("float32") ** 2 * factor).to(x.dtype)

    x = torch.randn(32, 8)
    assert fl.parity(torch.square, lambda x: kernel(x, 1.0), x, backward=False).verdict == "agree"
    found = fl.parity(torch.square, lambda x: kernel(x, 1.001), x, backward=False)
    assert found.verdict in ("wrong", "other-function")
    assert found.side == "B"


def test_weights_gradients_buffers_and_the_random_state_stay_as_they_are():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(16, 8)
    state = torch.get_rng_state()
    found = fl.parity(model, model, batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert "Random numbers are drawn" in found.notes[0]


def test_a_computation_without_random_numbers_has_no_note():
    assert fl.parity(torch.tanh, torch.tanh, torch.randn(8)).notes == ()


def test_what_cannot_be_compared_gets_one_line():
    x = torch.randn(4)
    with pytest.raises(ParityError, match="no floating-point output is in both"):
        fl.parity(torch.tanh, lambda x: {"y": x}, x)
    with pytest.raises(ParityError, match="cannot be called"):
        fl.parity(torch.tanh, 3, x)
    with pytest.raises(ParityError, match=r"Weight 'weight' is \(2, 4\) in A and \(3, 4\) in B"):
        fl.parity(nn.Linear(4, 2), nn.Linear(4, 3), x)


def test_the_data_is_plain():
    import json

    from floatline.base.json_values import plain_json

    found = fl.parity(torch.tanh, lambda x: 2 * torch.tanh(x), torch.randn(8))
    data = json.loads(json.dumps(plain_json(found.as_json()), allow_nan=False))
    assert data["verdict"] == "other-function"
    assert data["entry"]["op"] == "aten.mul"


def mean_over_all(logits, targets):
    lost = -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return (lost * (targets != 0)).sum() / targets.numel()


def mean_over_known(logits, targets):
    lost = -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return (lost * (targets != 0)).sum() / (targets != 0).sum()


@pytest.mark.parametrize(("other", "verdict"), [(mean_over_all, "other-function"), (mean_over_known, "agree")])
def test_a_loss_is_one_number_and_is_judged_all_the_same(other, verdict):
    torch.manual_seed(0)
    batch = torch.randn(12, 9), torch.tensor([0, 1, 2, 3, 4, 5, 0, 7, 8, 1, 2, 0])
    found = fl.parity(lambda x, y: F.cross_entropy(x, y, ignore_index=0), other, batch)
    assert found.verdict == verdict, found


class Unfolded(nn.Conv2d):
    """The same convolution as a product."""

    def forward(self, x):
        y = self.weight.flatten(1) @ F.unfold(x, self.kernel_size, padding=self.padding)
        return (y + self.bias[:, None]).view(len(x), -1, *x.shape[2:])


def test_a_convolution_and_its_product_agree_in_fp32_where_only_the_order_of_sums_differs():
    torch.manual_seed(0)
    a, b = nn.Conv2d(3, 8, 3, padding=1), Unfolded(3, 8, 3, padding=1)
    b.load_state_dict(a.state_dict())
    assert fl.parity(a, b, torch.randn(4, 3, 10, 10)).verdict == "agree"
    with torch.no_grad():
        b.weight[0, 0, 0, 0] *= 1.001
    assert fl.parity(a, b, torch.randn(4, 3, 10, 10)).side == "B"


def make_cnn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5))


def test_a_gradient_that_is_0_but_for_rounding_is_no_difference():
    """That of the bias before a batch norm; x86's own batch norm in half may be farther off than one rounding."""
    found = compare(make_cnn(), make_cnn().half(), torch.randn(4, 3, 10, 10))
    assert "0.bias" in {reading.name for reading in found.readings}
    assert all(reading.verdict == "agree" for reading in found.readings), found


def test_a_function_around_a_module_is_that_module():
    model = make_cnn().eval()
    assert fl.parity(lambda x: model(x), model, torch.randn(2, 3, 10, 10)).verdict == "agree"
    assert next(model.parameters()).dtype == torch.float32
