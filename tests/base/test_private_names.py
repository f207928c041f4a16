"""Private names of torch and the frameworks: all are listed, all are there, and what is promised without them holds."""

import ast
import functools
import importlib
import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch
from tests.base.private_uses import is_private, parse, private_uses
from tests.preloaded import run_preloaded
from tests.slow import slow
from tools.private_page import PAGE, page
from torch import nn

import floatline
import floatline as fl
from floatline.base.private_names import PRIVATES, explain_missing
from floatline.numerics import foreach

ROOT = Path(floatline.__file__).parent
LISTED = [name for private in PRIVATES for name in private.names]
# Python's own, which its manual describes.
PYTHONS = {"_exit", "_getframe", "_fields", "_make"}
# floatline's own, reached by another class or function than the one that has it.
OWN = {"_add", "_begun", "_guests", "_layout", "_pieces", "_read_gradients", "_roster", "_set", "_tally", "_writer"}


# DeepSpeed's, asked of a weight with a default; that package is not among those that are installed.
ASKED = {"_hp_mapping", "_z3_optimizer"}


@functools.cache
def used() -> dict[str, set[str]]:
    found = private_uses(parse(ROOT))
    return {name: modules for name, modules in found.items() if name not in PYTHONS | OWN | ASKED}


def listed_words() -> set[str]:
    return {word for name in LISTED for word in name.replace("()", "").split(".") if is_private(word)}


def test_every_private_name_in_the_sources_is_listed():
    listed = {*LISTED, *(name.rpartition(".")[0] for name in LISTED), *listed_words()}
    assert {name: modules for name, modules in used().items() if name not in listed} == {}


def test_every_listed_name_is_in_the_sources():
    found = {word for name in used() for word in (name, name.rpartition(".")[2])}
    found |= {f"_foreach_{name}" for name in vars(foreach)}  # looked up by a name that is put together
    # Of a public name in a private module the module is what is private.
    private = [[word for word in name.replace("()", "").split(".") if is_private(word)][-1] for name in LISTED]
    last = [name.rpartition(".")[2] for name in LISTED]
    assert [name for name, *words in zip(LISTED, private, last, strict=True) if not found & set(words)] == []


def test_uses_of_private_names_are_found_however_they_are_written():
    source = """
from torch._ops import OpOverload
import torch._inductor.config
class Own(Base):
    def __init__(self): self._mine = 1
    def f(self): return self._mine, self._theirs, torch._C._a, getattr(torch, "_b", None), hasattr(torch, "_c")
"""
    expected = {"torch._ops.OpOverload", "torch._inductor.config", "_theirs", "_C", "_a", "_b", "_c"}
    assert set(private_uses({"m": ast.parse(source)})) == expected


PARAM = nn.Parameter(torch.ones(1))
INSTANCES = {
    "torch.autograd.graph.Node": lambda: (torch.ones(1, requires_grad=True) * 2.0).grad_fn,
    "torch.optim.Optimizer": lambda: torch.optim.SGD([PARAM], lr=0.1),
    "torch.optim.AdamW": lambda: torch.optim.AdamW([PARAM], fused=True),
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu"),
    "torch.autograd.Node": lambda: (PARAM * 2).grad_fn,
    "torch.Tensor": lambda: torch.ones(1),
    "torch.nn.Module": lambda: nn.Linear(1, 1),
    "torch.fx.GraphModule": lambda: torch.fx.symbolic_trace(nn.Linear(1, 1)),
    "torch.nn.LSTM": lambda: nn.LSTM(1, 1),
    "torch.UntypedStorage": lambda: torch.ones(1).untyped_storage(),
    "torch.autocast": lambda: torch.autocast("cpu"),
    "torch.compile": lambda: torch.compile(nn.Linear(1, 1), backend="eager"),
    "torch.compile.dynamo_ctx.callback": lambda: torch.compile(nn.Linear(1, 1), backend="eager").dynamo_ctx.callback,
    "torch.optim.lr_scheduler.SequentialLR": lambda: torch.optim.lr_scheduler.SequentialLR(
        (optimizer := torch.optim.SGD([PARAM], lr=0.1)),
        [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)],
        milestones=[2],
    ),
}
# Loading a framework takes seconds, and reading one file of it none.
FILES = {
    "lightning.pytorch.plugins": "pytorch/plugins/precision/precision.py",
    "lightning.pytorch.loops": "pytorch/loops/training_epoch_loop.py",
    "transformers.Trainer": "trainer.py",
    "accelerate.state": "state.py",
    "accelerate.Accelerator": "accelerator.py",
    "mlflow.tracking": "tracking/fluent.py",
}


