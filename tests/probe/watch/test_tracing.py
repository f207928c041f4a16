"""is_tracing and holds_numbers: torch at work on a program is told from a loop, and the watch leaves it in peace."""

import warnings
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.probe.watch import patches
from floatline.probe.watch.events import BackwardEvent, ClearEvent, ForwardEvent, GradEvent, StepEvent
from floatline.probe.watch.patches import CompilerWatch, holds_numbers, is_tracing
from floatline.probe.watch.watch import watch

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Spy:
    """Keeps what is_tracing says where it is called, and whether the tensors there hold numbers."""

    def __init__(self):
        self.traced, self.numbers = [], []

    def __call__(self, *tensors):
        self.traced.append(is_tracing())
        self.numbers += [holds_numbers(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
        return tensors[0] * 2 if tensors else None

    def as_module(self):
        spy = self

        class Inside(nn.Module):
            def forward(self, x):
                return spy(x)

        return Inside()


class Doubled(torch.autograd.Function):
    """A function whose backward pass is Python's."""

    seen: ClassVar[list] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        Doubled.seen.append(is_tracing())
        return gradient * 2


@pytest.fixture(autouse=True)
def cold():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize(
    "around",
    [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        HalfOnCPU,
        lambda: torch.autograd.set_detect_anomaly(True),
    ],
    ids=["plain", "no_grad", "inference", "autocast", "HalfOnCPU", "anomaly"],
)
def test_a_loop_is_not_traced(around):
    spy = Spy()
    with warnings.catch_warnings(), around():
        warnings.simplefilter("ignore")
        spy(X)
        spy.as_module()(X)
    assert spy.traced == [False, False]
    assert spy.numbers == [True, True]


def test_a_backward_pass_and_a_hook_of_it_are_not_traced():
    told, weight = [], torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: told.append(is_tracing()))
    weight.square().sum().backward()
    assert told == [False]


def test_a_backend_of_dynamo_is_called_while_torch_traces():
    told = []

    def backend(graph, inputs):
        told.append(is_tracing())
        return graph.forward

    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)
    compiled(X)
    assert told == [True]
    assert not is_tracing()


def test_compiled_code_that_runs_is_not_traced():
    told = []

    def backend(graph, inputs):
        def run(*args):
            told.append(is_tracing())
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)
    compiled(X)
    compiled(X)
    assert told == [False, False]


def test_aot_autograd_traces():
    from torch._dynamo.backends.common import aot_autograd

    told, ran = [], []

    def compile_part(graph, inputs):
        told.append(is_tracing())

        def run(args):
            ran.append(is_tracing())
            return graph(*args)

        run._boxed_call = True
        return run

    model = small()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compile_part, bw_compiler=compile_part))
    compiled(X).sum().backward()
    assert told == [True, True]
    assert ran == [False, False]


def test_a_backward_pass_in_python_is_traced_by_make_fx_and_not_by_a_loop():
    Doubled.seen = []
    x = X.clone().requires_grad_()
    Doubled.apply(x).sum().backward()
    assert Doubled.seen == [False]
    traced = make_fx(lambda v: torch.autograd.grad(Doubled.apply(v).sum(), v)[0])(x)
    assert Doubled.seen == [False, True]
    assert torch.equal(traced(x), torch.full_like(x, 2.0))


def test_an_export_is_traced():
    spy = Spy()
    torch.export.export(spy.as_module(), (X,), strict=False)
    assert spy.traced and all(spy.traced)
    assert spy.numbers and not any(spy.numbers)
    assert not is_tracing()


def test_vmap_and_grad_are_traced():
    spy = Spy()
    torch.func.vmap(spy)(X)
    torch.func.grad(lambda x: spy(x).sum())(X)
    assert spy.traced == [True, True]
    assert spy.numbers == [False, False]


def test_fake_tensors_make_a_trace():
    spy = Spy()
    with FakeTensorMode() as mode:
        spy(mode.from_tensor(X))
    assert (spy.traced, spy.numbers) == ([True], [False])


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_is_a_trace(mode):
    spy = Spy()
    make_fx(spy, tracing_mode=mode)(X)
    assert spy.traced == [True]


def test_a_symbolic_trace_is_a_trace():
    spy = Spy()
    torch.fx.symbolic_trace(spy.as_module())
    assert spy.traced == [True]
    assert not is_tracing()


def test_a_jit_trace_is_a_trace():
    spy = Spy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(spy.as_module(), (X,), check_trace=False)
    assert True in spy.traced
    assert not is_tracing()


