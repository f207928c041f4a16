"""FP32 copies as Megatron and DeepSpeed keep them are found, also where one process holds a part of each."""

from types import SimpleNamespace

import pytest
import torch
from tests.manifests import toys
from torch import nn

import floatline as fl
from floatline.manifests.surroundings import find_exchanges
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


class ThirdStageShaped:
    """As ZeRO's third stage: weights are freed, a flat FP32 part is stepped, and the optimizer forgets it again."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self.grad_position, offset = {}, 0
        for number, weight in enumerate(self.weights):
            half = max(1, weight.numel() // 2)
            weight.ds_id, weight.whole = number, weight.data
            weight.ds_tensor = weight.detach().flatten()[:half].clone()
            self.grad_position[number] = [0, offset, half]
            weight._z3_optimizer = self
            offset += half
        self.fp32_partitioned_groups_flat = [torch.cat([w.ds_tensor for w in self.weights]).float()]
        self.optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-4)
        self.optimizer.param_groups[0]["params"] = []

    def get_param_id(self, weight):
        return weight.ds_id

    def step(self):
        flat = self.fp32_partitioned_groups_flat[0].requires_grad_()
        flat.grad = torch.cat([w.grad.flatten()[: w.ds_tensor.numel()] for w in self.weights]).float()
        self.optimizer.param_groups[0]["params"] = [flat]
        self.optimizer.step()
        self.optimizer.param_groups[0]["params"] = []
        for weight in self.weights:
            weight.grad, weight.data = None, torch.empty(0, dtype=BF16)


def test_what_the_third_stage_has_freed_is_read_from_its_parts():
    model = toys.make(dtype=BF16)
    framework = ThirdStageShaped(model)
    found = fl.manifest(model, framework.optimizer, step=step_of(model, framework))
    assert found.summary.startswith("weights BF16 with a master copy in FP32, gradients BF16, states FP32")
    held = sum(weight.ds_tensor.numel() for weight in framework.weights)
    assert formats_of(found.holdings, "weights") == {"bf16": held}
    assert formats_of(found.holdings, "master") == {"fp32": held}


def test_a_copy_that_another_process_keeps_is_no_missing_copy():
    model = toys.make(dtype=BF16)
    framework = DeepSpeedShaped(model)
    for weight in list(framework.weights)[-2:]:
        weight._hp_mapping = None  # as DeepSpeed marks those of another process
    found = fl.manifest(model, framework.optimizer)
    assert found.lines == ()
    for weight in list(framework.weights)[-2:]:
        del weight._hp_mapping
    (line,) = fl.manifest(model, framework.optimizer).lines
    assert "without a master copy" in line.text


class DeepSpeedEngine(nn.Module):
    """What DeepSpeed's says of itself."""

    communication_data_type = BF16

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (DeepSpeedEngine, ("deepspeed", "bf16")),
        (lambda net: megatron(net, wide=False), ("megatron", "bf16")),
        (lambda net: megatron(net, wide=True), ("megatron", "fp32")),
    ],
    ids=["deepspeed", "megatron", "megatron-fp32"],
)
def test_what_a_framework_reduces_in_is_told(wrap, said):
    (row,) = find_exchanges([wrap(toys.make(dtype=BF16))])
    assert (row.kind, row.reduce) == said


def megatron(net, *, wide):
    net.ddp_config = SimpleNamespace(grad_reduce_in_fp32=wide)
    return net


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