def is_there(name: str) -> bool:
    """Whether the installed package has a listed name."""
    owner, _, last = name.rpartition(".")
    if not name.startswith("torch."):
        package = name.partition(".")[0]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        file = next(file for start, file in FILES.items() if name.startswith(start))
        return re.search(rf"\b{last}\b", (Path(spec.origin).parent / file).read_text("utf-8")) is not None
    if owner.endswith("()"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return hasattr(INSTANCES[owner[:-2]](), last)
    try:
        return hasattr(importlib.import_module(owner), last)
    except ImportError:
        pass
    found, gone = torch, object()
    for word in name.split(".")[1:]:
        found = getattr(found, word, gone)
    return found is not gone


# Parts of FSDP2 exist in a process group only; test_half_a_step_leaves_nothing_behind tells when they change.
LOOKED_UP = [name for name in LISTED if ".fsdp." not in name and name != "torch.cuda._compile_kernel"]


@pytest.mark.parametrize("name", LOOKED_UP)
def test_the_installed_versions_have_every_listed_name(name):
    assert is_there(name), f"{name} is gone: see its entry in base/private_names.py"


def test_a_name_that_is_gone_would_be_told():
    for name in ("torch._C._never", "torch.amp.GradScaler()._never", "torch._never.x"):
        assert not is_there(name)


def test_the_page_shows_the_list():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/private_page.py"


def test_counting_on_a_gpu_needs_no_compiler_of_torch(monkeypatch):
    from floatline.numerics.tally import tally_cuda

    monkeypatch.setattr(torch.cuda, "_compile_kernel", print, raising=False)
    assert tally_cuda.takes(torch.ones(1))
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    assert not tally_cuda.takes(torch.ones(1))


def train_a_little():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = fl.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_where_torch_does_not_say_who_listens_its_wrapper_is_called(monkeypatch):
    from floatline.optim import optimizer as steps

    optimizer, expected = fl.optim.SGD([PARAM], lr=0.1), train_a_little()
    assert not steps.is_heard(optimizer)
    monkeypatch.setattr(steps, "_SHARED", object())
    assert steps.is_heard(optimizer)
    assert torch.equal(train_a_little(), expected)


def test_without_a_private_switch_the_public_one_keeps_the_compiler_out(monkeypatch):
    from floatline.optim import optimizer as steps

    asked = []
    monkeypatch.setattr(torch.compiler, "disable", lambda function: asked.append(function) or function)
    assert steps.uncompiled(print) is not None
    assert asked == []
    monkeypatch.delattr(torch, "_disable_dynamo")
    assert steps.uncompiled(print) is print
    assert asked == [print]


def test_a_fused_optimizer_that_does_not_say_so_is_stepped_as_a_plain_one(monkeypatch):
    def train(*, fused):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        if not fused:
            del optimizer._step_supports_amp_scaling
        guard = fl.Guard(model, optimizer, plan="fp32")
        for number in range(3):
            scale = float("nan") if number == 1 else 1.0
            guard.step(lambda x, s=scale: model(x).square().mean() * s, torch.ones(1, 3))
        return guard, torch.cat([param.detach().flatten() for param in model.parameters()])

    (one, weights), (other, expected) = train(fused=False), train(fused=True)
    assert (one._stepper.kind, other._stepper.kind) == ("plain", "fused")
    assert torch.allclose(weights, expected, atol=1e-6)
    assert one.summary() == other.summary()


def test_fsdp_without_its_groups_is_left_alone():
    from floatline.precision.wrappers import drop_gradients

    model = nn.Linear(1, 1)
    model._get_fsdp_state = lambda: object()
    drop_gradients(model)


def test_a_compiled_model_without_the_name_is_its_own(monkeypatch):
    from floatline.precision.wrappers import unwrap

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod = nn.Linear(1, 1)

    model = Compiled()
    assert unwrap(model) is model._orig_mod
    del model._orig_mod
    assert unwrap(model) is model


TARGET = """
import torch
def build(seed=0):
    batches = [((torch.ones(2, 3),), (torch.zeros(2, 2),))]
    make_optimizer = lambda model: torch.optim.SGD(model.parameters(), 0.1)
    return torch.nn.Linear(3, 2), batches, torch.nn.MSELoss(), "fp16-mixed", make_optimizer
"""


@slow
@pytest.mark.parametrize(
    ("owner", "name"),
    [("torch._C", "_dispatch_get_all_op_names"), ("torch.utils._python_dispatch", "TorchDispatchMode")],
)
def test_a_name_without_a_fallback_is_one_line_on_the_command_line(tmp_path, owner, name):
    (tmp_path / "target.py").write_text(TARGET)
    # In the fork, torch and floatline are loaded: take out what would be loaded with the name gone.
    program = f"""
import importlib, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # half arithmetic is simulated on a CPU alone
owner = importlib.import_module("torch.utils._python_dispatch") if "dispatch" in "{owner}" else __import__("torch")._C
for loaded in [module for module in sys.modules if module.startswith("floatline")]:
    del sys.modules[loaded]
delattr(owner, "{name}")
from floatline.cli.main import main
sys.argv = ["floatline", "train", "target.py", "--steps", "1"]
main()
"""
    run = run_preloaded(["-c", program], cwd=tmp_path)
    assert run.returncode == 2, run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    assert f"has no '{owner}.{name}', which floatline" in run.stderr


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'Mine' object has no attribute '_scale'", name="_scale", obj=object()),
        AttributeError("module 'torch' has no attribute '_foreach_add_'"),  # has a fallback
        AttributeError("module 'torch._C' has no attribute '_current_autograd_node'"),  # it is there
        ImportError("No module named 'mine'"),
        ValueError("TorchDispatchMode"),
    ],
)
def test_other_errors_are_not_put_down_to_private_names(error):
    assert explain_missing(error) is None


def test_an_attribute_of_torchs_scaler_is_told_by_its_class():
    scaler = torch.amp.GradScaler("cpu")
    try:
        del scaler._scale
        scaler._scale  # noqa: B018
    except AttributeError as error:
        assert "has no 'torch.amp.GradScaler()._scale'" in explain_missing(error)
    else:
        raise AssertionError