def test_an_error_inside_of_a_trace_leaves_none_behind():
    def fail(x):
        assert is_tracing()
        raise ZeroDivisionError

    for transform in (torch.func.vmap(fail), torch.func.grad(fail), make_fx(fail)):
        with pytest.raises(ZeroDivisionError):
            transform(X)
        assert not is_tracing()


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        nn.Parameter(X.clone()),
        X.half(),
        X.to_sparse(),
        X[::2],
        torch.empty(0),
        torch.tensor(3),
        nn.Buffer(X.clone()),
        torch.full((2,), float("nan")),
    ],
    ids=["plain", "parameter", "half", "sparse", "view", "empty", "integer", "buffer", "nan"],
)
def test_a_tensor_with_numbers_holds_them(tensor):
    assert holds_numbers(tensor)


def test_fake_functional_wrapped_and_meta_tensors_hold_no_numbers():
    inside = Spy()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    torch.func.vmap(torch.func.grad(lambda x: inside(x).sum()))(X)
    torch.func.functionalize(inside)(X)
    assert not holds_numbers(fake)
    assert not holds_numbers(nn.Linear(2, 2, device="meta").weight)
    assert not holds_numbers(torch._to_functional_tensor(X))
    assert len(inside.numbers) == 2 and not any(inside.numbers)


# Transforms inside of a watched loop: each gives its result as a list of tensors.


def export(model):
    return [torch.export.export(model, (X,)).module()(X)]


def vmap(model):
    return [torch.func.vmap(model)(X)]


def grad(model):
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values):
        return torch.func.functional_call(model, values, (X,)).square().mean()

    return list(torch.func.grad(loss)(weights).values())


def per_sample(model):
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values, x):
        return torch.func.functional_call(model, values, (x[None],)).square().mean()

    return list(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, X).values())


def jacobian(model):
    return [torch.func.jacrev(model)(X[0]), torch.func.jacfwd(model)(X[0])]


def trace_symbolically(model):
    return [torch.fx.symbolic_trace(model)(X)]


def trace_to_proxies(model):
    return [make_fx(lambda x: model(x).square().mean())(X)(X)]


def trace_by_jit(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [torch.jit.trace(model, (X,))(X)]


def count_on_fakes(model):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = model(mode.from_tensor(X))
    return [torch.tensor(out.shape)]


def compile_aside(model):
    return [torch.compile(lambda x: model(x).square(), backend="aot_eager")(X)]


TRANSFORMS = [
    export,
    vmap,
    grad,
    per_sample,
    jacobian,
    trace_symbolically,
    trace_to_proxies,
    trace_by_jit,
    count_on_fakes,
    compile_aside,
]


def train(transform, model, num_steps=4):
    """A loop that transforms its model between two steps; what the transform gave, and the weights at the end."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = []
    for step in range(num_steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        if step == 1 and transform is not None:
            # Gradients are off, as in an evaluation: a pass with them would be one of the loop's.
            with torch.no_grad() if transform not in (grad, per_sample, jacobian) else nullcontext():
                given = transform(model)
    return [tensor.detach() for tensor in given], [p.detach() for p in model.parameters()]


def counts(seen):
    kinds = [type(event) for event in seen.events]
    return {kind: kinds.count(kind) for kind in (ForwardEvent, BackwardEvent, GradEvent, StepEvent, ClearEvent)}


@pytest.mark.parametrize("light", [True, False], ids=["light", "full"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=[transform.__name__ for transform in TRANSFORMS])
def test_a_transform_inside_of_a_watched_loop_is_none_of_its_steps(transform, light):
    alone, weights = train(transform, small())
    torch.compiler.reset()
    with watch(light=light) as seen:
        given, watched = train(transform, small())
    assert all(torch.equal(one, other) for one, other in zip(alone, given, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(weights, watched, strict=True))
    told = counts(seen)
    told.pop(ClearEvent)
    assert told == {ForwardEvent: 4, BackwardEvent: 4, GradEvent: 0, StepEvent: 4}
    assert seen.num_stepped == 4


def test_the_same_work_without_a_transform_is_counted():
    def once_more(model):
        with torch.enable_grad():
            return [torch.autograd.grad(model(X).sum(), list(model.parameters()))[0]]

    with watch() as seen:
        train(once_more, small())
    assert counts(seen)[ForwardEvent] == 5


def test_a_watched_loop_can_be_traced_as_a_whole():
    model = small()

    def loss(x):
        value = model(x).square().mean()
        gradients = torch.autograd.grad(value, list(model.parameters()))
        return value, gradients

    with watch(light=True) as seen:
        graph = make_fx(loss)(X)
    assert seen.events == []
    assert torch.equal(graph(X)[0], loss(X)[0])


def test_dynamo_leaves_the_watch_alone_only_for_as_long_as_it_watches():
    from torch._dynamo import trace_rules

    before = list(trace_rules.SKIP_DIRS)
    watch = CompilerWatch((), lambda: None)
    during, found = list(trace_rules.SKIP_DIRS), trace_rules.check_file(patches.__file__).skipped
    watch.undo()
    assert found
    assert len(during) > len(before)
    assert before == trace_rules.SKIP_DIRS
    assert not trace_rules.check_file(patches.__file__).skipped
