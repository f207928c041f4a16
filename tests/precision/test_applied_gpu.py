"""An applied plan on a GPU: CUDA's autocast, recomputation in its own thread, and compiled callers."""

import pytest
import torch
from tests.precision import losses_for_plans as losses
from torch import nn
from torch.utils.checkpoint import checkpoint

from floatline.plans import KeptFunction, Plan, Rewrite
from floatline.precision.applied_plan import AppliedPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MIXED = {"weights": "fp32", "compute": "fp16"}


@pytest.fixture
def kept():
    plan = Plan(name="mine", **MIXED, fp32_functions=(KeptFunction(function="losses_for_plans.py:dice"),))
    applied = AppliedPlan(nn.Linear(2, 2), plan)
    yield
    applied.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_in_fp32_in_the_threads_of_autograd(kept, reentrant):
    t = torch.ones(4096, device="cuda")

    def gradient(run):
        x = torch.linspace(-4, 4, 4096, device="cuda").requires_grad_()
        with torch.autocast("cuda", torch.float16):
            run(lambda x: losses.dice(x.half(), t), x).backward()
        return x.grad

    plain = gradient(lambda f, x: f(x))
    assert torch.equal(gradient(lambda f, x: checkpoint(f, x, use_reentrant=reentrant)), plain)


def test_a_compiled_caller_gets_the_fp32_function(kept):
    x, t = torch.randn(4096, device="cuda").half(), torch.ones(4096, device="cuda").half()
    compiled = torch.compile(lambda x, t: losses.dice(x * 2, t) + 1)
    assert torch.equal(compiled(x, t), losses.dice((x * 2).float(), t.float()) + 1)


def test_autocast_refuses_binary_cross_entropy_and_takes_its_rewrite():
    x, t = torch.randn(64, device="cuda"), torch.ones(64, device="cuda")
    loss_fn = lambda x, t: nn.functional.binary_cross_entropy(torch.sigmoid(x), t)  # noqa: E731
    plan = Plan(name="mine", **MIXED, rewrites=(Rewrite(kind="bce-with-logits", function="loss"),))
    applied = AppliedPlan(nn.Linear(2, 2), plan, loss_fn=loss_fn)
    with torch.autocast("cuda", torch.float16):
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            loss_fn(x, t)
        loss = applied.loss_fn(x, t)
    torch.testing.assert_close(loss, nn.functional.binary_cross_entropy_with_logits(x, t))
