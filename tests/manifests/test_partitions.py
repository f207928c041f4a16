"""FP32 copies as Megatron and DeepSpeed keep them are found, also where one process holds a part of each."""

from types import SimpleNamespace

import pytest
import torch
from tests.manifests import toys

import floatline as fl
from floatline.precision.holding import formats_of

BF16 = torch.bfloat16


class MegatronShaped:
    """As Float16OptimizerWithFloat16Params: `main_param` on each weight, main gradients, an inner optimizer."""

    def __init__(self, model, *, part=slice(None)):
        self.weights = list(model.parameters())
        self.part = part  # of each weight, as a distributed optimizer has it
        for weight in self.weights:
            weight.main_param = weight.detach().flatten()[part].clone().float()
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW([weight.main_param for weight in self.weights], lr=1e-4)

    def step(self):
        for weight in self.weights:
            weight.main_grad.add_(weight.grad)
            weight.main_param.grad = weight.main_grad.flatten()[self.part].clone()
        self.optimizer.step()
        for weight in self.weights:
            weight.data.flatten()[self.part].copy_(weight.main_param)
            weight.grad = None


class DeepSpeedShaped:
    """As ZeRO's: one flat FP32 partition with a padding, of which `weight._hp_mapping.hp_fragment` is a view."""

    def __init__(self, model, *, share=1.0):
        self.weights = list(model.parameters())
        sizes = [max(1, int(share * weight.numel())) for weight in self.weights]
        flat = torch.zeros(sum(sizes) + 5)
        offset = 0
        for weight, size in zip(self.weights, sizes, strict=True):
            fragment = flat.narrow(0, offset, size)
            fragment.copy_(weight.detach().flatten()[:size])
            weight._hp_mapping = SimpleNamespace(hp_fragment=fragment)
            offset += size
        self.flat = flat.requires_grad_()
        self.optimizer = torch.optim.AdamW([self.flat], lr=1e-4)

    def step(self):
        gradients = [weight.grad.flatten()[: weight._hp_mapping.hp_fragment.numel()] for weight in self.weights]
        self.flat.grad = torch.cat([*gradients, torch.zeros(5, dtype=BF16)]).float()
        self.optimizer.step()
        for weight in self.weights:
            fragment = weight._hp_mapping.hp_fragment
            weight.data.flatten()[: fragment.numel()].copy_(fragment)
            weight.grad = None


def step_of(model, framework):
    """A step in which the framework's `step` is what the loop calls."""
    words = toys.words()

    def step():
        torch.nn.functional.cross_entropy(model(words).float().flatten(0, 1), words.flatten()).backward()
        framework.step()

    return step


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (MegatronShaped, {}),
        (MegatronShaped, {"part": slice(0, 40)}),
        (DeepSpeedShaped, {}),
        (DeepSpeedShaped, {"share": 0.5}),
    ],
    ids=["megatron", "megatron-distributed", "zero", "zero-half"],
)
def test_the_fp32_copy_is_found_in_every_group_and_no_update_is_called_lost(shape, named):
    model = toys.make(dtype=BF16)
    framework = shape(model, **named)
    found = fl.manifest(model, framework.optimizer, step=step_of(model, framework))
    assert found.summary.startswith("weights BF16 with a master copy in FP32")
    groups = {
        kind: {row.group for row in found.holdings if row.kind == kind} for kind in ("weights", "master", "states")
    }
    assert groups["master"] == groups["states"] == groups["weights"]
    assert "round" not in toys.text(found)
    held = sum(p.numel() for group in framework.optimizer.param_groups for p in group["params"])
    assert 0 <= held - formats_of(found.holdings, "master")["fp32"] < 6  # but for the padding
    assert fl.manifest(model, framework.optimizer).summary.startswith("weights BF16 with a master copy in FP32")


def test_a_main_gradient_is_told_with_its_format():
    model = toys.make(dtype=BF16)
    framework = MegatronShaped(model)
    found = fl.manifest(model, framework.optimizer, step=step_of(model, framework))
    assert formats_of(found.holdings, "accumulation").keys() == {"fp32"}


def test_a_weight_that_names_no_copy_has_none():
    model = toys.make(dtype=BF16)
    framework = MegatronShaped(model)
    for weight in framework.weights:
        other = weight.main_param.clone()
        del weight.main_param
        weight.own = other
    strangers = torch.optim.AdamW([torch.zeros(7, requires_grad=True)], lr=1e-4)
    assert "without a master copy" in fl.manifest(model, strangers).summary
