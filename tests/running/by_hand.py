"""The same loop twice: as a script that knows of no precision, and by hand with autocast and GradScaler."""

import torch
from torch import nn

from floatline.plans import Plan
from floatline.plans.plan import Scaling
from floatline.running.plan_in_force import plan_in_force

SCALING = Scaling(init_scale=2.0**12, growth_interval=3)


def fp16_plan(**changes):
    return Plan(**{"name": "mixed", "weights": "fp32", "compute": "fp16", "scaling": SCALING, **changes})


class Plain:
    """What a script in FP32 does."""

    by_hand = False

    def call(self, model, *inputs):
        return model(*inputs)

    def backward(self, loss, **options):
        loss.backward(**options)

    def grads(self, loss, inputs, **options):
        return torch.autograd.grad(loss, inputs, **options)

    def unscale(self, *optimizers):
        pass

    def step(self, *optimizers):
        for optimizer in optimizers:
            optimizer.step()

    def unscaled(self, grad):
        return grad


class ByHand:
    """The same with mixed precision, as torch's documentation writes it."""

    by_hand = True

    def __init__(self, scaling=SCALING):
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=scaling.init_scale,
            growth_factor=scaling.growth_factor,
            backoff_factor=scaling.backoff_factor,
            growth_interval=scaling.growth_interval,
        )

    def call(self, model, *inputs):
        with torch.autocast("cpu", torch.float16):
            found = model(*inputs)
        return found.float()

    def backward(self, loss, **options):
        self.scaler.scale(loss).backward(**options)

    def grads(self, loss, inputs, **options):
        found = torch.autograd.grad(self.scaler.scale(loss), inputs, **options)
        return [grad * (1.0 / self.scaler.get_scale()) for grad in found]

    def unscale(self, *optimizers):
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)

    def step(self, *optimizers):
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def unscaled(self, grad):
        return grad * (1.0 / self.scaler.get_scale())


def small_model(seed=0, **options):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8, **options), nn.Tanh(), nn.Linear(8, 4, **options))


def batches(num=6, size=6, seed=1):
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, size, generator=made), torch.randn(5, 4, generator=made)) for _ in range(num)]


def run_both(train, scaling=SCALING, **plan):
    """What a loop gives under a plan from outside, and by hand; and the plan in force."""
    by_hand = train(ByHand(scaling))
    with plan_in_force(fp16_plan(scaling=scaling, **plan)) as force:
        outside = train(Plain())
    return outside, by_hand, force


def bits(value):
    """Tensors of a nested structure as numbers that compare equal only where every bit is."""
    if isinstance(value, nn.Module):
        return bits(list(value.state_dict().values()))
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.to_dense() if value.is_sparse else value
        kinds = {4: torch.int32, 2: torch.int16, 8: torch.int64}
        flat = value.contiguous()
        whole = flat.view(kinds[flat.element_size()]) if flat.is_floating_point() else flat
        return str(value.dtype), whole.tolist()
    if isinstance(value, dict):
        return {str(key): bits(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [bits(one) for one in value]
    return value


def state_of(optimizer):
    return bits([optimizer.state[p] for group in optimizer.param_groups for p in group["params"]])
