"""A model on a GPU is evaluated by a function that keeps its data on the CPU. Fake tensors stand in for the GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

import floatline as fl
from floatline.training.placement import callable_from_cpu
from floatline.training.trainer import Trainer
from floatline.workload import Workload

GPU = torch.device("cuda", 0)


class Model(nn.Module):
    """Takes indices; answers with a mapping, as many a library's model does."""

    def __init__(self, device="cpu", fill=torch.randn):
        super().__init__()
        self.embed = nn.Parameter(fill(5, 4, device=device))
        self.head = nn.Parameter(fill(3, 4, device=device))

    def forward(self, tokens, *, bias=None):
        if tokens.ndim != 1:
            raise ValueError("one row of tokens")
        logits = F.linear(F.embedding(tokens, self.embed), self.head)
        return {"logits": logits if bias is None else logits + bias, "places": [tokens.device]}


@pytest.fixture
def on_gpu():
    """A model whose weights say that they are on a GPU."""
    with FakeTensorMode(), torch.no_grad():
        yield Model(GPU, torch.empty)


def test_without_help_indices_on_the_cpu_do_not_meet_weights_on_a_gpu(on_gpu):
    with pytest.raises(RuntimeError, match="device"):
        on_gpu(torch.arange(5))


def test_a_model_called_with_tensors_on_the_cpu_computes_on_its_device_and_answers_on_the_cpu(on_gpu):
    with callable_from_cpu(on_gpu, GPU):
        answer = on_gpu(torch.arange(5), bias=torch.ones(3))
        F.cross_entropy(answer["logits"], torch.arange(5) % 3)  # targets on the CPU, too
    assert answer["places"] == [GPU] and answer["logits"].device.type == "cpu"


def test_a_call_with_tensors_on_the_device_answers_there(on_gpu):
    with callable_from_cpu(on_gpu, GPU):
        assert on_gpu(torch.arange(5, device=GPU))["logits"].device == GPU
        with pytest.raises(RuntimeError, match="device"):  # mixed on purpose or by mistake: not ours to say
            on_gpu(torch.arange(5, device=GPU), bias=torch.ones(3))


def test_a_call_that_fails_leaves_the_next_one_as_it_would_be(on_gpu):
    with callable_from_cpu(on_gpu, GPU):
        with pytest.raises(ValueError, match="one row"):
            on_gpu(torch.ones(2, 2, dtype=torch.int64))
        assert on_gpu(torch.arange(5, device=GPU))["logits"].device == GPU
        assert on_gpu(torch.arange(5))["logits"].device.type == "cpu"


def test_afterwards_and_on_a_cpu_nothing_hangs_on_the_model(on_gpu):
    with callable_from_cpu(on_gpu, GPU):
        assert on_gpu._forward_pre_hooks
    assert not on_gpu._forward_pre_hooks and not on_gpu._forward_hooks
    with callable_from_cpu(on_gpu, torch.device("cpu")):
        assert not on_gpu._forward_pre_hooks


@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed", "bf16-true"])
def test_a_run_is_measured_by_a_function_whose_data_are_on_the_cpu(plan):
    """On a machine with a GPU, the run is there."""
    tokens, targets = torch.arange(5), torch.arange(5) % 3

    def held_out_loss(model):
        return float(F.cross_entropy(model(tokens)["logits"], targets))

    def loss_fn(answer, targets):
        return F.cross_entropy(answer["logits"].float(), targets)

    torch.manual_seed(0)
    workload = Workload(
        Model(),
        [((tokens,), (targets,))],
        loss_fn,
        plan,
        lambda model: fl.optim.AdamW(model.parameters(), lr=0.1),
        held_out_loss,
    )
    result = Trainer(workload, folder=None, steps=20).run()
    assert result.metric < result.first_loss


def test_a_loss_that_is_a_module_is_where_the_model_is():
    """Its weights of the classes are its own buffer."""
    torch.manual_seed(0)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    batches = [((torch.randn(4, 6),), (torch.tensor([0, 1, 2, 0]),))]
    workload = Workload(
        nn.Linear(6, 3), batches, loss_fn, "fp32", lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )
    trainer = Trainer(workload, folder=None, steps=2)
    assert loss_fn.weight.device.type == trainer.device.type
    assert trainer.run().applied == 2
