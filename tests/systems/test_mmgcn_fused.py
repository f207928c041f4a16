"""Gathering and summing in one kernel: exact sums, FP32 inside, empty nodes, and the same model as with messages."""

from itertools import pairwise

import pytest
import torch

from floatline import HalfOnCPU
from floatline.systems import mmgcn
from floatline.systems.mmgcn.messages import Neighbours

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def graph(*, num_nodes, most, seed=0):
    """Sources and starts of nodes with no, one, many neighbours."""
    dice = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, most + 1, (num_nodes,), generator=dice)
    degrees[0], degrees[-1] = 0, most
    starts = torch.nn.functional.pad(degrees.cumsum(0), (1, 0))
    sources = torch.randint(0, num_nodes, (int(starts[-1]),), generator=dice).to(torch.int32)
    return sources.to(DEVICE), starts.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 24, 600])
def test_each_sum_is_rounded_once(dtype, width):
    fused_sum = pytest.importorskip("floatline.systems.mmgcn.fused_sum", reason="triton is not installed")
    sources, starts = graph(num_nodes=9, most=37)
    x = (torch.randn(9, width, generator=torch.Generator().manual_seed(1)) * 100).to(DEVICE, dtype)
    found = fused_sum.sum_rows(x, sources, starts)
    rows = [x[sources[a:b].long()].double() for a, b in pairwise(starts)]
    exact = torch.stack([part.sum(0) for part in rows])
    sizes = torch.stack([part.abs().sum(0) for part in rows])
    # Triton's interpreter cuts bfloat16 off where a GPU rounds: a whole unit instead of half of one.
    half_unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8 if CUDA else 2**-7, torch.float32: 2**-24}[dtype]
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= exact.abs() * half_unit + sizes * 37 * 2**-24).all()
    assert not found[0].any()  # no neighbour


def test_a_sum_rounded_after_each_message_is_outside_of_that_bound():
    x = torch.ones(5000, 1).half()
    total = torch.zeros(1).half()
    for row in x:
        total = total + row
    assert abs(float(total) - 5000) > 5000 * 2**-11 + 5000 * 5000 * 2**-24


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_messages_of_one_size_do_not_stand_still(dtype):
    leaves, centre = torch.arange(1, 5001), torch.zeros(5000, dtype=torch.long)
    edges = torch.stack([torch.cat([leaves, centre]), torch.cat([centre, leaves])])
    edges = edges[:, edges[1].argsort(stable=True)]
    hub = Neighbours(edges, 5001, "fused").to(DEVICE)
    with HalfOnCPU():
        assert float(hub(torch.ones(5001, 2, dtype=dtype, device=DEVICE))[0, 0]) == pytest.approx(1.0, rel=4e-3)


def test_the_model_has_the_values_and_gradients_that_it_has_with_messages():
    found = []
    for aggregation in ("grouped", "fused"):
        sizes = {"num_users": 60, "num_items": 30, "dim_id": 8, "dim_latent": 8, "batch_size": 64}
        workload = mmgcn.build(mmgcn.Config(**sizes, aggregation=aggregation))
        workload.model.to(DEVICE)
        batch = tuple(tuple(tensor.to(DEVICE) for tensor in part) for part in workload.batches[0])
        loss = workload.compute_loss(*batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in workload.model.parameters())])
    for grouped, fused in zip(*found, strict=True):
        torch.testing.assert_close(grouped, fused, rtol=1e-4, atol=1e-7)
