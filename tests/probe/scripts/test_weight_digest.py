"""Samples are spread evenly, without a pattern; a digest tells weights apart, and nothing else."""

import pytest
import torch
from torch import nn

from floatline.probe.scripts.weight_digest import MOST, digest_weights, sample


def test_a_small_tensor_is_looked_at_as_a_whole():
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(sample(x), torch.arange(12.0))
    assert torch.equal(sample(x.t()), x.t().reshape(-1))


@pytest.mark.parametrize("shape", [(4096, 256), (1000, 1000), (3, MOST)])
def test_a_large_tensor_is_met_at_every_column(shape):
    x = torch.arange(shape[1]).repeat(shape[0], 1).float()
    found = sample(x)
    assert MOST // 3 < found.numel() <= MOST
    if shape[1] < 2000:
        assert found.unique().numel() == shape[1]


def named(*tensors):
    return [(str(number), tensor) for number, tensor in enumerate(tensors)]


def test_equal_weights_have_one_digest_and_others_have_another():
    weights = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    other = weights.clone()
    other[3, 4] += 1e-6
    assert digest_weights(named(weights)) == digest_weights(named(weights.clone().requires_grad_()))
    assert digest_weights(named(weights)) != digest_weights(named(other))
    assert digest_weights(named(weights)) != digest_weights(named(weights.view(30, 40)))
    assert digest_weights(named(weights)) != digest_weights([("other", weights)])


def test_what_a_process_holds_a_part_of_is_left_out():
    class FlatParameter(nn.Parameter):
        """Named as that of FSDP's first version is."""

    part = FlatParameter(torch.ones(3))
    assert digest_weights(named(part)) == digest_weights([])
    assert digest_weights(named(part.data)) != digest_weights([])
