"""The optimizers on a real GPU, through their public face."""

import pytest
import torch

from floatline.optim import SGD, AdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]


def make_params(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 32), (1000,), (7,), (3, 5, 3, 3), (0,)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [torch.nn.Parameter(value.to(dtype).cuda()) for value in values]


def set_grads(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * 1e-2
        param.grad = (grad * scale).to(param.dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_200_steps_are_those_of_torch_on_float32_weights(dtype):
    ours, theirs = make_params(dtype), [torch.nn.Parameter(p.detach().float()) for p in make_params(dtype)]
    optimizer = AdamW(ours, lr=1e-3, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1)
    for step in range(200):
        set_grads(ours, step)
        for ours_one, theirs_one in zip(ours, theirs, strict=True):
            theirs_one.grad = ours_one.grad.float()
        optimizer.step()
        reference.step()
    model = torch.nn.ParameterList(ours)
    for name, master in optimizer.master_state_dict(model).items():
        expected = theirs[int(name)].detach().cpu()
        torch.testing.assert_close(master.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_a_guarded_step_never_waits_for_the_gpu():
    params = make_params(torch.float16)
    optimizer = AdamW(params, lr=torch.tensor(1e-3, device="cuda"))
    scale = torch.tensor(1024.0, device="cuda")
    set_grads(params, 0, 1024.0)
    optimizer.step(scale=scale, clip_norm=1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step(scale=scale, clip_norm=1.0)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(optimizer.decision is None)
    assert all(param.isfinite().all() for param in params)


def test_a_step_can_be_captured_in_a_graph_and_skips_inside_it():
    params = make_params(torch.bfloat16)
    optimizer = AdamW(params, lr=1e-3)
    set_grads(params, 0)
    optimizer.step(clip_norm=1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(clip_norm=1.0)
    graph.replay()
    before = [param.detach().clone() for param in params]
    params[1].grad[3] = float("nan")
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    params[1].grad[3] = 0.0
    graph.replay()
    assert not torch.equal(before[0], params[0])


def test_torch_s_own_scaler_drives_float16_weights():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).half().cuda()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20)
    x = torch.randn(64, 16, device="cuda").half()
    y = x.sum(dim=1, keepdim=True) / 4
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x).float(), y.float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    assert scaler.get_scale() < 2.0**20  # it had to search: some steps were skipped
    assert all(p.isfinite().all() for p in model.parameters())
