"""Fused attention with dropout: its FP32 twin drops the same weights, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from floatline.probe.trace import twin_rules
from floatline.probe.trace.recorder import Recorder
from floatline.probe.trace.twin_rules import RULES, Wide

SHAPE, KEYS, P = (2, 3, 5, 8), 7, 0.4


def by_hand(query, key, value, kept, p=P):
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return (weights * kept / (1 - p)) @ value


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(SHAPE, generator=generator)
    key, value = (torch.randn(2, 3, KEYS, 8, generator=generator) for _ in range(2))
    kept = torch.rand(*SHAPE[:-1], KEYS, generator=generator) > P
    return query, key, value, kept


def test_the_twin_of_a_kernel_drops_what_the_mask_says(parts, monkeypatch):
    query, key, value, kept = parts
    monkeypatch.setattr(twin_rules, "find_mask", lambda *_: kept)
    func = torch.ops.aten._scaled_dot_product_efficient_attention.default
    made = Wide(func, [query, key, value, None, True, P], {}, [query.half(), None, None, None])
    result = RULES["_scaled_dot_product_efficient_attention"](made)[0]
    torch.testing.assert_close(result, by_hand(query, key, value, kept))
    monkeypatch.setattr(twin_rules, "find_mask", lambda *_: ~kept)
    other = RULES["_scaled_dot_product_efficient_attention"](made)[0]
    assert not torch.allclose(result, other)


def test_the_twin_of_its_backward_is_what_autograd_gives(parts, monkeypatch):
    query, key, value, kept = parts
    monkeypatch.setattr(twin_rules, "find_mask", lambda *_: kept)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    out = by_hand(*leaves, kept)
    gradient = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    out.backward(gradient)
    func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    given = [gradient, query, key, value, out.detach(), None, None, None, 5, 7, P, False, None, None]
    outputs = [tensor.half() for tensor in (query, key, value)]
    found = RULES["_scaled_dot_product_flash_attention_backward"](Wide(func, given, {}, outputs))
    for one, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(one, leaf.grad)


class Attention(nn.Module):
    """Four heads; dropout on the attention weights."""

    def __init__(self, causal):
        super().__init__()
        self.into, self.out, self.causal = nn.Linear(64, 192), nn.Linear(64, 64), causal

    def forward(self, x):
        parts = self.into(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, dropout_p=0.25, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_on_a_gpu_the_twin_has_the_mask_of_the_kernel(backend, causal):
    def run(recorder):
        torch.manual_seed(0)
        model = Attention(causal).cuda()
        x = torch.randn(2, 40, 64, device="cuda")
        made = recorder(model)
        with sdpa_kernel(backend), made, torch.autocast("cuda", torch.float16):
            model(x).float().square().mean().backward()
        after = torch.rand(3, device="cuda")
        return made, after, {name: p.grad for name, p in model.named_parameters()}

    recorder, after, gradients = run(Recorder)
    assert recorder.trace.meta["twin_failures"] == {}
    fused = [op for op in recorder.trace.ops if "_scaled_dot_product" in op.name]
    assert {op.phase for op in fused} == {"forward", "backward"}
    # Another mask would make an error of the size of the values themselves. Gradients are small here, without a scale.
    assert all(op.outputs[0].error < 0.05 for op in fused), [(op.name, op.outputs[0].error) for op in fused]
    assert all(operand.value.error < 0.1 for operand in recorder.trace.gradients.values())
    _, plain_after, plain_gradients = run(lambda _: torch.enable_grad())
    assert torch.equal(after, plain_after)  # the random numbers go on as without the recorder
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-3, atol=1e-6)
